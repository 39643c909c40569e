"""An answer in tags: `<think>...</think> <answer>...</answer>`."""

from __future__ import annotations

from typing import Any

from covary.rewards.extract import answer_tag
from covary.rewards.math import grade_stated
from covary.rewards.types import Grade


def grade_answer_tags(text: str, answer: str | None, columns: dict[str, Any]) -> Grade | None:
    """The last complete `<answer>` after the last closing think tag, compared as `math` compares."""
    return grade_stated(answer_tag(text), answer, columns)
