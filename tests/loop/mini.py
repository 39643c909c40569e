"""A small task and run for tests of the loop: a random byte-level model, rewards from text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import covary
from covary.algorithms import ALGORITHMS
from covary.batch import Algorithm
from covary.config import reads_teacher
from covary.rewards import Grader
from covary.tasks import Task
from covary.types import Example
from tests.models import save_random_model


@dataclass(frozen=True)
class Sums:
    """One-digit sums."""

    rows: int = 12
    test_rows: int = 4
    template: str | None = None

    def load(self) -> Task:
        examples = [
            Example(f"sum/{i}", [{"role": "user", "content": f"{i} + {i % 5} ="}], answer=str(i + i % 5))
            for i in range(self.rows + self.test_rows)
        ]
        return Task("sums", examples[self.test_rows :], examples[: self.test_rows], Grader("exact"))


STATE: dict[str, Any] = {
    "progress": {}, "recipe": {}, "fingerprints": {}, "rollout": {}, "doctor": {}, "metrics_position": 0, "row": {},
}  # fmt: skip
"""What the loop gives `checkpoint.save`, without content."""
TRACES = """
tags: ["<t>", "</t>"]
contexts:
  prompt: "Q: {question} <t>"
  posterior: "Q: {question} ({answer}) <t>"
  direct: "Q: {question} A:"
stop: "e"
glue: " so "
answer: "{answer}."
"""


def on_traces(folder: Path) -> dict[str, Any]:
    """What a method needs that rewards traces by the answer behind them: a random model ends about a third of these."""
    (folder / "traces.yaml").write_text(TRACES)
    return {
        "task": Sums(template=str(folder / "traces.yaml")),
        "reward": None,
        "rollout": {"prompts": 4, "completions": 8, "max_tokens": 100},
        "eval": {"max_tokens": 6},
    }


def rewards_itself(algorithm: Any) -> bool:
    """Whether an algorithm (an object, or a mapping with its name) makes its own rewards."""
    cls = ALGORITHMS[algorithm["name"]] if isinstance(algorithm, dict) else type(algorithm)
    return cls.reward is not Algorithm.reward and cls.template != "chat"


def vowels(completion: str, answer: str | None) -> float:
    """A dense reward that a random model can climb: the share of one half of the alphabet."""
    return sum(c in "aeiou" or c.isupper() for c in completion) / max(1, len(completion))


def pairs(path: Path) -> dict[str, Any]:
    """A task of offline completions, the first of each row the better one."""
    rows = [{"prompt": f"say {i}", "completion": ["good", "bad!"], "rewards": [1, 0]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "jsonl", "path": str(path), "completion": "completion"}


def needs(algorithm: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a run of `run` has to change for an algorithm: data, a teacher, no reward."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in algorithm.items() if k != "name"}
    built = ALGORITHMS[algorithm["name"]](**fields)
    changes: dict[str, Any] = {}
    if not built.needs_reward or type(built).reward is not Algorithm.reward:
        changes["reward"] = None
    if built.offline or "dataset" in built.sources:
        changes["task"] = pairs(folder / "data.jsonl")
    if built.offline:
        changes["rollout"] = {"engine": "dataset", "prompts": 4, "completions": 2, "max_tokens": 8}
    if reads_teacher(built):
        changes["teacher"] = {"model": str(save_random_model(folder / "teacher", seed=1))}
    return changes


def run(folder: Path, **changes: Any) -> covary.api.Trained:  # pyright: ignore
    """Two steps of a tiny run under `folder`."""
    model = folder / "model"
    if not model.exists():
        save_random_model(model)
    sections: dict[str, Any] = {
        "out": str(folder / "run"),
        "steps": 2,
        "model": str(model),
        "task": Sums(),
        "algorithm": {"name": "gvpo"},
        "reward": vowels,
        "rollout": {"prompts": 4, "completions": 4, "max_tokens": 6},
        "optimizer": {"lr": 1e-3, "prompts": 2},
        "log": {"samples": 0},
    }
    if rewards_itself(changes.get("algorithm", {"name": "gvpo"})):
        sections |= on_traces(folder)
    return covary.train(quiet=True, **{**sections, **changes})


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / "rollouts" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Metrics without what a clock measured."""
    return {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"}
