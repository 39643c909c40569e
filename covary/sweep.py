"""`covary sweep`: one recipe over a grid and seeds, in parallel processes; a table and a plot of what came out.

recipe: recipes/quickstart.yaml      # a path, or the name of a shipped recipe
out: runs/beta                       # one run folder per point and seed below it
seeds: [0, 1, 2, 3, 4]
set: {steps: 40}                     # overrides of every run
grid:                                # every combination is a point
  algorithm.beta: [0.03, 0.1, 0.3]
points:                              # or named points, each its own overrides (beside or instead of a grid)
  gvpo: {algorithm: {name: gvpo}}
  grpo: {algorithm: {name: grpo}}
metric: eval/chain_sum/accuracy      # of the last row; the plot shows it by step
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from covary.api import from_anywhere
from covary.config import RunConfig, apply_overrides, changed_keys, load_recipe, validate
from covary.lock import is_locked
from covary.log import Screen
from covary.types import RunError, UserError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_NAME = 250  # bytes that file systems take, less the ending of the log beside a folder
_KEYS = ("recipe", "out", "seeds", "set", "grid", "points", "metric")
# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; 1.96 beyond.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
      2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


Overrides = list[tuple[str, Any]]
"""Keys and values of a recipe, later ones over earlier ones."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    point: str
    seed: int
    folder: Path
    overrides: Overrides
    steps: int


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    recipe: Path
    out: Path
    metric: str
    jobs: tuple[Job, ...]


def load_sweep(path: Path, recipe_path: Any) -> Sweep:
    """Read a sweep file and validate every run of it, before any starts.

    Args:
        path: the file.
        recipe_path: turns a recipe's name or path into a path.

    Raises:
        UserError: an unknown or missing key, or a run whose recipe is wrong, named by its point.
    """
    data = load_recipe(path)
    for key in data:
        if key not in _KEYS:
            raise UserError(f"{path}: {key}: unknown key; valid keys: {', '.join(_KEYS)}")
    for key in ("recipe", "out", "metric"):
        if not isinstance(data.get(key), str):
            raise UserError(f"{path}: {key}: is required; takes text")
    seeds = data.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise UserError(f"{path}: seeds: takes a list of integers, got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{path}: seeds: takes each seed once, got {seeds!r}")
    for key in ("set", "grid", "points"):
        if not isinstance(data.get(key) or {}, dict):
            raise UserError(f"{path}: {key}: takes a mapping, got {data[key]!r}")
    for name, own in (data.get("points") or {}).items():
        if not isinstance(own or {}, dict):
            raise UserError(f"{path}: points.{name}: takes a mapping of keys to values, got {own!r}")
    recipe, out = recipe_path(data["recipe"]), Path(data["out"])
    jobs: dict[Path, Job] = {}
    for point, overrides in _points(data, path):
        for seed in seeds:
            folder = out / f"{point}-seed{seed}".replace("/", "_")
            if len(folder.name.encode()) > _LONGEST_NAME or "\0" in folder.name:
                raise UserError(
                    f"{path}: point {point[:60]!r}... makes no folder name (at most {_LONGEST_NAME} bytes); use points"
                )
            if folder in jobs:
                raise UserError(f"{path}: points {jobs[folder].point!r} and {point!r} would share the folder {folder}")
            settings = [*(data.get("set") or {}).items(), *overrides, ("seed", seed), ("out", str(folder))]
            config = validate(_merged(load_recipe(recipe), settings), where=f"{path}, point {point}")
            if config.steps is None:
                raise UserError(f"{path}, point {point}: a sweep needs steps, not epochs")
            _refuse_others(folder, config, point)
            jobs[folder] = Job(point, seed, folder, settings, config.steps)
    return Sweep(recipe, out, data["metric"], tuple(jobs.values()))


def _refuse_others(folder: Path, config: RunConfig, point: str) -> None:
    """Refuse a run that is there under other settings: its numbers would be taken for this one's."""
    recipe = folder / "config.yaml"
    if not recipe.is_file():
        return
    before = validate(load_recipe(recipe), where=str(recipe))
    changed = [key for key in changed_keys(before, from_anywhere(config)) if key != "out"]  # the sweep may have moved
    if changed:
        raise UserError(
            f"{folder} holds a run of point {point} with other settings ({', '.join(changed)}); move it away, or name "
            "another out"
        )


def _points(data: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Overrides]]:
    """Names of the points, and what each overrides, in the order in which it applies."""
    grid, points = data.get("grid") or {}, data.get("points") or {"": {}}
    for key in [*(data.get("set") or {}), *grid, *(key for own in points.values() for key in own or {})]:
        if key in ("seed", "out"):
            raise UserError(f"{path}: {key}: is set by the sweep; use seeds and out")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid.{key}: takes a list of values, got {values!r}")
    for name, overrides in points.items():
        for values in itertools.product(*grid.values()):
            labels = [f"{key.rpartition('.')[2]}={_label(value)}" for key, value in zip(grid, values, strict=True)]
            point = " ".join([*([str(name)] if name != "" else []), *labels]) or "run"
            yield point, [*(overrides or {}).items(), *zip(grid, values, strict=True)]


def _label(value: Any) -> str:
    if isinstance(value, Mapping):
        own = [f"{key}={_label(part)}" for key, part in value.items() if key != "name"]
        return ",".join([*([str(value["name"])] if "name" in value else []), *own])
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _merged(recipe: dict[str, Any], settings: Overrides) -> dict[str, Any]:
    return apply_overrides(recipe, [f"{key}={json.dumps(value)}" for key, value in settings])


def run_sweep(sweep: Sweep, cores: int, threads: int, screen: Screen) -> tuple[list[str], list[Job]]:
    """Run what has not run yet, `cores // threads` processes at a time; returns the table's lines and the runs that failed.

    A run that had been stopped goes on from its checkpoint. A run that fails is named and left out. One that an earlier
    sweep left going is waited for.

    Raises:
        RunError: every run failed.
    """
    waiting = [job for job in sweep.jobs if _last_row(job) is None]
    screen.say(f"{len(sweep.jobs)} runs, {len(sweep.jobs) - len(waiting)} of them done before")
    for job in (job for job in waiting if is_locked(job.folder)):
        screen.say(f"note: {job.folder} is still going, and waited for")
    running: dict[subprocess.Popen, Job] = {}
    failed: list[Job] = []
    told = False
    with screen.bar("runs", len(sweep.jobs)) as bar, _waited_for(running):
        while waiting or running:
            free = [job for job in waiting if not is_locked(job.folder)]
            for job in free[: max(0, max(1, cores // threads) - len(running))]:
                waiting.remove(job)
                running[_start(sweep, job, threads)] = job
            for process in [process for process in running if process.poll() is not None]:
                job = running.pop(process)
                row = _last_row(job)
                if process.returncode or row is None:
                    failed.append(job)
                    screen.say(f"warning: {job.point}, seed {job.seed} failed; its output is in {_output(job)}")
                else:
                    value = row.get(sweep.metric)
                    number = len(sweep.jobs) - len(waiting) - len(running)
                    screen.say(f"{number}/{len(sweep.jobs)} {job.point}, seed {job.seed}: {sweep.metric} {value}")
                    if value is None and not told:
                        told = True  # now, and not after hours of runs
                        screen.say(f"warning: its last row has no {sweep.metric}; it has {', '.join(row)}")
                bar(len(sweep.jobs) - len(waiting) - len(running))
            time.sleep(0.2)
    if len(failed) == len(sweep.jobs):
        raise RunError(f"every run failed; the first one's output is in {_output(failed[0])}")
    return write_results(sweep, screen), failed


@contextmanager
def _waited_for(running: Mapping[subprocess.Popen, Job]) -> Iterator[None]:
    """Runs under way finish their step and save; only then may the sweep be started again, which would meet them."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except KeyboardInterrupt:  # has reached every run of the terminal too; a second signal would end them at once
        for process in running:
            process.wait()
        raise
    except BaseException:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(sweep: Sweep, job: Job, threads: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "covary", "train"]
    if (job.folder / "config.yaml").is_file():
        command += ["--resume", str(job.folder)]
    else:
        command += [str(sweep.recipe), *(f"{key}={json.dumps(value)}" for key, value in job.overrides)]
    _output(job).parent.mkdir(parents=True, exist_ok=True)
    with open(_output(job), "a", encoding="utf-8") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        return subprocess.Popen(
            [*command, "--quiet"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_end_with_the_sweep,
        )


def _end_with_the_sweep() -> None:
    """On Linux a run saves and stops when the sweep dies in a way that it cannot react to."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _output(job: Job) -> Path:
    return job.folder.with_name(job.folder.name + ".log")


def _rows(job: Job) -> list[dict[str, Any]]:
    path = job.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run's last line may be half written


def _last_row(job: Job) -> dict[str, Any] | None:
    """The last row of a run that reached its last step."""
    rows = _rows(job)
    return rows[-1] if rows and rows[-1]["step"] == job.steps else None


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, standard deviation, and half the width of the 95 % interval of the mean (Student's t; NaN for one value)."""
    if len(values) < 2:
        return mean(values), math.nan, math.nan
    deviation = stdev(values)
    quantile = _T[len(values) - 2] if len(values) - 1 <= len(_T) else 1.96
    return mean(values), deviation, quantile * deviation / math.sqrt(len(values))


def write_results(sweep: Sweep, screen: Screen) -> list[str]:
    """`results.json`, `table.md` and `plot.png` in the sweep's folder; returns the table's lines."""
    results: dict[str, dict[str, Any]] = {}
    for job in sweep.jobs:
        row = _last_row(job)
        if row is None:
            continue
        if row.get(sweep.metric) is None:
            screen.say(
                f"warning: {job.folder} has no {sweep.metric} in its last row and is left out; it has {', '.join(row)}"
            )
            continue
        point = results.setdefault(job.point, {"seeds": [], "values": [], "curves": []})
        point["seeds"].append(job.seed)
        point["values"].append(row[sweep.metric])
        point["curves"].append([[r["step"], r[sweep.metric]] for r in _rows(job) if r.get(sweep.metric) is not None])
    if not results:
        raise UserError(f"metric: {sweep.metric} is in the last row of no run")
    first = next(iter(results))
    header = f"| point | {sweep.metric} | 95 % interval | standard deviation | seeds | against {first}, by seed |"
    lines = [header, "|---|---|---|---|---|---|"]
    for name, point in results.items():
        average, deviation, half = interval(point["values"])
        point |= {"mean": average, "std": deviation, "half_interval": half}
        pair = _paired(point, results[first]) if name != first else None
        point |= {"difference": pair[0], "half_interval_of_difference": pair[2]} if pair else {}
        several = len(point["values"]) > 1
        spread = f"{average - half:.4g} to {average + half:.4g} | {deviation:.3g}" if several else " | "
        difference = f"{pair[0]:+.3g}" + (f" ± {pair[2]:.2g}" if math.isfinite(pair[2]) else "") if pair else ""
        lines.append(f"| {name} | {average:.4g} | {spread} | {len(point['seeds'])} | {difference} |")
    plain = {name: {key: _null(value) for key, value in point.items()} for name, point in results.items()}
    (sweep.out / "results.json").write_text(json.dumps({"metric": sweep.metric, "points": plain}, indent=1) + "\n")
    (sweep.out / "table.md").write_text("\n".join(lines) + "\n")
    _plot(sweep, results, screen)
    return lines


def _null(value: Any) -> Any:
    """JSON has no NaN: one seed has no deviation."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _paired(point: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """`interval` of the differences at equal seeds, which share data and their order; None without a common seed."""
    of_first = dict(zip(first["seeds"], first["values"], strict=True))
    pairs = zip(point["seeds"], point["values"], strict=True)
    differences = [value - of_first[seed] for seed, value in pairs if seed in of_first]
    return interval(differences) if differences else None


def _plot(sweep: Sweep, results: Mapping[str, Mapping[str, Any]], screen: Screen) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        screen.say("note: no plot; pip install 'covary[sweep]'")
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, point in results.items():
        at: dict[int, list[float]] = defaultdict(list)  # a run may lack the metric at a step
        for step, value in (pair for curve in point["curves"] for pair in curve):
            at[step].append(value)
        steps, columns = sorted(at), [at[step] for step in sorted(at)]
        centre = [mean(values) for values in columns]
        half = [interval(values)[2] if len(values) > 1 else 0.0 for values in columns]
        (line,) = axes.plot(steps, centre, label=name, marker="o", markersize=3)
        low, high = ([c + sign * h for c, h in zip(centre, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
    axes.set_xlabel("step")
    axes.set_ylabel(sweep.metric)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(sweep.out / "plot.png", dpi=130)
