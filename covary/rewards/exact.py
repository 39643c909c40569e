"""The answer, character for character."""

from __future__ import annotations

import unicodedata
from typing import Any


def grade_exact(text: str, answer: str | None, columns: dict[str, Any]) -> float | None:
    """1.0 if the stripped texts are the same in Unicode's composed form (NFC), otherwise 0.0.

    Without an answer there is nothing to compare with: None.
    """
    if not answer or not answer.strip():
        return None
    return float(_canonical(text) == _canonical(answer))


def _canonical(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()
