"""Task families by the name that a recipe gives under `task: {name: ...}`."""

from __future__ import annotations

from covary.tasks.benchmarks import BENCHMARKS, Benchmark, all_of_reasoning_gym
from covary.tasks.hub import Hub
from covary.tasks.jsonl import Jsonl
from covary.tasks.parquet import Parquet
from covary.tasks.reasoning_gym import ReasoningGym
from covary.tasks.task import Task

TASKS: dict[str, type[ReasoningGym] | type[Jsonl] | type[Parquet] | type[Hub] | type[Benchmark]] = {
    "reasoning_gym": ReasoningGym,
    "jsonl": Jsonl,
    "parquet": Parquet,
    "hub": Hub,
    "benchmark": Benchmark,
}

__all__ = [
    "BENCHMARKS",
    "TASKS",
    "Benchmark",
    "Hub",
    "Jsonl",
    "Parquet",
    "ReasoningGym",
    "Task",
    "all_of_reasoning_gym",
]
