"""A run's trained model as a plain Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from covary import checkpoint as checkpoints
from covary.types import UserError

OURS = ("training.safetensors", "state.json")


def export(run_folder: Path, out: Path, step: int | None = None) -> Path:
    """Copy a checkpoint's model and tokenizer to `out`, without what only a resume needs.

    Args:
        run_folder: the run.
        out: a folder that does not exist, or is empty.
        step: which checkpoint; None: the newest.

    Raises:
        UserError: no such checkpoint, or `out` holds something.
    """
    chosen = checkpoints.latest(run_folder)
    if step is not None:
        found = {c.step: c for c in checkpoints.checkpoints(run_folder)}
        if step not in found:
            raise UserError(f"--step: {run_folder} has checkpoints of steps {', '.join(map(str, found))}, not {step}")
        chosen = found[step]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not an empty folder")
    shutil.copytree(chosen.folder, out, ignore=shutil.ignore_patterns(*OURS), dirs_exist_ok=True)
    return out
