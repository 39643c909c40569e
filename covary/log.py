"""What a run leaves behind and what its user sees: metrics.jsonl, rollouts/, lines and progress bars."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from covary.jsonlines import dump_line
from covary.trackers import Tracker
from covary.types import Group, RunError

SHOWN = ("reward/mean", "loss", "grad_norm", "kl/old", "completion/length")
"""Metrics of the line a step."""


def printable(text: str) -> str:
    """Control characters escaped: a completion, a reward's message or a file name must not drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Screen:
    """Terminal output. `quiet`, and anything that is no terminal, gets plain lines without bars."""

    def __init__(self, quiet: bool = False, silent: bool = False) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=silent)
        self.quiet = quiet
        self._progress: Progress | None = None
        self._rollout: AbstractContextManager[_Bar] | None = None

    def say(self, text: str) -> None:
        """One plain line."""
        console = self._progress.console if self._progress else self.console
        safe = printable(text).encode(console.encoding, "backslashreplace").decode(console.encoding)
        console.print(safe, markup=False)

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[_Bar]:
        """A progress bar on a terminal; nothing elsewhere."""
        if self.quiet or not self.console.is_terminal:
            yield _Bar(None, None)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self._progress.start()
        task = self._progress.add_task(name, total=total)
        try:
            yield _Bar(self._progress, task)
        finally:
            self._progress.remove_task(task)
            if not self._progress.tasks:
                self._progress.stop()
                self._progress = None

    def completions(self, done: int, total: int) -> None:
        """A bar for a rollout under way: an engine's `on_progress`."""
        if self._rollout is None:
            self._rollout = self.bar("completions", total)
            self._rollout_bar = self._rollout.__enter__()
        self._rollout_bar(done, total)
        if done >= total:
            self._rollout.__exit__(None, None, None)
            self._rollout = None


class _Bar:
    def __init__(self, progress: Progress | None, task: object) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: int, total: int | None = None) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)  # pyright: ignore[reportArgumentType]


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Silence the progress bars of transformers for a while; they would tear ours and fill log files."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """What the disk refuses ends a run with one line.

    Raises:
        RunError: naming the path.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} could not be written ({error.strerror or error})") from error


class RunLog:
    """The files of a run folder, and the tracker that its metrics go to as well."""

    def __init__(self, folder: Path, tracker: Tracker | None = None) -> None:
        self.folder = folder
        self.tracker = tracker
        self.metrics_path = folder / "metrics.jsonl"
        with disk(folder):
            (folder / "rollouts").mkdir(parents=True, exist_ok=True)

    def position(self) -> int:
        """Bytes of metrics.jsonl so far."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def first(self) -> dict[str, float]:
        """The row before training; {} where it was lost."""
        rows = self._rows()
        return {k: float("nan") if v is None else v for k, v in rows[0].items()} if rows else {}

    def rewind(self, position: int, step: int) -> None:
        """Forget metrics behind `position` and rollouts of steps after `step`: a resumed run makes them again.

        Where the file is shorter than that (a power loss), rows up to the step before stay.
        """
        with disk(self.metrics_path):
            if self.position() >= position:
                with open(self.metrics_path, "ab") as file:
                    file.truncate(position)
            else:
                kept = [row for row in self._rows() if row["step"] < step]
                self.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="ascii")
        for path in (self.folder / "rollouts").glob("step-*.jsonl"):
            if path.stem.removeprefix("step-").isdigit() and int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def _rows(self) -> list[dict[str, float]]:
        """Whole lines of metrics.jsonl."""
        rows = []
        for line in self.metrics_path.read_text(encoding="ascii").splitlines() if self.metrics_path.exists() else ():
            with suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def metrics(self, row: Mapping[str, float]) -> None:
        """Append one step's numbers, on disk when this returns; what is not finite becomes null (JSON has no NaN)."""
        clean = {name: value if math.isfinite(value) else None for name, value in row.items()}
        with disk(self.metrics_path), open(self.metrics_path, "a", encoding="ascii") as file:
            file.write(json.dumps(clean) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.tracker is not None:
            self.tracker.row(row)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """One line per completion of a step, those that left the update included (weight null)."""
        path = self.folder / "rollouts" / f"step-{step:06d}.jsonl"
        with disk(path), open(path, "w", encoding="ascii") as file:
            for group in groups:
                rewards = group.rewards or [None] * len(group.completions)
                for completion, reward in zip(group.completions, rewards, strict=True):
                    row = {
                        "id": group.example.id,
                        "prompt": group.example.prompt,
                        "answer": group.example.answer,
                        "completion": completion.text,
                        "reward": reward,
                        "weight": completion.weight,
                        "source": completion.source,
                        **({"context": completion.context} if len(group.contexts) > 1 else {}),
                        "finish": completion.finish,
                        "tokens": completion.sampled_length,
                    }
                    file.write(dump_line(row))


def summary(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Held-out figures before and after a run, one line each."""
    names = [name for name in _headline(after) if name in before]
    return [f"{name}: {before[name]:.3f} -> {after[name]:.3f}" for name in names]


def _headline(row: Mapping[str, float]) -> list[str]:
    """The evaluation figures that a line has room for."""
    shown = ("accuracy", "greedy", "pass@")
    return [name for name in row if name.startswith("eval/") and name.rpartition("/")[2].startswith(shown)]


def step_line(row: Mapping[str, float], steps: int) -> str:
    """The line a step: what a person watches."""
    parts = [f"step {int(row['step'])}/{steps}"]
    parts += [f"{name} {row[name]:.4g}" for name in SHOWN if name in row]
    parts += [f"{name} {row[name]:.3f}" for name in _headline(row)]
    seconds = sum(value for name, value in row.items() if name.startswith("time/"))
    return "  ".join([*parts, *([f"{seconds:.1f} s"] if seconds else [])])
