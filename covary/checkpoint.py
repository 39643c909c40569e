"""Checkpoints: complete or absent, ordinary Hugging Face folders, no pickle.

`checkpoints/step-NNNNNN/` holds the model as transformers writes it (so it can be loaded, evaluated and
exported directly) or the adapter as peft writes it, `training.safetensors` (optimizer, random states) and
`state.json` (everything else).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from covary.log import no_library_bars
from covary.types import RunError, UserError

_NAME = re.compile(r"step-(\d+)")
PARTIAL = ".partial"
_PICKLE = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_ADAPTER = "adapter_model.safetensors"
_SUMS = "SHA256SUMS"  # the format of `sha256sum`, which checks it with -c
_STATE = {"step", "progress", "random", "recipe", "fingerprints", "rollout", "doctor", "metrics_position", "row"}


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    folder: Path
    step: int

    def state(self) -> dict[str, Any]:
        """The loop's plain numbers."""
        return json.loads((self.folder / "state.json").read_text(encoding="utf-8"))

    def weights(self, like: nn.Module) -> dict[str, Tensor]:
        """The policy's trained state by name: its adapter's, or all of it, read as transformers reads it."""
        if hasattr(like, "peft_config"):
            stored = load_file(self.folder / _ADAPTER)
            return {name: stored[_in_adapter(name)] for name, p in like.named_parameters() if p.requires_grad}
        with no_library_bars():
            loaded = type(like).from_pretrained(self.folder, dtype=torch.float32, use_safetensors=True)  # pyright: ignore[reportAttributeAccessIssue]
        return loaded.state_dict()

    def training(self) -> dict[str, Tensor]:
        """Optimizer tensors and random states."""
        return load_file(self.folder / "training.safetensors")

    def changed(self) -> list[str]:
        """Names of files whose content is not what was written. Reads all of them."""
        return [name for name, digest in _sums(self.folder).items() if not _holds(self.folder / name, digest)]

    def refuse_changed(self) -> None:
        """A model that is not the one that was trained must not pass for it.

        Raises:
            UserError: a file's content is not what was written.
        """
        if changed := self.changed():
            raise UserError(
                f"{self.folder} is damaged: {', '.join(changed)} changed since it was written (`sha256sum -c {_SUMS}` "
                "there shows it); name another checkpoint's folder"
            )


def checkpoints(run_folder: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first, by number; other names and damaged ones are ignored.

    Raises:
        UserError: one of them holds pickle files in place of safetensors, which nobody may read.
    """
    damaged = broken(run_folder)
    for folder in damaged:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE)
        if pickled:
            raise UserError(
                f"{folder} holds {', '.join(pickled)}: pickle files can run code when they are read, and a checkpoint of "
                "covary holds safetensors only; move that folder away"
            )
    return [checkpoint for checkpoint in _named(run_folder) if checkpoint.folder not in damaged]


def broken(run_folder: Path) -> list[Path]:
    """Folders that are named like checkpoints and are not complete."""
    return [checkpoint.folder for checkpoint in _named(run_folder) if not _is_complete(checkpoint.folder)]


def newest_sound(run_folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that holds what was written, and what is wrong with those that were passed over."""
    complaints = [f"{folder} is damaged or half written" for folder in broken(run_folder)]
    for checkpoint in reversed(checkpoints(run_folder)):
        changed = checkpoint.changed()
        if not changed:
            return checkpoint, complaints
        complaints.append(f"{checkpoint.folder} is damaged ({', '.join(changed)} changed since it was written)")
    return None, complaints


def drop_partial(run_folder: Path) -> None:
    """Remove what a kill left of checkpoints that were being written or dropped."""
    for path in (run_folder / "checkpoints").glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def way_on(run_folder: Path) -> str:
    """What a person does after a run failed."""
    newest = latest(run_folder)
    if newest is None:
        return "there is no checkpoint yet"
    return f"the newest checkpoint is {newest.folder}, go on from it with: covary train --resume {run_folder}"


def latest(run_folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, None where there is none."""
    found = checkpoints(run_folder)
    return found[-1] if found else None


def _in_adapter(name: str) -> str:
    """The name by which peft's files know an adapter's parameter."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def _named(run_folder: Path) -> list[Checkpoint]:
    folders = [
        Checkpoint(folder, int(match[1]))
        for folder in (run_folder / "checkpoints").glob("step-*")
        if (match := _NAME.fullmatch(folder.name))
    ]
    return sorted(folders, key=lambda checkpoint: checkpoint.step)


def _is_complete(folder: Path) -> bool:
    """Whether every file is there, the state has what a resume needs, and tensor files have the length that their header says."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [folder / name for name in _sums(folder)]
        match = _NAME.fullmatch(folder.name)
        whole = match is not None and isinstance(state, dict) and state.keys() >= _STATE
        return (
            whole
            and state["step"] == int(match[1])
            and folder / "state.json" in files
            and all(path.is_file() for path in files)
            and all(_has_its_length(path) for path in files if path.suffix == ".safetensors")
        )
    except (OSError, ValueError, TypeError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 by file name.

    Raises:
        OSError: there is no list.
        ValueError: a line of it is none.
    """
    lines = (folder / _SUMS).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("  ", 1) for line in lines]
    if not pairs or any(len(pair) != 2 or len(pair[0]) != 64 for pair in pairs):
        raise ValueError(f"{folder / _SUMS} is damaged")
    return {name: digest for digest, name in pairs}


def _holds(path: Path, digest: str) -> bool:
    try:
        return _sha256(path) == digest
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_its_length(path: Path) -> bool:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length < path.stat().st_size else None
    if header is None:
        return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + length + max(ends, default=0)


def save(
    run_folder: Path,
    step: int,
    *,
    model: nn.Module,
    tokenizer: Any,
    engine_state: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep_last: int,
) -> Path:
    """Write the checkpoint of `step` beside its final name, sync it to disk, rename it; then drop the oldest.

    Args:
        run_folder: the run's folder.
        step: steps completed.
        model: the policy (its configuration is written with the weights).
        tokenizer: written beside it.
        engine_state: `TrainEngine.state_dict()`.
        state: plain JSON values: `progress`, `recipe`, `fingerprints`, `rollout`, `doctor`, `metrics_position`, `row`.
        keep_last: newest checkpoints to keep; -1 keeps all.

    Raises:
        RunError: the disk refused; earlier checkpoints are untouched, and nothing of this one stays.
    """
    parent = run_folder / "checkpoints"
    final = parent / f"step-{step:06d}"
    partial = parent / f"{final.name}{PARTIAL}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        weights = {k.removeprefix("model."): v for k, v in engine_state.items() if k.startswith("model.")}
        if hasattr(model, "peft_config"):
            model.peft_config["default"].save_pretrained(partial)  # pyright: ignore[reportIndexIssue, reportCallIssue]
            save_file({_in_adapter(k): v.contiguous() for k, v in weights.items()}, partial / _ADAPTER)
        else:
            with no_library_bars():
                model.save_pretrained(partial, state_dict=weights)  # pyright: ignore[reportCallIssue]
        tokenizer.save_pretrained(partial)
        training = {k: v for k, v in engine_state.items() if not k.startswith("model.")}
        save_file(
            {k: v.contiguous() for k, v in (training | _random_tensors()).items()}, partial / "training.safetensors"
        )
        (partial / "state.json").write_text(
            json.dumps({**state, "step": step, "random": _random_numbers()}), encoding="utf-8"
        )
        names = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
        (partial / _SUMS).write_text("".join(f"{_sha256(partial / n)}  {n}\n" for n in names), encoding="utf-8")
        for path in partial.rglob("*"):
            path.chmod(0o644)  # safetensors makes files for their owner alone
            _sync(path)
        _sync(partial)
        if final.exists():  # not complete or damaged, or it would be the one that was resumed from
            shutil.rmtree(final)
        os.rename(partial, final)
        _sync(parent)
    except Exception as error:  # safetensors has an error of its own for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"checkpoint {final} could not be written ({error})") from error
    if keep_last >= 0:
        # A newer one is damaged, since it was not resumed from: it must not take the place of one that is not.
        for old in [found for found in checkpoints(run_folder) if found.step <= step][:-keep_last]:
            # Renamed first: a kill while files go must not leave a folder that looks complete.
            dropped = old.folder.with_name(old.folder.name + PARTIAL)
            os.rename(old.folder, dropped)
            shutil.rmtree(dropped, ignore_errors=True)  # what a network disk still holds goes with the next resume
    return final


def restore_random(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Put back every random state that `save` recorded: of `training()`, and `state()["random"]`."""
    torch.set_rng_state(tensors["random.torch"])
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _random_tensors() -> dict[str, Tensor]:
    states = {"random.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def _random_numbers() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # pyright: ignore[reportAssignmentType]
    return {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached]}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
