from __future__ import annotations

import time

import pytest

from covary.rewards import EXTRACTORS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("27", "27"),
        ("The sum of 3 and 4 is 7.", "7"),
        ("total = 1,234.50.", "1234.50"),
        ("1, 2, 3", "3"),
        ("it is -5", "-5"),
        ("it is \u22125", "-5"),
        ("x=-5", "-5"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("12 - 5", "5"),
        ("+7", "7"),
        ("about .5", ".5"),
        ("1.5e-3 m", "1.5e-3"),
        ("three quarters is 3/4", "3/4"),
        ("the answer is...27", "27"),
        ("答案是27", "27"),
        ("27th", "27"),
        ("10 molecules of H2O in v2.5", "10"),
        ("$\\boxed{12}$", "12"),
        ("no digits", None),
        ("", None),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert EXTRACTORS["last_number"](text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{4}", "4"),
        (r"first \boxed{3}, no: \boxed{4}", "4"),
        (r"\boxed{4}, or rather \boxed{5", "4"),
        (r"\boxed{5", None),
        (r"write \boxed , then \boxed{ 5 }", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"} stray, \boxed{4} and {open", "4"),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        ("nothing", None),
    ],
)
def test_boxed(text: str, expected: str | None) -> None:
    assert EXTRACTORS["boxed"](text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("<think>say <answer>3</answer></think><answer>4</answer>", "4"),
        ("<think><answer>3</answer></think> I give up", None),
        ("<answer>4</answer> and <answer>5", "4"),
        ("<answer>4", None),
        ("4</answer>", None),
        ("<answer></answer>", ""),
        ("<answer>two\nlines</answer>", "two\nlines"),
    ],
)
def test_answer_tag(text: str, expected: str | None) -> None:
    assert EXTRACTORS["answer_tag"](text) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("none", " a\nb \n", "a\nb"),
        ("none", "", ""),
        ("last_line", "a\n b \n\n", "b"),
        ("last_line", "a\r\nb", "b"),
        ("last_line", " \n ", None),
    ],
)
def test_whole_text_and_last_line(name: str, text: str, expected: str | None) -> None:
    assert EXTRACTORS[name](text) == expected


@pytest.mark.parametrize("name", EXTRACTORS)
@pytest.mark.parametrize("piece", [r"\boxed{", "<answer>", "1,111", "-", "{", "\n", "9"])
def test_time_is_linear_in_hostile_text(name: str, piece: str) -> None:
    started = time.perf_counter()
    EXTRACTORS[name](piece * 50_000)
    assert time.perf_counter() - started < 2
