"""Task families by the name that a recipe gives under `task: {name: ...}`."""

from __future__ import annotations

from covary.tasks.jsonl import Jsonl
from covary.tasks.reasoning_gym import ReasoningGym
from covary.tasks.task import Task

TASKS: dict[str, type[ReasoningGym] | type[Jsonl]] = {"reasoning_gym": ReasoningGym, "jsonl": Jsonl}

__all__ = ["TASKS", "Jsonl", "ReasoningGym", "Task"]
