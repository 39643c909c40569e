"""The ecosystem's data formats, unchanged, from JSON Lines, parquet and hub datasets alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from covary.tasks import Hub, Jsonl, Parquet, Task
from covary.types import Example, UserError

datasets = pytest.importorskip("datasets")

USER = {"role": "user", "content": "What color is the sky?"}
BLUE, GREEN = {"role": "assistant", "content": "It is blue."}, {"role": "assistant", "content": "It is green."}


def as_jsonl(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Task:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Jsonl(str(folder / "rows.jsonl"), **settings).load()


def as_parquet(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Task:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return Parquet(str(folder / "rows.parquet"), **settings).load()


def as_saved(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Task:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    return Hub(str(folder / "rows"), **settings).load()


Load = Callable[..., Task]
every_family = pytest.mark.parametrize("load", [as_jsonl, as_parquet, as_saved])


@every_family
@pytest.mark.parametrize(
    ("row", "prompt", "completions"),
    [
        ({"prompt": "The sky is"}, "The sky is", None),
        ({"prompt": [USER]}, [USER], None),
        ({"prompt": "The sky is", "completion": " blue."}, "The sky is", [" blue."]),
        ({"prompt": [USER], "completion": [BLUE]}, [USER], ["It is blue."]),
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "The sky is", [" blue.", " green."]),
        ({"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}, [USER], ["It is blue.", "It is green."]),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "The sky is", [" blue.", " green."]),
        ({"chosen": [USER, BLUE], "rejected": [USER, GREEN]}, [USER], ["It is blue.", "It is green."]),
        (
            {"prompt": USER["content"], "chosen": [USER, BLUE], "rejected": [USER, GREEN]},
            [USER],
            ["It is blue.", "It is green."],
        ),
        ({"chosen": [USER, BLUE], "rejected": [USER, BLUE]}, [USER], ["It is blue.", "It is blue."]),
        ({"messages": [USER, BLUE]}, [USER], ["It is blue."]),
        ({"messages": [USER, BLUE, USER, GREEN]}, [USER, BLUE, USER], ["It is green."]),
    ],
)
def test_formats(tmp_path: Path, load: Load, row: dict[str, Any], prompt: Any, completions: list[str] | None) -> None:
    (example,) = load(tmp_path, [row | {"extra": 7}]).train
    assert example.given_prompt == prompt
    assert example.prompt == ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    assert example.completions == completions
    assert example.rewards == ([1.0, 0.0] if "chosen" in row else None)
    assert example.columns == {"extra": 7}


@every_family
def test_unpaired_preferences(tmp_path: Path, load: Load) -> None:
    rows = [{"prompt": "p", "completion": "a", "label": True}, {"prompt": "q", "completion": "b", "label": False}]
    task = load(tmp_path, rows, completion="completion", rewards="label")
    assert [e.rewards for e in task.train] == [[1.0], [0.0]]


@every_family
def test_text_prompts_can_stay_as_they_are(tmp_path: Path, load: Load) -> None:
    (example,) = load(tmp_path, [{"chosen": "The sky is blue.", "rejected": "The sky is green."}], raw=True).train
    assert example.prompt == "The sky is"


@every_family
def test_columns_keep_their_types_and_structure(tmp_path: Path, load: Load) -> None:
    rows = [
        {"prompt": "a", "answer": 2**62, "meta": {"level": 3, "tags": ["x", None], "deep": {"y": [0.5]}}, "none": None},
        {"prompt": "b", "answer": None, "meta": {"level": None, "tags": [], "deep": {"y": []}}, "none": None},
    ]
    task = load(tmp_path, rows)
    assert [e.answer for e in task.train] == [str(2**62), None]
    assert [e.columns for e in task.train] == [{k: v for k, v in row.items() if k != "prompt"} for row in rows]


@every_family
@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([1, 2], ["1", "2"]),
        ([0.5, 27.0], ["0.5", "27"]),
        ([True, False], ["True", "False"]),
        ([[1, 2], [3]], ["1, 2", "3"]),
        (["x", None], ["x", None]),
    ],
)
def test_answers_of_any_type(tmp_path: Path, load: Load, values: list[Any], texts: list[str | None]) -> None:
    rows = [{"prompt": f"q{i}", "answer": value} for i, value in enumerate(values)]
    assert [e.answer for e in load(tmp_path, rows).train] == texts


def test_answers_of_mixed_types_in_one_file(tmp_path: Path) -> None:
    values = [1, 0.5, True, "x", [1, "y"], None, 10**30]
    rows = [{"prompt": f"q{i}", "answer": value} for i, value in enumerate(values)]
    assert [e.answer for e in as_jsonl(tmp_path, rows).train] == ["1", "0.5", "True", "x", "1, y", None, "1" + 30 * "0"]


def test_decimals(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": Decimal("2.50")}, {"prompt": "b", "answer": Decimal("100.00")}]
    assert [e.answer for e in as_parquet(tmp_path, rows).train] == ["2.5", "100"]


@every_family
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": None}], "2, column 'prompt': takes text or a list of chat messages, not None"),
        ([{"prompt": "a", "answer": {"x": 1}}], "1, column 'answer': an answer is text, a number"),
        ([{"question": "a"}], "1: no column 'prompt'; it has question"),
        ([{"chosen": "x", "rejected": "y"}], "1: no column 'prompt'; it has chosen, rejected"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, load: Load, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, rows)
    assert str(caught.value).startswith(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@every_family
def test_ids(tmp_path: Path, load: Load) -> None:
    own = [{"prompt": "a", "id": 7}, {"prompt": "b", "id": 8}]
    assert [e.id for e in load(tmp_path, own).train] == ["7", "8"]
    for folder, repeated in (("null", None), ("same", 7)):
        (tmp_path / folder).mkdir()
        rows = [{"prompt": "a", "id": 7}, {"prompt": "b", "id": repeated}]
        assert [e.id for e in load(tmp_path / folder, rows).train] == ["rows/1", "rows/2"]


@every_family
def test_completions_that_nobody_named_may_be_anything(tmp_path: Path, load: Load) -> None:
    """A column may be called `completion` and mean something else: only who names it wants an error."""
    rows = [{"prompt": "a", "completion": 3}]
    assert load(tmp_path, rows).train[0].completions is None
    with pytest.raises(UserError, match="a completion is text or an assistant message, not 3"):
        load(tmp_path, rows, completion="completion")


def test_a_column_that_comes_late_counts_for_all_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}"} for i in range(5)] + [{"prompt": "late", "completion": "c"}]
    assert [e.completions for e in as_jsonl(tmp_path, rows).train] == [None] * 5 + [["c"]]


# ---- places ----


def test_the_same_rows_from_every_family(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + {i} =", "answer": 2 * i, "level": i % 3} for i in range(40)]
    tasks = [load(tmp_path, rows, test=10, train=20) for load in (as_jsonl, as_parquet, as_saved)]
    assert tasks[0].train == tasks[1].train == tasks[2].train
    assert tasks[0].test == tasks[1].test == tasks[2].test
    assert tasks[0].train != tasks[0].test
    assert [task.name for task in tasks] == ["rows"] * 3


def test_examples_are_a_sequence(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}"} for i in range(3000)]
    examples = as_parquet(tmp_path, rows).train
    assert [e.id for e in examples] == [f"rows/{i}" for i in range(1, 3001)]
    assert isinstance(examples[-1], Example)
    assert [e.id for e in examples[1000:1003]] == ["rows/1001", "rows/1002", "rows/1003"]
    assert examples[-1].id == "rows/3000"
    with pytest.raises(IndexError):
        examples[3000]


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "math" / "more").mkdir(parents=True)
    for name, rows in {
        "data-00001.parquet": [{"prompt": "b", "answer": 2}],
        "data-00000.parquet": [{"prompt": "a", "answer": "1"}],
        "more/z.parquet": [{"prompt": "c", "answer": 3.0}, {"prompt": None, "answer": 4.0}],
    }.items():
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "math" / name)
    with pytest.raises(UserError, match=r"more/z\.parquet, row 2, column 'prompt'"):
        Parquet(str(tmp_path / "math")).load()
    (tmp_path / "math" / "more" / "z.parquet").unlink()
    task = Parquet(str(tmp_path / "math")).load()
    assert [(e.id, e.answer) for e in task.train] == [("math/1", "1"), ("math/2", "2")]
    assert task.name == "math"


def test_parquet_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for name, message in {
        "bad.parquet": "bad.parquet: cannot be read as parquet",
        "absent.parquet": "absent.parquet: cannot be read as parquet",
        "empty": "holds no file named *.parquet",
        "none.parquet": "none.parquet: holds no rows",
    }.items():
        with pytest.raises(UserError) as caught:
            Parquet(str(tmp_path / name)).load()
        assert message in str(caught.value)


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    binary = pa.array([b"fine", b"\xff\xfe"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
    parquet.write_table(pa.table({"prompt": text}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet, row 2: holds text that is not valid UTF-8"):
        Parquet(str(tmp_path / "bad.parquet")).load()


def test_categories_of_pandas_and_struct_messages_with_further_keys(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "yo", "name": None}]
    kind = pa.array(["x", "y"]).dictionary_encode()
    table = pa.table({"messages": [messages, messages[:1]], "kind": kind})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    first, second = Parquet(str(tmp_path / "rows.parquet")).load().train
    assert first.prompt == second.prompt == [{"role": "user", "content": "hi"}]
    assert (first.completions, second.completions) == (["yo"], None)
    assert [first.columns["kind"], second.columns["kind"]] == ["x", "y"]


def test_a_folder_laid_out_like_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself is not reached by tests: the same library call reads a folder of its layout."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    (folder / "data").mkdir(parents=True)
    train = [{"prompt": f"t{i}", "answer": i} for i in range(5)]
    test = [{"prompt": "t1", "answer": None}, {"prompt": "h", "answer": 3}]
    parquet.write_table(pa.Table.from_pylist(train), folder / "data" / "train-00000-of-00001.parquet")
    parquet.write_table(pa.Table.from_pylist(test), folder / "data" / "test-00000-of-00001.parquet")
    task = Hub(str(folder), test_split="test").load()
    assert [e.answer for e in task.train] == ["0", "2", "3", "4"]
    assert [e.answer for e in task.test] == [None, "3"]
    assert task.notes == ["dropped 1 training rows whose question occurs in test"]
    assert Hub(str(folder), split="test").load().train[1].answer == "3"
    with pytest.raises(UserError, match="split validation: cannot be loaded"):
        Hub(str(folder), split="validation").load()


def test_what_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, subset: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((path, subset, split, revision))
        return datasets.Dataset.from_list([{"question": f"{path} {split} {i}", "answer": "1"} for i in range(3)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = Hub("openai/gsm8k", subset="main", revision="abc", prompt="question", test_split="test").load()
    assert task.name == "gsm8k"
    assert (task.train[0].id, task.test[2].id) == ("gsm8k/1", "gsm8k/3")
    Hub("a/train", test_path="b/test", prompt="question").load()
    assert asked == [
        ("openai/gsm8k", "main", "train", "abc"),
        ("openai/gsm8k", "main", "test", "abc"),
        ("a/train", None, "train", None),
        ("b/test", None, "test", None),
    ]


def test_hub_errors_are_one_line(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "a"}])}).save_to_disk(str(tmp_path / "d"))
    assert len(Hub(str(tmp_path / "d")).load().train) == 1
    for task in (
        Hub(str(tmp_path / "d"), split="test"),
        Hub("nobody/nothing"),
        Hub(str(tmp_path / "d"), test_split="x"),
    ):
        with pytest.raises(UserError) as caught:
            task.load()
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="test_split: train is the split of the training rows"):
        Hub("a/b", test_split="train")


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for task in (Parquet(str(tmp_path / "x.parquet")), Hub("a/b")):
        with pytest.raises(UserError, match=r"pip install 'covary\[data\]'"):
            task.load()
