"""A sweep runs every point and seed once, goes on where it stopped, and tabulates what it measured."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from covary.api import from_anywhere
from covary.config import load_recipe, to_dict, validate
from covary.lock import is_locked
from covary.sweep import _merged, _paired, interval, load_sweep
from covary.types import UserError
from tests.cli.test_cli import call, model, recipe  # noqa: F401  (fixtures)


def write(path, **changes) -> None:
    data = {
        "recipe": "recipe.yaml",
        "out": "sweep",
        "seeds": [1],
        "set": {"log.samples": 0, "eval.samples": 1},
        "grid": {"algorithm.beta": [0.1, 0.3]},
        "metric": "eval/chain_sum/reward",
    }
    path.write_text(yaml.safe_dump({**data, **changes}))


def test_interval():
    average, deviation, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (average, deviation) == (3.0, pytest.approx(math.sqrt(2.5)))
    assert half == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert math.isnan(interval([1.0])[2])


def test_differences_are_paired_by_seed():
    first = {"seeds": [0, 1, 2], "values": [0.1, 0.5, 0.9]}
    other = {"seeds": [2, 0, 7], "values": [0.8, 0.2, 0.4]}
    average, deviation, half = _paired(other, first)
    assert average == pytest.approx(0.0)
    assert deviation == pytest.approx(math.sqrt(0.02))
    assert half == pytest.approx(12.706 * math.sqrt(0.02) / math.sqrt(2))
    assert _paired({"seeds": [7], "values": [1.0]}, first) is None


def test_a_sweep_runs_resumes_and_tabulates(call, recipe, tmp_path):  # noqa: F811
    write(tmp_path / "sweep.yaml")
    code, out, err = call("sweep", "sweep.yaml", "--cores", "2", "--quiet")
    assert code == 0, err
    folder = tmp_path / "sweep"
    results = json.loads((folder / "results.json").read_text())["points"]
    assert set(results) == {"beta=0.1", "beta=0.3"}
    for name, point in results.items():
        assert point["seeds"] == [1]
        last = [
            json.loads((folder / f"{name}-seed{seed}" / "metrics.jsonl").read_text().splitlines()[-1]) for seed in (1,)
        ]
        assert point["values"] == [row["eval/chain_sum/reward"] for row in last]
        assert f"| {name} | {point['mean']:.4g} |" in out
    assert (folder / "plot.png").stat().st_size > 1000
    config = yaml.safe_load((folder / "beta=0.3-seed1" / "config.yaml").read_text())
    assert (config["seed"], config["algorithm"]["beta"]) == (1, 0.3)

    # One run stopped before its end: only that one goes on.
    before = (folder / "beta=0.1-seed1" / "metrics.jsonl").stat().st_mtime_ns
    path = folder / "beta=0.3-seed1" / "metrics.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    code, out, err = call("sweep", "sweep.yaml", "--cores", "2", "--quiet")
    assert code == 0, err
    assert "2 runs, 1 of them done before" in out
    assert (folder / "beta=0.1-seed1" / "metrics.jsonl").stat().st_mtime_ns == before
    assert json.loads((folder / "results.json").read_text())["points"] == results

    path.write_text(whole + '{"step": 2, "lo')  # a line that a kill left half written
    code, out, err = call("sweep", "sweep.yaml", "--cores", "2", "--quiet")
    assert code == 0, err
    assert "2 runs, 2 of them done before" in out


def test_points_are_told_apart_and_override_what_all_share(recipe, tmp_path):  # noqa: F811
    algorithms = [{"name": "gvpo", "beta": 0.01}, {"name": "gvpo", "beta": 10.0}]
    write(tmp_path / "sweep.yaml", grid={"algorithm": algorithms}, set={"algorithm.beta": 0.5})
    sweep = load_sweep(tmp_path / "sweep.yaml", lambda name: tmp_path / name)
    assert [job.point for job in sweep.jobs] == ["algorithm=gvpo,beta=0.01", "algorithm=gvpo,beta=10.0"]
    points = {"p": {"algorithm": {"name": "gvpo", "terms": ["covariance"]}, "algorithm.beta": 0.7}}
    write(tmp_path / "sweep.yaml", grid={}, points=points, set={"algorithm.beta": 0.1})
    (job,) = load_sweep(tmp_path / "sweep.yaml", lambda name: tmp_path / name).jobs
    keys = [key for key, _ in job.overrides]
    assert keys.index("algorithm") < len(keys) - 1 - keys[::-1].index("algorithm.beta")

    # A run that is there was made with other settings.
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text((tmp_path / "recipe.yaml").read_text())
    with pytest.raises(UserError, match=r"holds a run of point p with other settings \(.*algorithm.beta"):
        load_sweep(tmp_path / "sweep.yaml", lambda name: tmp_path / name)


def test_a_run_that_is_there_is_known_by_its_absolute_paths(recipe, tmp_path):  # noqa: F811
    teacher = {"teacher": {"model": "teacher", "cache": "said.jsonl"}, "algorithm": {"name": "seqkd"}, "reward": None}
    (tmp_path / "teacher").mkdir()
    (tmp_path / "said.jsonl").touch()
    write(tmp_path / "sweep.yaml", grid={}, points={"t": teacher}, set={})
    (job,) = load_sweep(tmp_path / "sweep.yaml", lambda name: tmp_path / name).jobs
    job.folder.mkdir(parents=True)
    given = validate(_merged(load_recipe(tmp_path / "recipe.yaml"), job.overrides), where="test")
    made = to_dict(from_anywhere(given))
    assert made["teacher"]["model"] == str(tmp_path / "teacher")
    (job.folder / "config.yaml").write_text(yaml.safe_dump(made))
    load_sweep(tmp_path / "sweep.yaml", lambda name: tmp_path / name)
    made["teacher"]["model"] = str(tmp_path / "another")
    (job.folder / "config.yaml").write_text(yaml.safe_dump(made))
    with pytest.raises(UserError, match=r"holds a run of point t with other settings \(teacher\.model\)"):
        load_sweep(tmp_path / "sweep.yaml", lambda name: tmp_path / name)


def test_an_interrupted_sweep_waits_for_its_runs_to_save(call, recipe, tmp_path, monkeypatch):  # noqa: F811
    started: list[subprocess.Popen] = []

    def start(*_):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]))
        return started[-1]

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("covary.sweep._start", start)
    monkeypatch.setattr("covary.sweep.time.sleep", interrupted)
    write(tmp_path / "sweep.yaml")
    assert call("sweep", "sweep.yaml", "--cores", "2", "--quiet")[0] == 130
    assert [process.returncode for process in started] == [0, 0]


def test_a_terminated_sweep_stops_its_runs(call, recipe, tmp_path, monkeypatch):  # noqa: F811
    started: list[subprocess.Popen] = []

    def start(*_):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1]

    monkeypatch.setattr("covary.sweep._start", start)
    monkeypatch.setattr("covary.sweep.time.sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    write(tmp_path / "sweep.yaml")
    assert call("sweep", "sweep.yaml", "--cores", "2", "--quiet")[0] == 143
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_run_that_fails_costs_the_exit_code_and_itself(call, recipe, tmp_path, monkeypatch):  # noqa: F811
    from covary import sweep as module

    start = module._start

    def breaks(sweep, job, threads):
        if job.point == "beta=0.3":
            return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
        return start(sweep, job, threads)

    monkeypatch.setattr(module, "_start", breaks)
    write(tmp_path / "sweep.yaml", metric="loss")
    code, out, err = call("sweep", "sweep.yaml", "--cores", "2", "--quiet")
    assert code == 1
    assert "1 of 2 runs failed" in err
    assert "beta=0.3, seed 1 failed" in out
    assert "/2 beta=0.1, seed 1: loss " in out
    text = (tmp_path / "sweep" / "results.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["points"]["beta=0.1"]["std"] is None


@pytest.mark.slow
def test_a_metric_that_no_run_has_is_told_with_the_first_run(call, recipe, tmp_path):  # noqa: F811
    write(tmp_path / "sweep.yaml", metric="eval/chain_sums/reward")
    code, out, err = call("sweep", "sweep.yaml", "--cores", "1", "--quiet")
    assert code == 2
    assert "is in the last row of no run" in err
    lines = out.splitlines()
    told = next(i for i, line in enumerate(lines) if "its last row has no eval/chain_sums/reward; it has step," in line)
    assert any(line.startswith("2/2 ") for line in lines[told:])


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_run_going_and_the_next_one_waits(recipe, tmp_path):  # noqa: F811
    write(tmp_path / "sweep.yaml", set={"steps": 100000, "checkpoint.every": 100000})
    command = [sys.executable, "-m", "covary", "sweep", "sweep.yaml", "--cores", "1", "--quiet"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    first = tmp_path / "sweep" / "beta=0.1-seed1"
    deadline = time.monotonic() + 60
    while not (first / "rollouts" / "step-000001.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert is_locked(first)
    process.kill()
    process.wait()
    while is_locked(first):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert list((first / "checkpoints").glob("step-*"))  # it saved before it left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "sedes: unknown key"),
        ({"seeds": "all"}, "seeds: takes a list of integers"),
        ({"grid": {"algorithm.beta": 3}}, r"grid.algorithm.beta: takes a list of values"),
        ({"grid": {"algorithm.bta": [3]}}, "point bta=3: algorithm.bta: unknown key; did you mean algorithm.beta"),
        ({"points": {"g": {"algorithm": {"name": "gpro"}}}, "grid": {}}, "point g: algorithm.name: unknown algorithm"),
        ({"metric": None}, "metric: is required"),
        ({"seeds": [1, 1]}, "seeds: takes each seed once"),
        ({"grid": {"seed": [1, 2]}}, "seed: is set by the sweep"),
        ({"grid": ["algorithm.beta"]}, "grid: takes a mapping"),
        ({"set": "text"}, "set: takes a mapping"),
        ({"points": {"a": 5}}, "points.a: takes a mapping"),
        ({"points": {"a" * 300: {}}}, "makes no folder name"),
        ({"grid": {"algorithm.beta": [0.1, 0.10]}}, "points 'beta=0.1' and 'beta=0.1' would share the folder"),
        ({"grid": {}, "points": {"a/b": {}, "a_b": {}}}, "points 'a/b' and 'a_b' would share the folder"),
    ],
)
def test_mistakes_are_told_before_anything_runs(call, recipe, tmp_path, changes, message):  # noqa: F811
    write(tmp_path / "sweep.yaml", **changes)
    code, _, err = call("sweep", "sweep.yaml")
    assert code == 2
    assert message in err
    assert not (tmp_path / "sweep").exists()


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_are_valid(file):
    sweep = load_sweep(file, lambda name: ROOT / "recipes" / f"{name}.yaml")
    assert len(sweep.jobs) >= 12
    assert sweep.out == Path("runs/sweeps") / file.stem
