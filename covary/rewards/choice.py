r"""The letter of a multiple-choice answer, A to J.

A letter counts where the text says that it is the answer, in this order: the last complete box, the last phrase like
"the answer is C" or "Answer: (C)", a letter that stands alone on the last line or opens the text ("C) because ..."). A
letter anywhere else is a word ("A", "I"), a variable, or an option that is being discussed.
"""

from __future__ import annotations

import re
from typing import Any

from covary.rewards.extract import after_thinking, boxed
from covary.rewards.types import Grade

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# "C", "(c)", "**C**", "C.", "C) because", "(C) 12": not "A cat", not "E = mc^2"
_OPENING = re.compile(r"[\s*_$(\[]*([A-Ja-j])(?:[\s*_$]*$|[\s*_$]*[)\].:](?![A-Za-z0-9]))")
_CUE = re.compile(
    r"""(?:\banswer(?:\s+choice)?(?:\s+is|\s*:|\s+would\s+be|\s+should\s+be)
          |\b(?:choose|choice|option|select|pick|answer)(?=[\s*_$(\[:]*(?:[B-HJ]|A)\b))
        [\s*_$:]*(?:(?:therefore|thus|clearly|definitely|hence|then|simply|probably|likely|option|choice|letter)[\s*_$:,]+){0,2}
        (?:[(\[][\s*_$]*(?P<wrapped>[A-Ja-j])[\s*_$]*[)\]]
          |(?P<bare>[A-J])(?![A-Za-z0-9'\u2019]|[-^_=+*/]\w)
        )""",
    re.VERBOSE | re.IGNORECASE,
)
_PRONOUN = re.compile(r"\s+(?!is\b|because\b|since\b|as\b)[a-z]")  # "Answer: I think it is B"


def grade_multiple_choice(text: str, answer: str | None, columns: dict[str, Any]) -> Grade | None:
    """Compare letters. None where the answer names no letter: "C", "(c)" and "C) twelve" do."""
    gold = _opening(_WRAPPED.sub(r"\1", answer or ""))
    if gold is None:
        return None
    stated = choice(text)
    if stated is None:
        return Grade("unparsable")
    return Grade("correct" if stated == gold else "incorrect", stated)


def choice(text: str) -> str | None:
    """The letter that the text gives as its answer, upper case; only what follows the last `</think>` is read."""
    text = after_thinking(text)
    inside = boxed(text)
    if inside is not None and (letter := _opening(_WRAPPED.sub(r"\1", inside))):
        return letter
    text = _WRAPPED.sub(r"\1", text)
    letter = None
    for match in _CUE.finditer(text):
        bare = match["bare"]
        # Lower case is an article or a word unless it is in parentheses.
        if bare is not None and (bare.islower() or (bare == "I" and _PRONOUN.match(text, match.end()))):
            continue
        letter = (bare or match["wrapped"]).upper()
    if letter is not None:
        return letter
    lines = text.strip().splitlines()
    return _opening(lines[-1], alone=True) or _opening(lines[0]) if lines else None


def _opening(text: str, *, alone: bool = False) -> str | None:
    match = _OPENING.match(text)
    if match is None or (alone and text[match.end() :].strip(" *_$.)]")):
        return None
    return match[1].upper()
