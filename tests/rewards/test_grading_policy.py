"""docs/grading.md is run row by row; then real case tables, and text that is meant to break a grader."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covary.rewards import EXTRACTORS, GRADERS, grade
from covary.rewards.choice import choice
from covary.rewards.extract import stated_answer

PAGE = Path(__file__).parents[2] / "docs" / "grading.md"
_ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (correct|incorrect|unparsable|none) \|$")


def verdict(grader: str, completion: str, answer: str | None, **columns: Any) -> str:
    said = grade(grader, completion, answer, columns)
    return "none" if said is None else said.verdict


def documented() -> list[tuple[str, str, str, str]]:
    rows, grader = [], "math"
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            grader = line[3:] if line[3:] in GRADERS else "math"
        if match := _ROW.match(line):
            rows.append(
                (grader, match[1], match[2].replace(r"\n", "\n") if r"\neq" not in match[2] else match[2], match[3])
            )
    return rows


@pytest.mark.parametrize(("grader", "answer", "completion", "expected"), documented())
def test_the_policy_is_what_its_page_says(grader: str, answer: str, completion: str, expected: str) -> None:
    assert verdict(grader, completion, answer) == expected


def test_the_page_has_a_table_for_every_grader_of_text() -> None:
    assert {row[0] for row in documented()} == set(GRADERS) - {"reasoning_gym"}
    assert "## reasoning_gym" in PAGE.read_text(encoding="utf-8")


def test_columns_give_the_tolerance() -> None:
    assert verdict("math", r"\boxed{0.33}", r"\frac13") == "incorrect"
    assert verdict("math", r"\boxed{0.33}", r"\frac13", tolerance=0.01) == "correct"
    assert verdict("math", r"\boxed{(0.33, 2)}", r"(\frac13, 2)", tolerance=0.01) == "correct"
    assert verdict("numeric", "3.3", "3.4", tolerance=0.04) == "correct"
    assert verdict("numeric", "3.3", "3.4", tolerance=0.02) == "incorrect"


def test_the_prompt_gives_no_answer() -> None:
    # The prompt held "Put the result in \\boxed{}. Example: \\boxed{7}."; graders see the completion alone.
    said = grade("math", "I think it is seven.", "7")
    assert said is not None
    assert (said.verdict, said.value) == ("unparsable", 0.0)


# -- text that is meant to break a grader --------------------------------------------------------------------

ADVERSARIAL = [
    # several answers at once
    ("4", r"\boxed{4 \text{ or } 5}", "incorrect"),
    ("4", r"\boxed{4}\boxed{5}\boxed{6}", "incorrect"),
    ("4", r"\boxed{3, 4, 5}", "incorrect"),
    ("4", r"\boxed{4 = 5}", "incorrect"),
    ("4", r"\boxed{x = 4 = 5}", "incorrect"),
    ("4", r"\boxed{\{4\} \cup \mathbb{R}}", "incorrect"),
    ("4", r"\boxed{\pm 4}", "incorrect"),
    ("4", r"\boxed{[3, 5]}", "incorrect"),
    ("4", r"\boxed{x}", "incorrect"),
    ("4", r"\boxed{\mathbb{R}}", "incorrect"),
    # nothing, or the question again
    ("4", r"\boxed{}", "unparsable"),
    ("4", r"\boxed{\boxed{}}", "unparsable"),
    ("4", r"\boxed{?}", "unparsable"),
    ("4", r"\boxed{0/0}", "incorrect"),
    ("4", r"\boxed{\infty}", "incorrect"),
    ("4", r"\boxed{nan}", "unparsable"),
    ("0", r"\boxed{1/\infty + 1/2004!}", "incorrect"),
    ("0", r"\boxed{\frac{\pi}{2004!}}", "incorrect"),
    ("0", r"\boxed{\sqrt{2}-\sqrt{2}}", "correct"),
    ("1", r"\boxed{\sin^2(x)+\cos^2(x)}", "correct"),
    # spellings
    ("4", "\\boxed{\uff14}", "correct"),
    ("-4", "\\boxed{\u22124}", "correct"),
    (r"x^2", "\\boxed{x\u00b2}", "correct"),
    (r"\frac{\pi}{2}", "\\boxed{\u03c0/2}", "correct"),
    ("0.5", r"\boxed{\dfrac{1}{2}}", "correct"),
    ("1234", r"\boxed{1\,234}", "correct"),
    ("2", r"\fbox{2}", "correct"),
    ("12", r"\boxed 12", "correct"),
    (r"\frac{1}{2}", r"\\boxed{\\frac{1}{2}}", "correct"),
    ("5", "#### 5", "correct"),
    ("-3", "#### -3", "correct"),
    ("Adding up: 9 + 9 = 18\n#### 18", "18 dollars", "correct"),
    ("5", "It costs $5 for one and $7 for two.", "incorrect"),
    (r"\text{east}", "<think>west</think>\neast", "correct"),
    ("east", "The answer is east.", "correct"),
    ("abc", "cab", "incorrect"),
    (r"\frac{1}{2004!}", r"$\frac{1}{2006!}$", "incorrect"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{bmatrix} 1 \\ 4/2 \end{bmatrix}}", "correct"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{(1, 2)}", "incorrect"),
    ("None", "", "unparsable"),
]


@pytest.mark.parametrize(("answer", "completion", "expected"), ADVERSARIAL)
def test_adversarial_answers(answer: str, completion: str, expected: str) -> None:
    assert verdict("math", completion, answer) == expected


HOSTILE = {
    "tower": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "tower without braces": r"\boxed{9^9^9^9^9}",
    "factorial": r"\boxed{1000000000!}",
    "power of a sum": r"\boxed{(x+1)^{100000}}",
    "power of a matrix": r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}^{100000000}}",
    "binomial": r"\boxed{\binom{1000000000}{500000000}}",
    "product": r"\boxed{\prod_{i=1}^{1000000000} i}",
    "integral": r"\boxed{\int_0^1 x^{x^{x}} dx}",
    "nested functions": r"\boxed{" + r"\log(" * 11 + "x" + ")" * 11 + "}",
    "sine of a tower": r"\boxed{\tan(10^{10^{10}})}",
    "greatest common divisor": r"\boxed{\gcd(10^{100000},7)}",
    "equation": r"\boxed{x^{50}+y^{49}\sin(xy)=e^{xyz}}",
    "brackets": r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "open braces": "{" * 200_000,
    "open boxes": r"\boxed{" * 50_000,
    "pairs of braces": r"\boxed{" + "{}" * 100_000 + "}",
    "dollars": "$ " * 100_000,
    "open formulas": r"\(" * 100_000,
    "open displays": r"\[" * 100_000,
    "cues": "answer: (" * 100_000,
    "digits": "1" * 200_000,
    "groups": "1,111" * 40_000,
    "backslashes": "\\" * 200_000,
    "tags": "<answer>" * 50_000,
    "surrogates": "\ud800" * 1000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_wrong_within_seconds(text: str) -> None:
    started = time.process_time()
    for answer in ("7", r"x^2+1", r"(-\infty, 3)"):
        assert verdict("math", text, answer) in ("incorrect", "unparsable")
    for name, answer in [("numeric", "7"), ("multiple_choice", "A"), ("answer_tags", "7"), ("exact", "7")]:
        assert verdict(name, text, answer) in ("incorrect", "unparsable")
    assert time.process_time() - started < 20  # seven gradings; a deadline is ten seconds for one


# -- extraction ----------------------------------------------------------------------------------------------

_MARKUP = r"\boxed{ } { $ \( \) \[ \] #### </think> <answer> </answer> 4 , 1,234 \frac12 x = % \ \text{ A (C) . - e5 ^ Answer:"
PIECES = st.sampled_from([*_MARKUP.split(), " and ", "\n", " ", "answer is ", "\u22125"])
TEXTS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=25).map("".join))
FINDERS = {**EXTRACTORS, "stated_answer": stated_answer, "choice": choice}


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_extraction_never_raises_and_finds_what_is_there(text: str) -> None:
    for name, find in FINDERS.items():
        found = find(text)
        assert found is None or isinstance(found, str), name
        assert find(text) == found


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_a_final_box_holds_the_answer_whatever_stands_before_it(text: str) -> None:
    # A prompt, a retracted answer, an unclosed box: nothing before the last complete box matters.
    assert stated_answer(text + "</think> so \\boxed{17}") == "17"
    assert choice(text + "</think> \\boxed{C}") == "C"
    assert EXTRACTORS["answer_tag"](text + "</think><answer>17</answer>") == "17"


@given(st.sampled_from(["last_number", "answer_tag", "last_line", "none"]), TEXTS)
@settings(max_examples=300, deadline=None)
def test_extraction_is_idempotent(name: str, text: str) -> None:
    found = EXTRACTORS[name](text)
    if found is None:
        return
    again = EXTRACTORS[name](found)
    # A tag is gone once its content is taken; what nests inside may be taken again, nothing else.
    assert again == found or (name == "answer_tag" and (again is None or again in found))


@given(st.integers(-(10**9), 10**9), TEXTS)
@settings(max_examples=100, deadline=None)
def test_a_boxed_integer_is_itself_and_no_other(number: int, text: str) -> None:
    completion = f"{text}</think> Therefore \\boxed{{{number}}}"
    assert verdict("math", completion, str(number)) == "correct"
    assert verdict("math", completion, str(number + 1)) == "incorrect"


# -- real tables ---------------------------------------------------------------------------------------------

# Rows of the table whose `expected` is not our policy, by gold and pred.
NOT_OURS = {
    (r"$x \in [-2,7]$", r"$-2 \\le x \\le 7$", False): "intervals and inequalities are compared both ways round",
    ("Because B is valid", "['b', 'B']"): "a stray letter is no answer",
}


def table(shared: Path, name: str) -> list[dict[str, Any]]:
    path = shared / "data" / "verifier_cases" / name
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_math_gives_the_verdicts_of_math_verifys_own_tables(shared: Path) -> None:
    wrong, pairs = [], 0
    for row in table(shared, "math_verify_cases.jsonl"):
        if "gold" not in row:
            letter = choice(row["pred"])
            if (letter or "") not in row["expected"] or letter is None:
                wrong.append((row["pred"], row["expected"]))
            continue
        pairs += 1
        columns = {"tolerance": 10.0 ** -row["precision"]} if row.get("precision", 6) < 6 else {}
        if (verdict("math", row["pred"], row["gold"], **columns) == "correct") != row["expected"]:
            wrong.append((row["gold"], row["pred"], row["expected"]))
    assert pairs > 100
    assert sorted(map(str, wrong)) == sorted(map(str, NOT_OURS))


def test_where_math_leaves_the_string_rule_of_hendrycks(shared: Path) -> None:
    rows = table(shared, "hendrycks_is_equiv_cases.jsonl")
    differ = [r["gold"] for r in rows if (verdict("math", r["pred"], r["gold"]) == "correct") != r["expected"]]
    assert len(rows) == 16
    assert differ == ["4, 10, -2", "4, .1, 2"]  # lists have no order


def cases(shared: Path) -> dict[str, dict[str, Any]]:
    lines = (shared / "cases" / "cases.jsonl").read_text("utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("case", ["V01", "V03", "V05", "V06", "V07", "V08", "V10"])
def test_reported_bugs_of_verifiers(case: str, shared: Path) -> None:
    row = cases(shared)[case]
    pairs = next(row["input"][key] for key in ("pairs", "gold_pred", "cases") if key in row["input"])
    said = [verdict("math", completion, answer) == "correct" for answer, completion in pairs]
    expected = row["expected"]["verdicts"]
    for got, right in zip(said, expected, strict=True):
        if isinstance(right, bool):
            assert got is right
    if case == "V07":
        assert said[-1] is False  # a truncated answer
    if case == "V10":
        assert said[3:6] == [True] * 3  # a bare 50 and 50 % are one answer, decimal or not


def test_answers_that_cannot_be_verified_are_never_paid(shared: Path) -> None:
    case = cases(shared)["V11"]["input"]
    assert verdict("math", case["completion"], case["gold"]) == "none"
    assert verdict("math", case["gold"], case["gold"]) == "correct"


def test_code_in_an_answer_is_text(shared: Path) -> None:
    case = cases(shared)["V12"]
    answers = ["4", "4", "42", "42"]
    texts = [re.sub(r" \(gold \d+\)$", "", text) for text in case["input"]["completions"]]
    said = [verdict("math", text, answer) == "correct" for text, answer in zip(texts, answers, strict=True)]
    assert said == case["expected"]["verdicts"]


def test_prompt_and_equivalence_cases_of_evaluation(shared: Path) -> None:
    equivalent, prompted = cases(shared)["E03"], cases(shared)["E04"]
    golds = [verdict("math", rf"\boxed{{{a}}}", equivalent["input"]["gold"]) for a in equivalent["input"]["answers"]]
    assert [int(v == "correct") for v in golds] == equivalent["expected"]["correct_per_sample"]
    said = grade("math", prompted["input"]["completion"], prompted["input"]["gold"])
    assert said is not None
    assert said.verdict == "unparsable"
