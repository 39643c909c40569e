from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covary.rewards import Graded, build_reward
from covary.types import Example, UserError

ROWS = [
    Example("r0", "1+1?", "2", columns={"level": 3}),
    Example("r1", [{"role": "user", "content": "2+2?"}], "4", columns={"level": 5, "topic": "sums"}),
]


def run(function: Callable[..., object], completions: list[str]) -> list[Graded]:
    return build_reward(function)(ROWS[: len(completions)], completions)


# -- the item form ------------------------------------------------------------------------------


def test_item_form_gets_completion_and_answer_by_position() -> None:
    assert run(lambda text, gold: float(text == gold), ["2", "5"]) == [Graded(1.0), Graded(0.0)]


def test_item_form_may_take_the_completion_only() -> None:
    assert run(lambda text: len(text), ["ab", ""]) == [Graded(2.0), Graded(0.0)]


def test_item_form_gets_the_columns_it_names() -> None:
    def reward(completion: str, level: int, *, answer: str, topic: str = "none") -> float:
        return level * 10 + int(answer) + (topic == "sums") * 0.5

    assert run(reward, ["", ""]) == [Graded(32.0), Graded(54.5)]


def test_item_form_keeps_defaults_that_are_no_columns() -> None:
    def reward(completion: str, answer: str, tolerance: float = 0.25) -> float:
        return tolerance

    assert run(reward, [""]) == [Graded(0.25)]


def test_item_form_with_keywords_gets_everything() -> None:
    seen: list[dict[str, Any]] = []

    def reward(completion: str, **row: Any) -> float:
        seen.append(row)
        return 1.0

    run(reward, ["", ""])
    assert seen == [
        {"answer": "2", "level": 3},
        {"answer": "4", "level": 5, "topic": "sums"},
    ]


def test_raising_item_is_unscorable_and_names_its_row() -> None:
    def reward(completion: str) -> float:
        return 1 / int(completion)

    verdicts = run(reward, ["2", "0"])
    assert verdicts[0] == Graded(0.5)
    assert verdicts[1] == Graded(None, "row r1: ZeroDivisionError: division by zero")


def test_missing_column_is_an_error_of_the_row() -> None:
    def reward(completion: str, answer: str, topic: str) -> float:
        return float(topic == "sums")

    missing, present = run(reward, ["", ""])
    assert present == Graded(1.0)
    assert missing.value is None
    assert missing.error is not None
    assert "row r0: TypeError" in missing.error
    assert "topic" in missing.error


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (None, None),
        (math.nan, None),
        (np.float32("nan"), None),
        (True, 1.0),
        (np.bool_(True), 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (2, 2.0),
    ],
)
def test_numbers_and_abstentions(returned: object, value: float | None) -> None:
    assert run(lambda text: returned, [""]) == [Graded(value)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (math.inf, "ValueError: returned inf, not a finite number"),
        (-math.inf, "ValueError: returned -inf, not a finite number"),
        (10**400, "not a finite number"),
        ("1.0", "TypeError: returned str, not a number or None"),
        ([1.0], "TypeError: returned list, not a number or None"),
        (np.array([0.5]), "TypeError: returned ndarray"),
    ],
)
def test_other_returns_are_errors(returned: object, message: str) -> None:
    (verdict,) = run(lambda text: returned, [""])
    assert verdict.value is None
    assert verdict.error is not None
    assert verdict.error.startswith("row r0: ")
    assert message in verdict.error


def test_callable_objects_are_named_by_their_class() -> None:
    class Length:
        def __call__(self, text: str) -> float:
            return len(text)

    reward = build_reward(Length())
    assert reward.name == "Length"
    assert reward(ROWS[:1], ["abc"]) == [Graded(3.0)]


# -- the batch form -----------------------------------------------------------------------------


def test_batch_form_gets_lists_and_chat_completions() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list, completions: list, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0, 1.0]

    assert run(reward, ["a", "b"]) == [Graded(0.0), Graded(1.0)]
    assert seen == {
        "prompts": ["1+1?", [{"role": "user", "content": "2+2?"}]],
        "completions": ["a", [{"role": "assistant", "content": "b"}]],
        "answer": ["2", "4"],
        "level": [3, 5],
        "topic": [None, "sums"],
    }


def test_batch_form_gets_only_what_it_names() -> None:
    def reward(completions: list, answer: list[str]) -> np.ndarray:
        return np.array([float(a) for a in answer], dtype=np.float32)

    assert run(reward, ["a", "b"]) == [Graded(2.0), Graded(4.0)]


def test_batch_form_abstains_and_errs_by_row() -> None:
    verdicts = run(lambda completions: [None, "x"], ["a", "b"])
    assert verdicts[0] == Graded(None)
    assert verdicts[1] == Graded(None, "TypeError: returned str, not a number or None")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "ValueError: returned 1 rewards for 2 completions"),
        ([1.0] * 3, "ValueError: returned 3 rewards for 2 completions"),
        (1.0, "TypeError: returned float, not a list"),
        ("ab", "TypeError: returned str, not a list"),
        (None, "TypeError: returned NoneType, not a list"),
    ],
)
def test_batch_form_must_return_one_reward_a_row(returned: object, message: str) -> None:
    assert run(lambda completions: returned, ["a", "b"]) == [Graded(None, message)] * 2


def test_raising_batch_makes_all_rows_unscorable() -> None:
    def reward(completions: list[str]) -> list[float]:
        raise RuntimeError("no service")

    assert run(reward, ["a", "b"]) == [Graded(None, "RuntimeError: no service")] * 2


# -- functions in files -------------------------------------------------------------------------

FILE = """
import os
from dataclasses import dataclass

scale = 2.0

@dataclass
class Settings:
    bonus: float = 0.5

def same(completion, answer, level):
    return float(completion == answer) * level + Settings().bonus

def process(completion):
    return os.getpid()

def processes(completions):
    return [os.getpid() for _ in completions]
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "my rewards.py"
    path.write_text(FILE)
    return path


def test_function_of_a_file(reward_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reward_file.parent)  # a relative path starts at the working directory
    reward = build_reward("my rewards.py:same", workers=1)
    assert reward.name == "same"
    assert reward(ROWS, ["2", "5"]) == [Graded(3.5), Graded(0.5)]
    reward.close()


def test_items_run_elsewhere_and_batches_here(reward_file: Path) -> None:
    item = build_reward(f"{reward_file}:process", workers=1)
    assert item(ROWS[:1], [""]) != [Graded(os.getpid())]
    item.close()
    batch = build_reward(f"{reward_file}:processes")
    assert batch(ROWS[:1], [""]) == [Graded(os.getpid())]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{file}", "names no function, write path/to/file.py:function"),
        ("{file}:sane", "'sane' is not defined in .*; did you mean 'same'"),
        ("{file}:zzz", "defined there: Settings, process, processes, same$"),
        ("{file}:scale", "'scale' is not a function in "),
        ("{folder}/missing.py:same", "there is no file "),
        ("{folder}/broken.py:same", "importing .*broken.py failed: SyntaxError"),
        ("{folder}/absent.py:same", "importing .*absent.py failed: ModuleNotFoundError"),
    ],
)
def test_wrong_file_or_function(reward_file: Path, spec: str, message: str) -> None:
    folder = reward_file.parent
    (folder / "broken.py").write_text("def same(:\n")
    (folder / "absent.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(UserError, match=message) as raised:
        build_reward(spec.format(file=reward_file, folder=folder))
    assert "\n" not in str(raised.value)
