"""Runs of the command line in processes of their own, to be killed: forked, so that none pays for the imports again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter

import covary.api  # noqa: F401  (loaded before the forks)
from covary import checkpoint
from covary.cli import main
from tests.loop.mini import comparable
from tests.models import save_random_model

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])
TypeAdapter(int)  # the first one searches every installed package for plugins, before the forks as well


def write_recipe(folder: Path, **changes: object) -> Path:
    """A tiny run with several updates a step, evaluations and checkpoints; its reward is `reward.py` beside it."""
    rows = [{"prompt": f"{i} + {i % 5} =", "answer": str(i + i % 5)} for i in range(16)]
    data = folder / "sums"
    data.mkdir()
    for name, part in (("train", rows[4:]), ("test", rows[:4])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "reward.py").write_text(
        "def score(completions):\n    return [sum(c.isupper() for c in x) / 6 for x in completions]\n"
    )
    recipe = {
        "steps": 6,
        "model": {"name": str(save_random_model(folder / "model"))},
        "task": {"name": "jsonl", "path": str(data / "train.jsonl"), "test_path": str(data / "test.jsonl")},
        "reward": f"{folder / 'reward.py'}:score",
        "algorithm": {"name": "gvpo"},
        "rollout": {"prompts": 4, "completions": 4, "max_tokens": 6},
        "optimizer": {"lr": 1e-3, "prompts": 2},
        "eval": {"every": 3, "reward": f"{folder / 'reward.py'}:score"},
        "checkpoint": {"every": 2, "keep_last": 2},
        "log": {"samples": 0},
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def start(folder: Path, *arguments: object, prelude: Callable[[], None] | None = None) -> ForkServerProcess:
    """`covary ARGUMENTS` in a new process.

    Args:
        folder: what the command says is appended to the file `output` in it.
        *arguments: of the command line.
        prelude: called in that process before the command.
    """
    process = _FORKS.Process(target=_command, args=(folder / "output", [str(a) for a in arguments], prelude))
    process.start()
    return process


def _command(output: Path, arguments: list[str], prelude: Callable[[], None] | None) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever these tests run under
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if prelude is not None:
        prelude()
    sys.argv = ["covary", *arguments]
    main()


def go_on(recipe: Path, prelude: Callable[[], None] | None = None) -> ForkServerProcess:
    """Start the run `run` beside the recipe, or resume it: what a person does after a crash."""
    folder = recipe.parent / "run"
    if (folder / "config.yaml").exists():
        return start(recipe.parent, "train", "--resume", folder, "--quiet", prelude=prelude)
    return start(recipe.parent, "train", recipe, f"out={folder}", "--quiet", prelude=prelude)


def finish(process: ForkServerProcess, seconds: float = 120) -> int:
    """Its exit code."""
    process.join(seconds)
    assert process.exitcode is not None, "still running"
    return process.exitcode


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.005)


@dataclass(frozen=True)
class DiesWhileSaving:
    """A prelude: SIGKILL at the n-th file (or folder) of a checkpoint that goes to disk, counted over all checkpoints."""

    moment: int

    def __call__(self) -> None:
        original, left = checkpoint._sync, iter(range(self.moment, -1, -1))

        def sync(path: Path) -> None:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            original(path)

        checkpoint._sync = sync


def state_of(folder: Path) -> dict[str, object]:
    """Everything of a finished run that must not depend on how often it was killed."""
    last = checkpoint.checkpoints(folder)[-1]
    state = last.state()
    state["row"] = comparable(state["row"])
    del state["recipe"], state["metrics_position"]  # paths, and times of more or fewer digits
    return {
        "metrics": [comparable(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        "rollouts": {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())},
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "weights": (last.folder / "model.safetensors").read_bytes(),
        "training": (last.folder / "training.safetensors").read_bytes(),
        "state": state,
        "folder": sorted(path.name for path in folder.iterdir()),
    }
