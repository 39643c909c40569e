from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from covary.rewards import GRADERS, Grade, Graded, Grader, build_reward, grade, grade_extracted
from covary.types import Example, UserError


def value(name: str, text: str, answer: str | None, columns: dict[str, Any] | None = None) -> float | None:
    said = GRADERS[name](text, answer, columns or {})
    return None if said is None else said.value


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("east", "east", 1.0),
        (" east\n", "east ", 1.0),
        ("East", "east", 0.0),
        ("27.0", "27", 0.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("", "east", 0.0),
        ("", "", None),
        ("east", None, None),
    ],
)
def test_exact(text: str, answer: str | None, expected: float | None) -> None:
    assert value("exact", text, answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        # plain numbers
        ("27", "27.0", 1.0),
        ("27.0", "027", 1.0),
        ("10,080", "10080", 1.0),
        ("The total is 72 clips, altogether.", "72", 1.0),
        ("-3", "#### -3", 1.0),
        ("3", "#### -3", 0.0),
        ("5", ".5", 0.0),
        # LaTeX on either side, with and without delimiters
        (r"\boxed{0.5}", r"\frac12", 1.0),
        (r"so it is $\frac{2}{4}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt8", 1.0),
        (r"\boxed{2 + x}", "x+2", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{36}", r"\$36", 1.0),
        (r"\boxed{5.4}", r"5.4 \text{ cents}", 1.0),
        (
            r"\boxed{\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}}",
            r"\begin{pmatrix} \frac12 \\ 2 \end{pmatrix}",
            1.0,
        ),
        (
            r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}",
            r"\begin{pmatrix} 2 \\ 2 \end{pmatrix}",
            0.0,
        ),
        (r"\boxed{2}", r"Adding up, $1 + 1 = \boxed{2}$.", 1.0),
        # the last complete box is the answer
        (r"I tried \boxed{3}, which is wrong. Final answer: \boxed{4}", "4", 1.0),
        (r"\boxed{4} wait, no: \boxed{5}", "4", 0.0),
        (r"Put it into \boxed , please. It is \boxed{5}", "5", 1.0),
        (r"\boxed 5", "5", 1.0),
        (r"\boxed{\frac{1}{2}}", r"$\frac{1}{2}$", 1.0),
        ("**Answer:** 4.", "4", 1.0),
        (r"\boxed{4.}", "4", 1.0),
        (r"so \boxed{5", "5", 0.0),
        (r"there are 5, so \boxed{5", "5", 0.0),
        # nothing that could be parsed
        ("", "5", 0.0),
        ("I do not know", "5", 0.0),
        # an answer that is no mathematics says nothing, unless it is repeated
        (r"\boxed{5}", "see the diagram", None),
        ("see the diagram", "see the diagram", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", 1.0),
        (r"\boxed{Bob}", r"\text{Evelyn}", 0.0),
        ("", "...", None),
        ("5", "", None),
        ("5", None, None),
        # text that would be code is text
        (r"\boxed{().__class__.__bases__[0].__subclasses__()}", "4", 0.0),
        ("The answer is 42 because geometry proves it", "42", 1.0),
        ("First compute 6*7.\n42", "42", 1.0),
    ],
)
def test_math(text: str, answer: str | None, expected: float | None) -> None:
    assert value("math", text, answer) == expected


@pytest.mark.parametrize("name", ["exact", "math"])
@pytest.mark.parametrize("text", ["", "\x00", "\ud800", "{" * 3000, "(" * 3000, r"\boxed{" + "(" * 3000 + "}"])
def test_malformed_text_is_wrong_never_an_error(name: str, text: str) -> None:
    assert value(name, text, "7") == 0.0


@pytest.mark.skipif("COVARY_SHARED" not in os.environ, reason="COVARY_SHARED is not set")
def test_math_accepts_every_reference_answer_of_math500() -> None:
    path = Path(os.environ["COVARY_SHARED"]) / "data" / "math500" / "test.jsonl"
    answers = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]
    refused = [a for a in answers if value("math", rf"So $x = \boxed{{{a} }}$.", a) != 1.0]
    assert len(answers) == 500
    assert refused == []
    undecided = [a for a in answers if value("math", r"\boxed{987654}", a) != 0.0]
    assert undecided == []


def _entry(task: str, **parameters: Any) -> tuple[str, str, dict[str, Any]]:
    entry = reasoning_gym.create_dataset(task, size=1, seed=3, **parameters)[0]
    columns = {"metadata": entry["metadata"], "question": entry["question"]}
    return entry["answer"], entry["question"], columns


@pytest.mark.parametrize("task", ["chain_sum", "prime_factorization", "gcd", "game_of_life"])
def test_reasoning_gym_accepts_its_answer_and_refuses_words(task: str) -> None:
    answer, _, columns = _entry(task)
    assert value("reasoning_gym", answer, answer, columns) == 1.0
    # prime_factorization's own scorer raises ValueError here
    assert value("reasoning_gym", "no idea", answer, columns) == 0.0


def test_reasoning_gym_scores_with_the_parameters_of_the_task() -> None:
    answer, _, columns = _entry("puzzle24")
    assert value("reasoning_gym", answer, answer, columns) == 1.0
    # The scorer refuses numbers that are out of range.
    fewer = columns | {"parameters": {"max_value": 2}}
    assert (value("reasoning_gym", answer, answer, fewer) or 0.0) < 0.1


def test_reasoning_gym_needs_metadata() -> None:
    with pytest.raises(ValueError, match="'metadata'"):
        GRADERS["reasoning_gym"]("1", "1", {})


def test_extractor_comes_first_and_nothing_found_is_wrong() -> None:
    judge = grade_extracted(Grader("exact", "last_number"))
    assert judge("3 + 4 = 7.", "7", {}) == Grade("correct", "7")
    assert judge("seven", "7", {}) == Grade("unparsable")
    assert judge("seven", None, {}) is None
    boxed = grade_extracted(Grader("math", "boxed"))
    # unscorable for all rows of the group alike, whether or not they have a box
    assert boxed("five", "see the diagram", {}) is None
    assert boxed(r"\boxed{5}", "see the diagram", {}) is None


def test_built_in_reward_runs_in_other_processes_and_keeps_metadata_as_it_is() -> None:
    answer, question, columns = _entry("prime_factorization")
    example = Example("pf-0", question, answer, columns=columns)
    reward = build_reward("reasoning_gym", workers=1)
    assert reward.name == "reasoning_gym"
    right = Graded(1.0, grade=Grade("correct", answer))
    assert reward([example] * 2, [answer, "no"]) == [right, Graded(0.0, grade=Grade("unparsable", "no"))]
    (failed,) = reward([Example("bare", "q", "1")], ["1"])
    assert failed.value is None
    assert failed.error is not None
    assert failed.error.startswith("row bare: ValueError: ")
    reward.close()


def test_default_extractor_is_for_graders_given_by_name() -> None:
    examples = [Example("a", "q", "7")]
    by_name = build_reward("exact", default_extract="last_number", workers=1)
    assert by_name(examples, ["it is 7."]) == [Graded(1.0, grade=Grade("correct", "7"))]
    by_name.close()
    explicit = build_reward(Grader("exact"), default_extract="last_number", workers=1)
    assert explicit(examples, ["it is 7."]) == [Graded(0.0, grade=Grade("incorrect", "it is 7."))]
    explicit.close()


def test_reasoning_gym_gives_partial_credit_without_calling_it_correct() -> None:
    answer, _, columns = _entry("chain_sum")
    said = GRADERS["reasoning_gym"](f"The answer is {answer}.", answer, columns)
    assert said is not None
    assert said.verdict == "incorrect"
    assert 0 < said.value < 1


def test_a_grader_has_its_own_tolerance_and_the_row_goes_first() -> None:
    judge = grade_extracted(Grader("numeric", tolerance=0.1))
    assert judge("105", "100", {}) == Grade("correct", "105")
    assert judge("105", "100", {"tolerance": 0.01}) == Grade("incorrect", "105")


def test_an_extract_of_megabytes_comes_back_short() -> None:
    # As a whole it would be longer than any verdict may be, and the completion would be unscorable.
    reward = build_reward("exact", workers=1)
    (graded,) = reward([Example("long", "q", "7")], ["8" * 3_000_000])
    reward.close()
    assert graded.value == 0.0
    assert graded.grade == Grade("incorrect", "8" * 2000)


def test_the_entry_point_names_its_graders() -> None:
    assert grade("multiple_choice", "The answer is B.", "B") == Grade("correct", "B")
    with pytest.raises(UserError, match="no grader 'maths'; did you mean 'math'"):
        grade("maths", "4", "4")


@pytest.mark.parametrize("name", ["math", "reasoning_gym"])
def test_completion_that_is_code_has_no_effect(name: str, tmp_path: Path) -> None:
    trap = tmp_path / "touched"
    call = f"__import__('os').system('touch {trap}')"
    answer, _, columns = _entry("puzzle24")
    reward = build_reward(name, workers=1)
    texts = [call, rf"\boxed{{{call}}}", f"open({str(trap)!r}, 'w')"]  # puzzle24 evaluates text
    verdicts = reward([Example("x", "q", answer, columns=columns)] * 3, texts)
    reward.close()
    assert all(v.error is None and v.value is not None and v.value < 0.1 for v in verdicts)
    assert not trap.exists()


def test_importing_rewards_loads_no_heavy_library() -> None:
    heavy = ["torch", "transformers", "math_verify", "sympy", "reasoning_gym", "numpy"]
    code = f"import sys, covary.rewards; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("maths", "no grader 'maths'; did you mean 'math'"),
        ("zzz", "there are exact, numeric, math, multiple_choice, answer_tags, reasoning_gym"),
        (Grader("math", "boxd"), "no extractor 'boxd'; did you mean 'boxed'"),
        (7, "reward 7 is no function"),
    ],
)
def test_unknown_reward_is_the_users_mistake(spec: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_reward(spec)
