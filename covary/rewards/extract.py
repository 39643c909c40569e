r"""Where in a completion the answer stands: text -> the answer's text, or None where there is none.

Every extractor takes time linear in the text, since the text is whatever a model wrote.
"""

from __future__ import annotations

import re
from collections import deque

# The digits of "x2" or "H2O" are no number; those behind "=" or a Chinese character are one.
# A minus counts as a sign unless it stands behind an operand ("5-3" ends in 3).
_NUMBER = re.compile(
    r"""(?<![A-Za-z0-9_])(?<![0-9]\.)
        (?:(?<![A-Za-z0-9)\]}])[-+\u2212])?
        (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?   # 1,234.5
          |[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?          # 12, 1.5, 1e-3
          |(?<!\.)\.[0-9]+)                                  # .5, but not the 5 of "...5"
        (?:/[0-9]+)?                                        # 3/4 is one number""",
    re.VERBOSE,
)
# An escaped character (`\{` is a printed brace, no group), the start of a box, or a group's brace.
_TEX_GROUPS = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|[{}]", re.DOTALL)


def whole_text(text: str) -> str:
    """The text itself, stripped."""
    return text.strip()


def last_number(text: str) -> str | None:
    """The last number, without "+" and thousands separators: "... = 1,234.50." gives "1234.50"."""
    matches = deque(_NUMBER.finditer(text), maxlen=1)
    return matches[0].group().replace("\u2212", "-").replace(",", "").removeprefix("+") if matches else None


def boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds, stripped; braces balance."""
    open_groups: list[int | None] = []  # where the content of each starts, None if it is no box
    last = (-1, -1)
    for match in _TEX_GROUPS.finditer(text):
        if match["box"]:
            open_groups.append(match.end())
        elif match[0] == "{":
            open_groups.append(None)
        elif match[0] == "}" and open_groups:
            start = open_groups.pop()
            if start is not None:
                last = max(last, (start, match.start()))
    return text[slice(*last)].strip() if last[0] >= 0 else None


def answer_tag(text: str) -> str | None:
    """What the last complete `<answer>...</answer>` after the last `</think>` holds, stripped."""
    final = text[text.rfind("</think>") + 1 :]
    end = final.rfind("</answer>")
    start = final.rfind("<answer>", 0, max(end, 0))
    return final[start + len("<answer>") : end].strip() if start >= 0 else None


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None
