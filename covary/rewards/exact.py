"""The answer, character for character."""

from __future__ import annotations

import unicodedata
from typing import Any

from covary.rewards.types import Grade


def grade_exact(text: str, answer: str | None, columns: dict[str, Any]) -> Grade | None:
    """Correct if the stripped texts are the same in Unicode's composed form (NFC).

    A text of nothing but spaces is unparsable. Without an answer there is nothing to compare with: None.
    """
    if not answer or not answer.strip():
        return None
    stated = _canonical(text)
    if not stated:
        return Grade("unparsable")
    return Grade("correct" if stated == _canonical(answer) else "incorrect", stated)


def _canonical(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()
