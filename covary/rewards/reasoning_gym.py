"""Reasoning Gym's own scorers, one per task. Some evaluate the text: run them in the pool only."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from covary.rewards.types import Grade


def grade_reasoning_gym(text: str, answer: str | None, columns: dict[str, Any]) -> Grade:
    """What the task's own scorer says: correct at its full score, else incorrect with its score as credit.

    Args:
        text: the answer alone; scorers give little or nothing to an answer inside a sentence.
        answer: the entry's answer (some tasks have none).
        columns: the entry's `metadata` (its `source_dataset` names the task) and `question`, and
            under `parameters` the task's parameters, where they are not the defaults: a few
            scorers read them (puzzle24, decimal_arithmetic, time_intervals, polynomial_equations).
    """
    from reasoning_gym.factory import create_dataset  # a second: only where this grader is used

    if "metadata" not in columns:
        raise ValueError("the reasoning_gym grader needs the entry's column 'metadata'")
    metadata = columns["metadata"]
    entry = {"question": columns.get("question"), "answer": answer, "metadata": metadata}
    parameters = json.dumps(columns.get("parameters", {}), sort_keys=True)
    score = _dataset(create_dataset, metadata["source_dataset"], parameters).score_answer
    stated = text.strip()
    if not stated:
        return Grade("unparsable")
    try:
        value = float(score(text, entry))
    except Exception:
        # Several scorers raise on malformed answers (prime_factorization on any word). If the
        # reference answer passes, the fault lies with the text, and that is a wrong answer.
        score(answer, entry)
        return Grade("unparsable", stated)
    return Grade("correct", stated) if value >= 1 else Grade("incorrect", stated, credit=value)


@functools.lru_cache(maxsize=256)
def _dataset(create: Callable[..., Any], task: str, parameters: str) -> Any:
    return create(task, **json.loads(parameters))  # up to 0.3 s for tasks with files of words
