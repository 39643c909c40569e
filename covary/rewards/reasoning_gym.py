"""Reasoning Gym's own scorers, one per task. Some evaluate the text: run them in the pool only."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any


def grade_reasoning_gym(text: str, answer: str | None, columns: dict[str, Any]) -> float | None:
    """The score, in [0, 1], that the task's own scorer gives.

    Args:
        text: the answer alone; scorers give little or nothing to an answer inside a sentence.
        answer: the entry's answer (some tasks have none).
        columns: the entry's `metadata` (its `source_dataset` names the task) and `question`, and
            under `parameters` the task's parameters, where they are not the defaults: a few
            scorers read them (puzzle24, decimal_arithmetic, time_intervals, polynomial_equations).
    """
    if "metadata" not in columns:
        raise ValueError("the reasoning_gym grader needs the entry's column 'metadata'")
    metadata = columns["metadata"]
    entry = {"question": columns.get("question"), "answer": answer, "metadata": metadata}
    parameters = json.dumps(columns.get("parameters", {}), sort_keys=True)
    score = _scorer(metadata["source_dataset"], parameters)
    try:
        return score(text, entry)
    except Exception:
        # Several scorers raise on malformed answers (prime_factorization on any word). If the
        # reference answer passes, the fault lies with the text, and that is a wrong answer.
        score(answer, entry)
        return 0.0


@functools.lru_cache(maxsize=256)
def _scorer(task: str, parameters: str) -> Callable[[str | None, dict[str, Any]], float]:
    # A second of imports, so only where this grader is used.
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, **json.loads(parameters)).score_answer
