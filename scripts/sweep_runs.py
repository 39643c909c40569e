"""Runs of a sweep -> numbers, table cells and plots; what the scripts that write docs/results share.

A comparison is paired by seed (runs of one seed share data and order), its interval Student's t over seeds at 95 %.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from covary.sweep import interval, load_sweep

RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Run:
    """A finished run: its seed, what its point overrides, and the rows of its `metrics.jsonl`."""

    seed: int
    overrides: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def first(self, key: str) -> float:
        """The metric where it was first measured."""
        return next(row[key] for row in self.rows if row.get(key) is not None)

    def last(self, key: str) -> float:
        """The metric where it was last measured."""
        return next(row[key] for row in reversed(self.rows) if row.get(key) is not None)


COLOURS, LINES = 10, ("solid", "dashed", "dotted")
FEW = 4

Points = dict[str, list[Run]]
Curve = dict[int, list[float]]
"""Values over runs, by step."""


def read(file: Path, folder: Path) -> Points:
    """Finished runs of a sweep by point, in the order of its file; what is missing is told on the screen.

    Args:
        file: the sweep's file.
        folder: holds a folder for each sweep, as runs/sweeps does.
    """
    sweep = load_sweep(file, lambda name: RECIPES / f"{name}.yaml")
    points: Points = {}
    missing = 0
    for job in sweep.jobs:
        path = folder / sweep.out.name / job.folder.name / "metrics.jsonl"
        rows = read_rows(path)
        if not rows or rows[-1]["step"] != job.steps:
            missing += 1
            continue
        points.setdefault(job.point, []).append(Run(job.seed, dict(job.overrides), rows))
    if missing:
        print(f"warning: {missing} of {len(sweep.jobs)} runs of {file} are not finished in {folder}", file=sys.stderr)
    if not points:
        sys.exit(f"error: {folder / sweep.out.name} holds no finished run; first: covary sweep {file} --threads 1")
    return points


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a `metrics.jsonl`; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def change(runs: Sequence[Run], key: str, digits: int = 3) -> str:
    """`before → after`, means over runs."""
    return f"{mean(run.first(key) for run in runs):.{digits}f} → {mean(run.last(key) for run in runs):.{digits}f}"


def span(runs: Sequence[Run], key: str) -> str:
    """95 % interval of the mean of the last values."""
    average, _, half = interval([run.last(key) for run in runs])
    return "one seed" if math.isnan(half) else f"{average - half:.3f} to {average + half:.3f}"


def difference(runs: Sequence[Run], others: Sequence[Run], key: str) -> tuple[float, float]:
    """Last value of `runs` less that of `others` at equal seeds: mean, and half its 95 % interval (NaN below two)."""
    of_other = {run.seed: run.last(key) for run in others}
    pairs = [run.last(key) - of_other[run.seed] for run in runs if run.seed in of_other]
    return (interval(pairs)[0], interval(pairs)[2]) if pairs else (math.nan, math.nan)


def signed(found: tuple[float, float], digits: int = 3) -> str:
    """A difference with its interval; nothing where there is none."""
    average, half = found
    return (
        "" if math.isnan(average) else f"{average:+.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
    )


def sign(found: tuple[float, float]) -> int:
    """1 or -1 where the interval leaves 0 out, else 0."""
    average, half = found
    return int(math.copysign(1, average)) if abs(average) > half else 0


def order(points: Points, first: str, key: str) -> str:
    """A sentence: what ends ahead of a point, what behind it, and what the seeds do not tell apart from it."""
    found = {name: difference(runs, points[first], key) for name, runs in points.items() if name != first}
    parts = []
    for which, words in ((1, "ahead of it"), (-1, "behind it"), (0, "not told apart from it")):
        names = [f"{name} ({signed(value)})" for name, value in found.items() if sign(value) == which]
        if names:
            parts.append(f"{words}: {', '.join(names)}")
    return "; ".join(parts)


def curve(runs: Sequence[Run], key: str) -> Curve:
    """A metric by step, wherever it was measured."""
    found: Curve = {}
    for run in runs:
        for row in run.rows:
            if row.get(key) is not None:
                found.setdefault(row["step"], []).append(row[key])
    return dict(sorted(found.items()))


def at(values: Curve, steps: Sequence[int], digits: int = 3) -> str:
    """Cells of a table: the mean over runs at each step."""
    return " | ".join(f"{mean(values[step]):.{digits}f}" if step in values else "" for step in steps)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def plot(path: Path, panels: Mapping[str, Mapping[str, Curve]], columns: int = 2) -> None:
    """Panels of curves by title: the mean over runs, shaded to its 95 % interval where curves are few."""
    figure, axes = grid(len(panels), columns)
    for own, (title, curves) in zip(axes, panels.items(), strict=True):
        for i, (name, values) in enumerate(curves.items()):
            steps, found = list(values), [interval(column) for column in values.values()]
            (line,) = own.plot(
                steps, [a for a, _, _ in found], label=name, marker="o", markersize=2, linestyle=LINES[i // COLOURS]
            )
            if len(curves) > FEW:  # bands over bands show nothing
                continue
            low, high = ([a + side * (0 if math.isnan(h) else h) for a, _, h in found] for side in (-1, 1))
            own.fill_between(steps, low, high, alpha=0.12, color=line.get_color())
        own.set(title=title, xlabel="step")
        own.xaxis.get_major_locator().set_params(integer=True)
        own.legend(fontsize="x-small", loc="upper left")
    save(figure, path)


def grid(panels: int, columns: int) -> tuple[Any, list[Any]]:
    """A figure with so many axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("error: the plots need matplotlib: pip install 'covary[sweep]'")
    columns = min(columns, panels)
    lines = math.ceil(panels / columns)
    figure = Figure(figsize=(5.5 * columns, 3.8 * lines), layout="constrained")
    axes = [figure.add_subplot(lines, columns, i + 1) for i in range(panels)]
    for own in axes:
        own.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")
