"""Benchmarks: every row of every file loads and its own answer is graded correct; odd formats; folders and hub."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from covary.rewards import GRADERS, build_reward, grade
from covary.tasks import BENCHMARKS, TASKS, Benchmark, all_of_reasoning_gym
from covary.tasks.benchmarks import LETTERS, Problem, digest
from covary.types import Example, UserError

# Rows of the files in the shared folder, and how many of them are no part of the benchmark.
FILES = {
    "aime24": (30, 0), "amc23": (40, 0), "math500": (500, 0), "minerva_math": (272, 0), "olympiadbench": (675, 0),
    "carp_en": (976, 0), "gsm8k": (1319, 0), "theoremqa": (800, 53), "mmlu_pro": (1400, 0), "mmlu_stem": (3018, 0),
    "aqua": (254, 0), "sat_math": (32, 0),
}  # fmt: skip
UNGRADABLE: dict[
    str, list[str]
] = {}  # benchmark -> ids of rows whose own answer is not graded correct, with the reason
EQUAL = {  # the answer of the next row is another text, and right all the same
    "math500": {("5", "x=5")},
    "carp_en": {("1", "y = 1"), ("3", "x = 3"), ("5", "a = 5"), ("- 2", "x = - 2")},
    "theoremqa": {("0.0", "0")},
}


def examples(shared: Path, name: str) -> list[Example]:
    return list(Benchmark(name, data_dir=str(shared / "data")).load().test)


def verdict(name: str, text: str, example: Example) -> str | None:
    found = grade(BENCHMARKS[name].grader, text, example.answer, example.columns)
    return found and found.verdict


def test_every_benchmark_has_a_file_or_a_reason_not_to() -> None:
    assert set(BENCHMARKS) - set(FILES) == {"gpqa"}  # asks not to be published in plain text
    assert {source.grader for source in BENCHMARKS.values()} <= GRADERS.keys()


@pytest.mark.parametrize("name", FILES)
def test_every_row_loads_and_its_answer_is_graded_correct(shared: Path, name: str) -> None:
    task = Benchmark(name, data_dir=str(shared / "data")).load()
    rows, left_out = FILES[name]
    assert len(task.test) == rows - left_out
    assert len({example.id for example in task.test}) == rows - left_out
    assert task.notes == ([f"{name}: left out {left_out} rows, {BENCHMARKS[name].left_out}"] if left_out else [])
    wrong = [e.id for e in task.test if verdict(name, rf"The answer is $\boxed{{{e.answer}}}$.", e) != "correct"]
    assert wrong == UNGRADABLE.get(name, [])


@pytest.mark.parametrize("name", FILES)
def test_the_answer_of_another_row_is_wrong(shared: Path, name: str) -> None:
    assert accepted_of_the_next_row(examples(shared, name)[:60], name) <= EQUAL.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_answers_of_all_other_rows_are_wrong(shared: Path, name: str) -> None:
    assert accepted_of_the_next_row(examples(shared, name), name) == EQUAL.get(name, set())


def accepted_of_the_next_row(rows: list[Example], name: str) -> set[tuple[str | None, str | None]]:
    return {
        (row.answer, other.answer)
        for row, other in pairwise(rows)
        if row.answer != other.answer and verdict(name, rf"\boxed{{{other.answer}}}", row) == "correct"
    }


@pytest.mark.parametrize(
    ("name", "column"), [("math500", "solution"), ("minerva_math", "solution"), ("gsm8k", "answer")]
)
def test_written_solutions_are_graded_correct(shared: Path, name: str, column: str) -> None:
    raw = [json.loads(line) for line in (shared / "data" / name / "test.jsonl").read_text().splitlines()]
    refused = {
        example.id
        for example, row in zip(examples(shared, name), raw, strict=True)
        if verdict(name, row[column], example) != "correct"
    }
    # One solution boxes two forms of one number in a sentence, which are read as two answers.
    assert refused == ({"math500/451"} if name == "math500" else set())


def test_the_recorded_digest_tells_other_rows(shared: Path, tmp_path: Path) -> None:
    assert {name for name, source in BENCHMARKS.items() if source.sha256 is None} == {"gpqa", "mmlu_pro"}
    folder = tmp_path / "aime24"
    folder.mkdir()
    lines = (shared / "data" / "aime24" / "test.jsonl").read_text().splitlines()
    (folder / "test.jsonl").write_text("\n".join(lines[:-1]))
    (note,) = Benchmark("aime24", data_dir=str(tmp_path)).load().notes
    assert note.startswith("aime24: its rows are not those that covary's tests read")
    assert digest([Problem("q", "a")]) != digest([Problem("q", "b")])


def test_graded_in_the_pool(shared: Path) -> None:
    """The first row of each file, by the path that evaluation takes."""
    for name in ("math500", "minerva_math", "mmlu_pro", "theoremqa"):
        task = Benchmark(name, data_dir=str(shared / "data")).load()
        assert task.grader is not None
        reward = build_reward(task.grader)
        rows = task.test[:8]
        found = reward(rows, [rf"\boxed{{{row.answer}}}" for row in rows])
        reward.close()
        assert [verdict.value for verdict in found] == [1.0] * 8, name


def test_forms(shared: Path) -> None:
    (aime, *_), (mmlu, *_) = examples(shared, "aime24"), examples(shared, "mmlu_stem")
    assert aime.prompt[-1]["content"].startswith(
        "Solve the problem step by step, then give the final answer inside \\boxed{}.\nEvery morning Aya"
    )
    assert mmlu.prompt[-1]["content"].count("\n") == 5
    assert "\nC) reduce the carrying capacity" in mmlu.prompt[-1]["content"]
    assert (mmlu.answer, mmlu.columns) == ("C", {"category": "college_biology"})
    answers = {name: examples(shared, name) for name in ("amc23", "gsm8k", "olympiadbench", "theoremqa", "carp_en")}
    assert answers["amc23"][0].answer == "27"  # 27.0 in the file
    assert answers["gsm8k"][0].answer == "18"
    assert all("$" not in (row.answer or "") for row in answers["olympiadbench"])
    (tolerant,) = [row for row in answers["olympiadbench"] if "tolerance" in row.columns]
    assert tolerant.columns["tolerance"] == pytest.approx(0.1 / 4.2)
    kinds = {row.answer for row in answers["theoremqa"]}
    assert {"True", "[0, 5]", "C", "11760"} <= kinds
    rounded = next(row for row in answers["theoremqa"] if row.answer == "1.42")
    assert verdict("theoremqa", r"\boxed{1.4189}", rounded) == "correct"
    assert verdict("theoremqa", r"\boxed{1.5}", rounded) == "incorrect"


def test_options_of_sat_math_in_either_form(shared: Path) -> None:
    contents = [row.prompt[-1]["content"] for row in examples(shared, "sat_math")]
    assert all(
        len([line for line in text.splitlines() if line[:3] in ("A) ", "B) ", "C) ", "D) ")]) == 4 for text in contents
    )
    (dotted,) = [text for text in contents if r"$\left(-\frac{13}{3}, 0\right)$" in text]
    assert "A) $\\left(-\\frac{13}{3}, 0\\right)$\nB) " in dotted


GPQA = [
    {
        "Question": f"Which number is {number}?", "Correct Answer": f" {number}\n", "Incorrect Answer 1": "100",
        "Incorrect Answer 2": "200", "Incorrect Answer 3": "300", "High-level domain": "Arithmetic",
    }
    for number in range(40)
]  # fmt: skip


def write(folder: Path, name: str, rows: list[dict[str, Any]], file: str = "rows.jsonl") -> str:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_gpqa_options_are_shuffled_by_the_question_alone(tmp_path: Path) -> None:
    task = Benchmark("gpqa", data_dir=write(tmp_path, "gpqa", GPQA)).load()
    again = Benchmark("gpqa", data_dir=write(tmp_path, "gpqa", GPQA[::-1])).load()
    assert {e.prompt[-1]["content"]: e.answer for e in task.test} == {
        e.prompt[-1]["content"]: e.answer for e in again.test
    }
    assert {example.answer for example in task.test} == set("ABCD")
    for number, example in enumerate(task.test):
        options = dict(line.split(") ") for line in example.prompt[-1]["content"].splitlines()[-4:])
        assert options[example.answer] == str(number)
        assert verdict("gpqa", f"So the answer is ({example.answer}).", example) == "correct"
        other = next(letter for letter in LETTERS[:4] if letter != example.answer)
        assert verdict("gpqa", rf"\boxed{{{other}}}", example) == "incorrect"
    assert task.test[0].columns == {"category": "Arithmetic"}


def test_rows_as_the_hub_has_them(tmp_path: Path) -> None:
    """Formats that differ from the files': the hub's columns of three data sets."""
    write(tmp_path, "minerva_math", [{"question": "How far?", "answer": "1.6 \\mathrm{~cm}"}])
    write(tmp_path, "theoremqa", [
        {"Question": "Which?", "Answer": "[0, 5]", "Answer_type": "list of integer", "Picture": None},
        {"Question": "So?", "Answer": "(c)", "Answer_type": "option", "Picture": None},
    ])  # fmt: skip
    write(tmp_path, "sat_math", [{"Question": "?", "Possible Answers": "A) 1 B) 2 C) 3 D) 4", "Answer": "B"}])
    write(tmp_path, "mmlu_stem", [{"question": "?", "choices": ["1", "2", "3", "4"], "answer": 3, "subject": "x"}])
    found = {
        name: [example.answer for example in Benchmark(name, data_dir=str(tmp_path)).load().test]
        for name in ("minerva_math", "theoremqa", "sat_math", "mmlu_stem")
    }
    assert found == {
        "minerva_math": ["1.6 \\mathrm{~cm}"], "theoremqa": ["[0, 5]", "C"], "sat_math": ["B"], "mmlu_stem": ["D"],
    }  # fmt: skip


def test_the_hub_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder laid out like a hub data set stands for the hub."""
    write(tmp_path, "hub", GPQA, "train.jsonl")
    source = replace(BENCHMARKS["gpqa"], hub=str(tmp_path / "hub"), subset=None)
    monkeypatch.setitem(BENCHMARKS, "gpqa", source)
    assert len(Benchmark("gpqa").load().test) == 40
    monkeypatch.setitem(BENCHMARKS, "gpqa", replace(source, hub=str(tmp_path / "nowhere" / "x" / "y")))
    with pytest.raises(UserError, match="cannot be loaded"):
        Benchmark("gpqa").load()
    with pytest.raises(UserError, match=r"carp_en: is on no hub that covary knows; name a folder"):
        Benchmark("carp_en").load()


def test_settings(tmp_path: Path) -> None:
    folder = write(tmp_path, "gpqa", GPQA)
    some = Benchmark("gpqa", data_dir=folder, test=5, instruction="", system="Be brief.").load().test
    assert [example.id for example in some] == [e.id for e in Benchmark("gpqa", data_dir=folder, test=5).load().test]
    assert len(some) == 5
    assert [m["role"] for m in some[0].prompt] == ["system", "user"]
    assert some[0].prompt[1]["content"].startswith("Which number")
    other = Benchmark("gpqa", data_dir=folder, test=5, seed=1, instruction="Now:").load().test
    assert [e.id for e in other] != [e.id for e in some]
    assert other[0].prompt[0]["content"].startswith("Now:\nWhich number")
    assert TASKS["benchmark"] is Benchmark


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("aime24", [{"problem": "?"}], r"rows.jsonl, line 1: is no row of aime24: has no column 'answer'; it has problem"),
        ("aime24", [{"problem": "?", "answer": "x"}], "line 1: is no row of aime24: invalid literal"),
        ("mmlu_stem", [{"question": "?", "choices": ["1"], "answer": 2}], "the answer 'C' is none of 1 options"),
        ("minerva_math", [{"problem": "?", "solution": "none"}], "the solution has no box"),
        ("aime24", [], "aime24: holds no rows"),
    ],
)  # fmt: skip
def test_rows_that_are_none(tmp_path: Path, name: str, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Benchmark(name, data_dir=write(tmp_path, name, rows)).load()


def test_folders_that_do_not_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*/gpqa"):
        Benchmark("gpqa", data_dir=str(tmp_path)).load()
    write(tmp_path, "gpqa", GPQA, "one.jsonl")
    write(tmp_path, "gpqa", GPQA, "two.jsonl")
    with pytest.raises(UserError, match=r"needs one .*it has one.jsonl, two.jsonl"):
        Benchmark("gpqa", data_dir=str(tmp_path)).load()
    write(tmp_path, "gpqa", GPQA[:3], "my_test.jsonl")
    assert len(Benchmark("gpqa", data_dir=str(tmp_path)).load().test) == 3
    (tmp_path / "gpqa" / "my_test.jsonl").unlink()
    (tmp_path / "gpqa" / "test.json").write_text("{}")
    with pytest.raises(UserError, match="takes a JSON array of objects"):
        Benchmark("gpqa", data_dir=str(tmp_path)).load()
    with pytest.raises(UserError, match=r"there is no 'maths500'; did you mean math500\?"):
        Benchmark("maths500")


def test_reasoning_gym_as_a_whole() -> None:
    family = all_of_reasoning_gym()
    assert len(family.tasks) == 104
    assert family.test == 1040
    assert set(DATASETS) - set(family.tasks) == {"composite", "path_star"}


def test_reasoning_gym_has_categories() -> None:
    family = replace(all_of_reasoning_gym(), tasks={"chain_sum": {}, "gcd": {}, "syllogism": {}}, test=6)
    found = {example.columns["task"]: example.columns["category"] for example in family.load().test}
    assert found == {"chain_sum": "arithmetic", "gcd": "arithmetic", "syllogism": "logic"}


@pytest.mark.slow
def test_every_task_of_reasoning_gym_draws_ten_questions() -> None:
    rows = all_of_reasoning_gym().load().test
    counts = {name: sum(row.columns["task"] == name for row in rows) for name in all_of_reasoning_gym().tasks}
    assert set(counts.values()) == {10}
    assert len({row.columns["category"] for row in rows}) > 8
