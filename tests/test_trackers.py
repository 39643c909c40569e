"""Trackers get every row, continue after a resume, and never stop a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import covary
from covary import trackers
from covary.config import validate
from covary.types import UserError
from tests.loop.mini import metrics, run, vowels


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_what_metrics_jsonl_gets(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, log={"samples": 0, "tracker": "tensorboard"})
    shown = scalars(tmp_path / "run")
    rows = metrics(tmp_path / "run")
    assert set(shown) == {name for row in rows for name in row} - {"step"}
    for row in rows:
        for name, value in row.items():
            if name != "step" and value is not None:
                assert shown[name][row["step"]] == pytest.approx(value, rel=1e-6)


def test_a_resume_continues_the_same_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, steps=3, checkpoint={"every": 2, "keep_last": -1}, log={"samples": 0, "tracker": "tensorboard"})
    last = tmp_path / "run" / "checkpoints" / "step-000003"
    (last / "state.json").unlink()  # as if the run had died in step 3
    covary.train(resume=tmp_path / "run", reward=vowels, steps=4, quiet=True)
    rewards = scalars(tmp_path / "run")["reward/mean"]
    assert rewards == pytest.approx({row["step"]: row["reward/mean"] for row in metrics(tmp_path / "run")[1:]})
    assert sorted(rewards) == [1, 2, 3, 4]


class Recorder:
    """A tracker's package: what it was asked, and when it is to fail."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fail_at = fail_at

    def _call(self, name: str, what: Any) -> None:
        if name == self.fail_at:
            raise ConnectionError(f"{name}: the network\nis down")
        self.calls.append((name, what))

    def init(self, **arguments: Any) -> Recorder:
        self._call("init", arguments)
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self._call("log", (step, row))

    def finish(self) -> None:
        self._call("finish", None)

    Settings = SimpleNamespace


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resume_goes_to_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = Recorder()
    monkeypatch.setitem(sys.modules, name, package)
    run(tmp_path, log={"samples": 0, "tracker": name, "project": "mine"})
    covary.train(resume=tmp_path / "run", reward=vowels, steps=3, quiet=True)
    kinds = [kind for kind, _ in package.calls]
    assert kinds == ["init", "log", "log", "log", "finish", "init", "log", "log", "finish"]
    first, second = (what for kind, what in package.calls if kind == "init")
    assert first["project"] == second["project"] == "mine"
    assert first["resume"] == "allow"
    identity = "id" if name == "wandb" else "name"
    assert first[identity] == second[identity]
    assert len(first[identity]) >= 16
    assert first["config"]["algorithm"]["name"] == "gvpo"
    logged = [what for kind, what in package.calls if kind == "log"]
    assert [step for step, _ in logged] == [0, 1, 2, 2, 3]
    written = {row["step"]: row for row in metrics(tmp_path / "run")}
    for step, row in dict(logged).items():  # the last of each step
        assert {"step": step, **row} == {k: v for k, v in written[step].items() if v is not None}


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    package = Recorder(fail_at=call)
    monkeypatch.setitem(sys.modules, "wandb", package)
    run(tmp_path, log={"samples": 0, "tracker": "wandb"})
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    lines = [line for line in capsys.readouterr().out.splitlines() if "log.tracker" in line]
    assert lines == [
        "warning: log.tracker: wandb failed and gets nothing more, metrics.jsonl has everything "
        f"(ConnectionError: {call}: the network is down)"
    ]


def test_a_tracker_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    run(tmp_path, log={"samples": 0, "tracker": "trackio"})
    assert len(metrics(tmp_path / "run")) == 3
    assert "pip install 'covary[trackio]'" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorder()
    monkeypatch.setitem(sys.modules, "trackio", package)
    tracker = trackers.Tracker("trackio", "p", tmp_path, {}, pytest.fail)
    tracker.row({"step": 3, "a": float("nan"), "b": 1.0, "c": float("inf")})
    assert package.calls[-1] == ("log", (3, {"b": 1.0}))


def test_a_project_that_nothing_reads_is_refused() -> None:
    recipe = {"steps": 1, "task": {"name": "jsonl", "path": "x"}, "algorithm": {"name": "gvpo"}}
    with pytest.raises(UserError, match=r"log\.project: would be ignored, log\.tracker: tensorboard has no projects"):
        validate({**recipe, "log": {"tracker": "tensorboard", "project": "p"}}, where="test")
    with pytest.raises(UserError, match=r"log\.tracker: takes one of none, tensorboard, wandb, trackio"):
        validate({**recipe, "log": {"tracker": "mlflow"}}, where="test")


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    run(tmp_path, log={"samples": 0, "tracker": "wandb"})
    assert "log.tracker" not in capsys.readouterr().out
    name = (tmp_path / "run" / "tracker_id").read_text().strip()
    files = [
        f for f in (tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb") if os.path.getsize(f)
    ]
    assert len(files) == 1
    content = files[0].read_bytes()
    assert content.count(b"reward/mean") >= 2  # one row a step


def test_trackio_in_a_store_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: trackio reads its variables when it is imported."""
    pytest.importorskip("trackio")
    import subprocess

    program = """
import sys
from pathlib import Path
from covary.trackers import Tracker
for steps in ((0, 1, 2), (2, 3)):
    tracker = Tracker("trackio", "sums", Path(sys.argv[1]), {"seed": 1}, lambda text: sys.exit(text))
    for step in steps:
        tracker.row({"step": step, "loss": step / 4})
    tracker.close()
from trackio.sqlite_storage import SQLiteStorage
import json
print("\\n" + json.dumps({run: SQLiteStorage.get_logs("sums", run) for run in SQLiteStorage.get_runs("sums")}))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])
    (rows,) = runs.values()
    assert {(row["step"], row["loss"]) for row in rows} == {(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)}
