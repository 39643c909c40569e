"""Rows read when they are drawn: the same order, the same resume, long prompts skipped and counted, bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import covary
from covary.tasks import Jsonl
from covary.train import Sampler
from covary.types import RunError, UserError
from tests.loop.mini import comparable, metrics, rollouts, run, vowels


def write(path: Path, prompts: list[str]) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"prompt": p, "answer": i}) + "\n" for i, p in enumerate(prompts)))
    return {"name": "jsonl", "path": str(path)}


def mixed(long: set[int], count: int = 12) -> list[str]:
    return [f"{i} " + "x" * (300 if i in long else 5) for i in range(count)]


def test_prompts_that_leave_no_room_are_skipped_counted_and_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, task=write(tmp_path / "rows.jsonl", mixed({2, 5, 7})), steps=3)  # 12 rows of 4 a step, 3 too long
    rows = metrics(tmp_path / "run")[1:]
    assert all(len(rollouts(tmp_path / "run", step)) == 16 for step in (1, 2, 3))
    drawn = [row["id"] for step in (1, 2, 3) for row in rollouts(tmp_path / "run", step)[::4]]
    assert not {"rows/3", "rows/6", "rows/8"} & set(drawn)
    assert len(set(drawn[:9])) == 9  # an epoch of the rows that fit
    assert sum(row["prompts/too_long"] for row in rows) >= 3
    told = [line for line in capsys.readouterr().out.splitlines() if "leave no room" in line]
    assert [line.split(":")[0] for line in told] == ["note", "warning"]
    assert "3 of 12 training prompts" in told[0]
    assert "'rows/3': its prompt has 3" in told[0]


def test_a_resume_draws_what_the_whole_run_draws(tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    task = write(tmp_path / "rows.jsonl", mixed({1, 4, 9}))
    run(tmp_path / "whole", task=task, steps=4)
    run(tmp_path / "halves", task=task, steps=2)
    covary.train(resume=tmp_path / "halves" / "run", reward=vowels, steps=4, quiet=True)
    whole, halves = (metrics(tmp_path / name / "run") for name in ("whole", "halves"))
    assert [comparable(row) for row in whole] == [comparable(row) for row in halves]


def test_nothing_that_fits_is_an_error_before_the_run(tmp_path: Path) -> None:
    task = write(tmp_path / "rows.jsonl", mixed(set(range(12))))
    with pytest.raises(UserError, match="more than the model's context of 256"):
        run(tmp_path, task=task)
    assert not (tmp_path / "run").exists()


def test_long_rows_at_the_front_hide_no_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covary.api, "CHECKED_PROMPTS", 4)
    run(tmp_path, task=write(tmp_path / "rows.jsonl", mixed(set(range(8)))), steps=1)
    assert {row["id"] for row in rollouts(tmp_path / "run", 1)} == {f"rows/{i}" for i in (9, 10, 11, 12)}


def test_test_prompts_all_have_to_fit(tmp_path: Path) -> None:
    write(tmp_path / "held.jsonl", mixed({3}))
    task = write(tmp_path / "rows.jsonl", [f"other {i}" for i in range(8)])
    with pytest.raises(UserError, match=r"'held/4'.* more than the model's context of 256"):
        run(tmp_path, task={**task, "test_path": str(tmp_path / "held.jsonl")})


def test_the_order_is_that_of_a_list_of_the_same_rows(tmp_path: Path) -> None:
    task = Jsonl(write(tmp_path / "rows.jsonl", [f"q{i}" for i in range(50)])["path"], test=7).load()
    lazy, held = Sampler(task.train, seed=3), Sampler(list(task.train), seed=3)
    assert [lazy.draw(9) for _ in range(12)] == [held.draw(9) for _ in range(12)]


def test_a_file_that_changes_during_a_run_ends_it(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "rows.jsonl", ["a", "b"])["path"])
    train = Jsonl(str(path)).load().train
    assert train[1].answer == "1"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RunError, match="was changed while it was being read"):
        train[1]


def test_rows_are_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, [f"{i} " + "word " * 100 for i in range(5000)])  # 2.5 MB
    tracemalloc.start()
    train = Jsonl(str(path)).load().train
    for _ in train:
        pass
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(train) == 5000
    assert held < 64 * len(train) < path.stat().st_size / 5
    assert peak < 128 * len(train)
