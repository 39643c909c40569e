r"""Mathematical equality, by math-verify: "27.0" is 27, `\frac12` is 0.5, {1, 2} is {2, 1}.

Text is parsed by grammars, never evaluated; still it runs in the killable pool, because some
expressions take forever to compare. math-verify's own timeouts need signals, the pool's deadline
does not: they are off.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from typing import Any

from covary.rewards.extract import boxed

# Characters of an expression: reference answers of public data sets stay below half of that, and
# the parser takes half a minute for three thousand opening parentheses.
_LONGEST = 500
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_TEX_COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_MATH_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[|\n|#")


def grade_math(text: str, answer: str | None, columns: dict[str, Any]) -> float | None:
    r"""1.0 if the text states a value equal to the answer's, 0.0 if not or if it states none.

    The last complete `\boxed{}` is the stated answer; without one, math-verify searches the text.
    The answer may be plain, LaTeX with or without `$`, or a solution that ends in a box. One that
    is no mathematics ("see the diagram") is compared as text: 1.0 if equal, otherwise None, because
    nothing can be said. Without an answer: None.
    """
    if not answer or not (answer_text := _as_text(answer)):
        return None
    if _as_text(text) == answer_text:
        return 1.0
    parse, verify = _math_verify()
    gold = parse(_mathematics(answer))
    if not gold:
        return None
    # The order matters to math-verify (an inequality may answer an interval, not the reverse).
    return float(verify(gold, parse(_mathematics(text))))


def _mathematics(text: str) -> str:
    """The part of a text that math-verify shall read.

    It takes every box for part of one set and reads no LaTeX outside of delimiters, so the last
    box, or a text that is nothing but an expression, is handed over in a box of its own.
    """
    inside = boxed(text)
    if inside is None:
        if r"\boxed{" in text:  # cut off inside its answer: what stands before is not the answer
            return ""
        inside = text.strip()
        words = _TEX_COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", inside))
        if len(inside) > _LONGEST or _MATH_DELIMITER.search(inside) or _WORD.search(words):
            return text
    elif len(inside) > _LONGEST:
        return ""
    return rf"\boxed{{{inside.rstrip('.')}}}"


def _as_text(text: str) -> str:
    inside = boxed(text)
    plain = _TEXT_COMMAND.sub(r"\1", text if inside is None else inside)
    return " ".join(unicodedata.normalize("NFC", plain).casefold().split()).lstrip("$ ").rstrip("$. ")


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    # A second of imports, so only where this grader is used.
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    parse = functools.partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=0)
    return parse, functools.partial(math_verify.verify, timeout_seconds=None)
