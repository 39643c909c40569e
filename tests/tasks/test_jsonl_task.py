"""The jsonl task: columns, prompt forms, splits, bad rows, and real benchmark files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from covary.rewards import Grader
from covary.tasks import TASKS, Jsonl, Task
from covary.tasks.task import question_key
from covary.types import UserError

SHARED = os.environ.get("COVARY_SHARED")
needs_shared = pytest.mark.skipif(SHARED is None, reason="COVARY_SHARED is not set")


def put(folder: Path, rows: list[Any], name: str = "sums.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+{i}", "answer": 2 * i, "level": i % 3} for i in range(count)]


def questions(task: Task) -> tuple[set[str], set[str]]:
    return {question_key(e.prompt) for e in task.train}, {question_key(e.prompt) for e in task.test}


def test_family_is_listed() -> None:
    assert TASKS["jsonl"] is Jsonl


# ---- columns ----


def test_text_prompt_becomes_a_user_message_and_other_columns_stay(tmp_path: Path) -> None:
    task = Jsonl(put(tmp_path, sums(3))).load()
    example = task.train[2]
    assert example.prompt == [{"role": "user", "content": "2+2"}]
    assert example.answer == "4"
    assert example.given_prompt == "2+2"
    assert example.columns == {"level": 2, "answer": 4}
    assert example.id == "sums/3"
    assert example.completions is None
    assert task.name == "sums"
    assert task.test == []
    assert task.grader == Grader("math", "none")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (27.0, "27"),
        (3, "3"),
        (-0.5, "-0.5"),
        (1e22, "1" + 22 * "0"),
        (10**400, "1" + 400 * "0"),
        (True, "True"),
        ([1, 2.0, "x"], "1, 2, x"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("", ""),
        (None, None),
    ],
)
def test_answers_become_text(tmp_path: Path, value: Any, text: str | None) -> None:
    path = put(tmp_path, [{"prompt": "q", "answer": value}, {"prompt": "r", "answer": 1}])
    assert Jsonl(path).load().train[0].answer == text


def test_default_answer_column_may_be_absent(tmp_path: Path) -> None:
    task = Jsonl(put(tmp_path, [{"prompt": "write a poem"}])).load()
    assert task.train[0].answer is None
    assert task.grader is None
    assert any("`reward`" in note for note in task.notes)


def test_default_answer_column_is_then_in_every_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sums\.jsonl, line 2: no column 'answer'; it has prompt, anwser"):
        Jsonl(put(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "anwser": "2"}])).load()


def test_named_answer_column_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sums\.jsonl, line 1: no column 'solution'; it has prompt, answer, level"):
        Jsonl(put(tmp_path, sums(2)), answer="solution").load()


def test_missing_prompt_column_names_file_line_and_columns(tmp_path: Path) -> None:
    rows = [*sums(1), {"question": "5+5", "answer": 10}]
    with pytest.raises(UserError, match=r"sums\.jsonl, line 2: no column 'prompt'; it has question, answer"):
        Jsonl(put(tmp_path, rows)).load()


def test_ids_come_from_the_id_column_where_it_is_unique(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 7}, {"prompt": "b", "id": "x"}]
    assert [e.id for e in Jsonl(put(tmp_path, rows)).load().train] == ["7", "x"]
    repeated = [{"prompt": "a", "id": 7}, {"prompt": "b", "id": 7}, {"prompt": "c", "id": None}]
    assert [e.id for e in Jsonl(put(tmp_path, repeated)).load().train] == ["sums/1", "sums/2", "sums/3"]


@pytest.mark.parametrize("name", ["train.jsonl", "Test_200.jsonl"])
def test_a_file_named_after_its_split_is_called_by_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "gsm").mkdir()
    assert Jsonl(put(tmp_path / "gsm", sums(2), name)).load().name == "gsm"


@pytest.mark.parametrize(
    ("value", "completions"),
    [
        ("4", ["4"]),
        (["4", "five"], ["4", "five"]),
        ({"role": "assistant", "content": "4"}, ["4"]),
        ([{"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}], ["4", "5"]),
    ],
)
def test_given_completions(tmp_path: Path, value: Any, completions: list[str]) -> None:
    task = Jsonl(put(tmp_path, [{"prompt": "2+2", "gold": value}]), completion="gold").load()
    assert task.train[0].completions == completions
    assert task.train[0].columns == {}


def test_given_rewards_line_up_with_their_completions(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "ys": ["x", "y", "z"], "rs": [1, None, float("nan")]},
        {"prompt": "b", "ys": "x", "rs": True},
        {"prompt": "c", "ys": "x", "rs": 10**400},
    ]
    task = Jsonl(put(tmp_path, rows), completion="ys", rewards="rs").load()
    assert [e.rewards for e in task.train] == [[1.0, None, None], [1.0], [None]]


def test_test_file_needs_no_completions(tmp_path: Path) -> None:
    train = put(tmp_path, [{"prompt": "a", "y": "1"}])
    task = Jsonl(train, test_path=put(tmp_path, sums(2), "held.jsonl"), completion="y").load()
    assert [e.completions for e in (*task.train, *task.test)] == [["1"], None, None]
    assert [e.answer for e in (*task.train, *task.test)] == [None, "0", "2"]
    assert task.grader is not None


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": 5}, {}, "column 'prompt': takes text or a list of chat messages, not 5"),
        ({"prompt": " \n"}, {}, "column 'prompt': is empty"),
        ({"prompt": "x\ud800"}, {}, "half of a surrogate pair"),
        ({"prompt": []}, {}, "takes text or a list of chat messages"),
        ({"prompt": ["hello"]}, {}, "keys role and content, this one is 'hello'"),
        ({"prompt": [{"role": "user"}]}, {}, "keys role and content"),
        ({"prompt": [{"role": "human", "content": "a"}]}, {}, "role 'human' is none of system, user, assistant"),
        ({"prompt": [{"role": "user", "content": 1}]}, {}, "takes text, not 1"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, {}, "last message has to be the user's"),
        ({"prompt": [{"role": "user", "content": "a"}]}, {"raw": True}, "raw takes text prompts"),
        ({"prompt": "a", "answer": []}, {}, "column 'answer': an answer is text, a number"),
        ({"prompt": "a", "answer": [1, None]}, {}, "column 'answer': an answer is text, a number"),
        ({"prompt": "a", "answer": {"value": 1}}, {}, "column 'answer': an answer is text, a number"),
        ({"prompt": "a", "answer": float("nan")}, {}, "column 'answer': an answer is text, a number"),
        ({"prompt": "a"}, {"completion": "y"}, "no column 'y'; it has prompt"),
        ({"prompt": "a", "y": None}, {"completion": "y"}, "a completion is text or an assistant message, not None"),
        ({"prompt": "a", "y": []}, {"completion": "y"}, "holds no completion"),
        (
            {"prompt": "a", "y": {"role": "user", "content": "b"}},
            {"completion": "y"},
            "a completion is text or an assistant message",
        ),
        ({"prompt": "a", "y": "b", "r": [1, 2]}, {"completion": "y", "rewards": "r"}, "2 rewards for 1 completions"),
        ({"prompt": "a", "y": "b", "r": "1"}, {"completion": "y", "rewards": "r"}, "a reward is a number or null"),
        (
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
            {"system": "mine"},
            "has a system message of its own",
        ),
    ],
)
def test_bad_row_names_file_and_line(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=r"sums\.jsonl, line 1") as caught:
        Jsonl(put(tmp_path, [row]), **settings).load()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_file_without_rows(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=r"empty\.jsonl: holds no rows"):
        Jsonl(str(path)).load()


@pytest.mark.parametrize("key", ["path", "test_path"])
def test_missing_file(tmp_path: Path, key: str) -> None:
    paths: dict[str, Any] = {"path": put(tmp_path, sums(2)), "test_path": put(tmp_path, sums(2), "held.jsonl")}
    paths[key] = str(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"absent\.jsonl: cannot be read"):
        Jsonl(**paths).load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": "r"}, "completion is needed too"),
        ({"train": -1}, "train: a number of rows is 0 or more, not -1"),
        ({"test": -2}, "test: a number of rows"),
        ({"raw": True, "system": "s"}, "system: has no place in a raw prompt"),
        ({"raw": True, "examples": []}, "examples: has no place in a raw prompt"),
        ({"examples": [{"question": "1+1"}]}, "examples, item 1: needs the keys question and answer, has question"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Jsonl("sums.jsonl", **settings)
    assert message in str(caught.value)


# ---- prompt form ----


def test_instruction_worked_examples_and_system(tmp_path: Path) -> None:
    form: dict[str, Any] = {
        "instruction": "Number only.",
        "system": "Be brief.",
        "examples": [{"question": "1+2", "answer": "3"}],
    }
    task = Jsonl(put(tmp_path, sums(1)), **form).load()
    assert task.train[0].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Number only.\n1+2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Number only.\n0+0"},
    ]


def test_prompt_form_of_a_conversation(tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "2+2"},
    ]
    path = put(tmp_path, [{"prompt": conversation}])
    assert Jsonl(path).load().train[0].prompt == conversation
    task = Jsonl(path, instruction="I", examples=[{"question": "q", "answer": "a"}]).load()
    assert [m["content"] for m in task.train[0].prompt if isinstance(m, dict)] == [
        "S",
        "I\nq",
        "a",
        "hello",
        "hi",
        "I\n2+2",
    ]


def test_raw_prompt_is_text_untouched(tmp_path: Path) -> None:
    task = Jsonl(put(tmp_path, [{"prompt": "Q: 2+2\nA:"}]), raw=True).load()
    assert task.train[0].prompt == "Q: 2+2\nA:"


def test_grader_and_its_tolerance(tmp_path: Path) -> None:
    path = put(tmp_path, sums(3))
    assert Jsonl(path, grader="numeric", tolerance=0.01).load().grader == Grader("numeric", "none", 0.01)
    with pytest.raises(UserError, match="tolerance: would be ignored, exact compares no numbers"):
        Jsonl(path, grader="exact", tolerance=0.01)
    with pytest.raises(UserError, match="tolerance: must be a relative difference, at least 0 and below 1, got 4"):
        Jsonl(path, grader="numeric", tolerance=4)


# ---- splits ----


def test_holding_out_by_seed(tmp_path: Path) -> None:
    path = put(tmp_path, sums(50))
    task, again, other = (Jsonl(path, test=10, seed=seed).load() for seed in (0, 0, 1))
    assert task == again
    assert [e.id for e in task.test] != [e.id for e in other.test]
    assert len(task.test) == 10
    assert sorted(e.id for e in (*task.train, *task.test)) == sorted(f"sums/{i}" for i in range(1, 51))
    assert task.notes == []


def test_repeated_questions_never_straddle_the_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 20} +  {i % 20}" + "\n" * (i // 20), "answer": 0} for i in range(60)]
    task = Jsonl(put(tmp_path, rows), test=8).load()
    train, test = questions(task)
    assert len(task.test) == len(test) == 8
    assert len(task.train) == 36
    assert not train & test
    assert task.notes == ["dropped 16 training rows whose question occurs in test"]


def test_questions_of_the_test_file_leave_training(tmp_path: Path) -> None:
    train, test = put(tmp_path, sums(10)), put(tmp_path, sums(4), "held.jsonl")
    task = Jsonl(train, test_path=test, test=2).load()
    assert len(task.test) == 2
    assert [e.answer for e in task.train] == ["8", "10", "12", "14", "16", "18"]  # also without the 2 unused ones
    assert task.notes == ["dropped 4 training rows whose question occurs in test"]


def test_same_question_under_another_system_message_is_the_same(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "2+2"}
    train = put(tmp_path, [{"prompt": [{"role": "system", "content": "S"}, turn]}, {"prompt": "3+3"}])
    task = Jsonl(train, test_path=put(tmp_path, [{"prompt": [turn]}], "held.jsonl")).load()
    assert len(task.train) == 1


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    path = put(tmp_path, sums(4))
    with pytest.raises(UserError, match="no training rows are left"):
        Jsonl(path, test_path=path).load()
    with pytest.raises(UserError, match="no training rows are left"):
        Jsonl(path, test=4).load()
    with pytest.raises(UserError, match="has 4 distinct questions, too few to hold out test: 5"):
        Jsonl(path, test=5).load()
    with pytest.raises(UserError, match="no rows at all"):
        Jsonl(path, train=0).load()


def test_evaluation_only(tmp_path: Path) -> None:
    path = put(tmp_path, sums(4))
    task = Jsonl(path, test_path=path, train=0).load()
    assert (len(task.train), len(task.test)) == (0, 4)


def test_limits(tmp_path: Path) -> None:
    path = put(tmp_path, sums(40))
    some = Jsonl(path, train=10, seed=3).load().train
    assert some == Jsonl(path, train=10, seed=3).load().train
    assert some != Jsonl(path, train=10, seed=4).load().train
    lines = [int(e.id.split("/")[1]) for e in some]
    assert lines == sorted(set(lines))
    assert len(lines) == 10
    more = Jsonl(path, train=100).load()
    assert len(more.train) == 40
    assert more.notes == ["train: 100 rows were asked for, 40 are there"]


# ---- real files ----


@needs_shared
@pytest.mark.parametrize(
    ("file", "columns", "count", "first_answer"),
    [
        ("gsm8k/test.jsonl", {"prompt": "question"}, 1319, None),
        ("math500/test.jsonl", {"prompt": "problem"}, 500, "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("aime24/test.jsonl", {"prompt": "problem"}, 30, "204"),
        ("amc23/test.jsonl", {"prompt": "question"}, 40, "27"),
        ("webinstruct/test_200.jsonl", {"prompt": "question", "answer": "reference"}, 200, None),
    ],
)
def test_real_benchmarks_load_whole(file: str, columns: dict[str, Any], count: int, first_answer: str | None) -> None:
    path = f"{SHARED}/data/{file}"
    task = Jsonl(path, test_path=path, train=0, **columns).load()
    assert len(task.test) == count
    assert len({e.id for e in task.test}) == count
    assert all(e.answer for e in task.test)
    assert first_answer in (None, task.test[0].answer)
    assert task.name == file.split("/")[0]


@needs_shared
def test_real_split_shares_no_question() -> None:
    folder = f"{SHARED}/data/webinstruct"
    task = Jsonl(
        f"{folder}/train_600.jsonl", test_path=f"{folder}/test_200.jsonl", prompt="question", answer="reference"
    ).load()
    train, test = questions(task)
    assert not train & test
    dropped = 600 - len(task.train)
    assert (f"dropped {dropped} training rows whose question occurs in test" in task.notes) == (dropped > 0)


@needs_shared
def test_real_column_that_is_missing() -> None:
    with pytest.raises(UserError, match=r"test\.jsonl, line 1: no column 'prompt'; it has .*problem"):
        Jsonl(f"{SHARED}/data/math500/test.jsonl").load()
