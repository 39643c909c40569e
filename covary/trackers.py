"""Experiment trackers beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio.

Each is an optional package, imported when its first row comes. None of them may stop a run: whatever one raises is said
once, and the run goes on without it. A resumed run continues the tracker's run, whose name or id lies in the run folder.
"""

from __future__ import annotations

import io
import json
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """An open run of a tracker."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """One step's finite numbers."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class TensorBoard:
    """Event files under `<run folder>/tensorboard`."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        import tensorboard  # noqa: F401  (torch's own message would not say which extra)
        from torch.utils.tensorboard import SummaryWriter

        # Steps that a resume makes again replace those that a crash left behind.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", step)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """One scalar a number."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it under `<run folder>/wandb`."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=_run_id(folder),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """One row; of a step that is there already W&B keeps the first, and a resume makes the same numbers."""
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        """Send or write what is left."""
        self._run.finish()


class Trackio:
    """A run of trackio, in its own local store (`TRACKIO_DIR`) or where its variables say."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], step: int) -> None:
        import trackio

        self._trackio = trackio
        with redirect_stdout(io.StringIO()):  # it prints how to open its dashboard, between our lines
            trackio.init(
                project=project,
                name=f"{folder.name}-{_run_id(folder)}",
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """One row."""
        self._trackio.log(dict(row), step=step)

    def close(self) -> None:
        """Write what is left."""
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Wandb] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Tracker:
    """What a run reports to: opened at its first row, silent for good once something failed.

    Args:
        name: a key of TRACKERS.
        project: what the tracker files the run under.
        folder: the run folder.
        config: the recipe.
        say: how the user is told, once, what failed.
    """

    def __init__(
        self, name: str, project: str, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self.name = name
        self._open = lambda step: TRACKERS[name](folder, project, config, step)
        self._say = say
        self._sink: Sink | None = None
        self._failed = False

    def row(self, row: Mapping[str, float]) -> None:
        """Report a step's numbers; those that are not finite are left out."""
        step = int(row["step"])
        numbers = {name: value for name, value in row.items() if name != "step" and math.isfinite(value)}

        def write() -> None:
            if self._sink is None:
                self._sink = self._open(step)
            self._sink.write(step, numbers)

        self._try(write)

    def close(self) -> None:
        """End the tracker's run."""
        if self._sink is not None:
            self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        except (Exception, SystemExit) as error:  # a tracker's own mistakes have any type
            self._failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            hint = f"; pip install 'covary[{self.name}]'" if isinstance(error, ImportError) else ""
            self._say(
                f"warning: log.tracker: {self.name} failed and gets nothing more, metrics.jsonl has everything "
                f"({reason}{hint})"
            )


def _run_id(folder: Path) -> str:
    """The name of this run at trackers, the same after a resume: it lies in the run folder."""
    path = folder / "tracker_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8) + "\n", encoding="ascii")
    return path.read_text(encoding="ascii").strip()
