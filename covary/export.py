"""A run's trained model as a plain Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from covary import checkpoint as checkpoints
from covary.log import no_library_bars
from covary.models.loading import load_model, load_tokenizer
from covary.models.lora import is_adapter
from covary.types import UserError

OURS = ("training.safetensors", "state.json", "SHA256SUMS")


def export(run_folder: Path, out: Path, step: int | None = None) -> Path:
    """Copy a checkpoint's model and tokenizer to `out`, without what only a resume needs; an adapter is merged.

    Args:
        run_folder: the run.
        out: a folder that does not exist, or is empty.
        step: which checkpoint; None: the newest.

    Raises:
        UserError: no such checkpoint, or it is damaged, `out` holds something, or an adapter cannot be merged.
    """
    chosen = checkpoints.latest(run_folder)
    if chosen is None:
        raise UserError(f"{run_folder} has no complete checkpoint under checkpoints/")
    if step is not None:
        found = {c.step: c for c in checkpoints.checkpoints(run_folder)}
        if step not in found:
            raise UserError(f"--step: {run_folder} has checkpoints of steps {', '.join(map(str, found))}, not {step}")
        chosen = found[step]
    chosen.refuse_changed()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not an empty folder")
    if run_folder.resolve() in out.resolve().parents:
        raise UserError(f"--out: {out} lies inside the run folder; name one outside")
    partial = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        if is_adapter(str(chosen.folder)):
            _merge(chosen, partial)
        else:
            shutil.copytree(chosen.folder, partial, ignore=shutil.ignore_patterns(*OURS))
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"--out: {out} cannot be written ({error})") from error
    return out


def write_folder(model: nn.Module, tokenizer: Any, out: Path) -> None:
    """A model and its tokenizer as transformers writes them, readable by all."""
    with no_library_bars():
        model.save_pretrained(out)  # pyright: ignore[reportCallIssue]
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors makes files for their owner alone


def _merge(checkpoint: checkpoints.Checkpoint, out: Path) -> None:
    folder, trusted = str(checkpoint.folder), checkpoint.state()["recipe"]["model"]["trust_remote_code"]
    write_folder(load_model(folder, trust_remote_code=trusted), load_tokenizer(folder, trusted), out)
