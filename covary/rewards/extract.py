r"""Where in a completion the answer stands: text -> the answer's text, or None where there is none.

Every extractor takes time linear in the text, since the text is whatever a model wrote.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

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
_THINK_END = "</think>"
_CUE = re.compile(
    r"""(?:\banswer\b[\s*_]*(?:\([^()\n]{0,40}\)\s*)?(?:is|are|would\ be|should\ be|:|=)|\#{4})[\s*_:]*""",
    re.VERBOSE | re.IGNORECASE,
)
_TAIL = 2000  # characters in which an answer without a box is looked for: what is stated last, not what is derived
_SPAN = re.compile(
    r"""\$\$(?P<display>[^$]+)\$\$ | \\\[(?P<bracket>(?:[^\\]|\\(?![\[\]]))+)\\\] | \\\((?P<paren>(?:[^\\]|\\(?![()]))+)\\\)
      | (?<![\\\d$])\$(?P<inline>(?:\\.|[^$\\\n])+)\$""",
    re.VERBOSE,
)
_FRACTION = r"-?\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)"
_ITEM = re.compile(rf"(?:{_SPAN.pattern}) | {_FRACTION} | {_NUMBER.pattern}", re.VERBOSE)
_PERCENT = re.compile(r"\s*(?:\\?%|(?:percent|pct)\b)", re.IGNORECASE)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*([-+]?[0-9][0-9.,/]*)")
# What may stand between two boxes, or two formulas, that state one answer together: "\boxed{1} and \boxed{2}"
_JOIN = re.compile(
    r"""(?:[^A-Za-z0-9\\.]|\\[()\[\],;: ]|\\q?quad|\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)?\s*\}
        |\b(?:and|or)\b|[A-Za-z](?:_\{?\w{1,3}\}?)?\s*=)*""",
    re.VERBOSE,
)
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+")
_TEXT = re.compile(r"\\(?:text\w*|math(?:rm|bf|it)|mbox|operatorname)\s*\{[^{}]*\}")
_FUNCTIONS = (
    "and|or|exp|log|sin|cos|tan|sec|csc|cot|arc(?:sin|cos|tan)|sqrt|abs|inf|infinity|percent|pct|max|min|mod|gcd|lcm"
)
_PROSE = re.compile(rf"(?<![A-Za-z])(?!(?:{_FUNCTIONS})(?![a-z]))[A-Za-z]{{3,}}")

# An escaped character (`\{` is a printed brace, no group), the start of a box, or a group's brace.
_TEX_GROUPS = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


def whole_text(text: str) -> str:
    """The text itself, stripped."""
    return text.strip()


def last_number(text: str) -> str | None:
    """The last number, without "+" and thousands separators: "... = 1,234.50." gives "1234.50"."""
    matches = deque(_NUMBER.finditer(text), maxlen=1)
    return matches[0].group().replace("\u2212", "-").replace(",", "").removeprefix("+") if matches else None


def boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds, stripped; braces balance."""
    last = max(_boxes(text), default=None)
    return text[slice(*last)].strip() if last else None


def answer_tag(text: str) -> str | None:
    """What the last complete `<answer>...</answer>` after the last `</think>` holds, stripped."""
    final = after_thinking(text)
    end = final.rfind("</answer>")
    start = final.rfind("<answer>", 0, max(end, 0))
    return final[start + len("<answer>") : end].strip() if start >= 0 else None


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text where there is none."""
    start = text.rfind(_THINK_END)
    return text if start < 0 else text[start + len(_THINK_END) :]


def stated_answer(text: str) -> str | None:
    r"""The answer that a text in prose and LaTeX states, as it is written there.

    What stands after the last `</think>` is read, in this order:

    1. The last complete box, with those just before it that "and", "or" or punctuation joins to it ("1, 2"). A box that
       is cut off makes what stands before it no answer.
    2. What follows the last "answer is", "answer:" or "####": a formula or a number, else the rest of that line.
    3. The text itself, where it is one line without prose.
    4. The last formula or number in the last 2,000 characters.
    """
    text = after_thinking(text).replace(r"\\boxed", r"\boxed")
    boxes = sorted(_boxes(text))
    if boxes:
        return _joined([(text.rindex("\\", 0, a), b + 1, text[a:b].strip()) for a, b in boxes[-20:]], text)
    if re.search(r"\\(?:boxed|fbox)\s*\{", text):
        return None
    if bare := deque(_BARE_BOX.finditer(text), maxlen=1):
        return bare[0][1].rstrip(".,/")
    return _cued(text) or _uncued(text)


def has_prose(text: str) -> bool:
    """Whether there are words beside the commands and the names of functions that formulas have."""
    return bool(_PROSE.search(_COMMAND.sub(" ", _TEXT.sub(" ", text))))


def _cued(text: str) -> str | None:
    cues = deque(_CUE.finditer(text), maxlen=10)
    end, rest = len(text), None
    for cue in reversed(cues):
        segment = text[cue.end() : min(end, cue.end() + _TAIL)].strip()
        line = segment.split("\n", 1)[0].strip(" *_")
        items = list(_items(segment))
        if items and items[0][0] == 0:
            return _first(items, segment)
        if line and not has_prose(line):
            return line.rstrip(".")
        if inline := list(_items(line)):
            return inline[-1][2]
        if not line and items:
            return _first(items, segment)
        rest = rest or line.rstrip(".") or None
        end = cue.start()
    return rest


def _uncued(text: str) -> str | None:
    text = text.strip()
    if not text:
        return None
    one_line = len(text) <= _TAIL and "\n" not in text
    if one_line and not has_prose(text) and not _SPAN.search(text):
        return text
    if len(text) > _TAIL:
        text = text[-_TAIL:]
        text = text[text.find("\n") + 1 :]  # formulas do not pair up right from the middle of one
    items = list(_items(text))
    if items:
        return _joined(items, text) if items[-1][3] else items[-1][2]
    return text if one_line else None


def _first(items: list[tuple[int, int, str, bool]], text: str) -> str:
    """The first item, with those that are joined to it."""
    last = 0
    while last + 1 < len(items) and items[last + 1][3] and _joins(text[items[last][1] : items[last + 1][0]]):
        last += 1
    return ", ".join(item[2] for item in items[: last + 1])


def _joined(items: list[tuple[int, int, str]] | list[tuple[int, int, str, bool]], text: str) -> str:
    """The last item, with those that are joined to it."""
    first = len(items) - 1
    while first and items[first - 1][1] <= items[first][0] and _joins(text[items[first - 1][1] : items[first][0]]):
        first -= 1
    return ", ".join(dict.fromkeys(item[2] for item in items[first:]))


def _joins(between: str) -> bool:
    return len(between) <= 70 and _JOIN.fullmatch(between) is not None


def _items(text: str) -> Iterator[tuple[int, int, str, bool]]:
    """Formulas and numbers in order: start, end, content, whether it is a formula between delimiters."""
    position = 0
    while match := _ITEM.search(text, position):
        content = next((c for c in (match["display"], match["bracket"], match["paren"], match["inline"]) if c), None)
        if content is not None and (not content.strip() or (match["inline"] and has_prose(content))):
            position = match.start() + 1  # two prices, no formula: "$5 for one and $7 for the other"
            continue
        end = match.end()
        written = match[0] if content is None else content.strip()
        if percent := _PERCENT.match(text, end):
            end, written = percent.end(), written + r"\%"
        yield match.start(), end, written, content is not None
        position = end


def _boxes(text: str) -> list[tuple[int, int]]:
    """Where the content of each complete box starts and ends."""
    open_groups: list[int | None] = []  # where the content of each starts, None if it is no box
    boxes = []
    for match in _TEX_GROUPS.finditer(text):
        if match["box"]:
            open_groups.append(match.end())
        elif match[0] == "{":
            open_groups.append(None)
        elif match[0] == "}" and open_groups:
            start = open_groups.pop()
            if start is not None:
                boxes.append((start, match.start()))
    return boxes


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None
