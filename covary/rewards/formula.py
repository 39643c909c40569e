r"""What an answer's text says, before any algebra: a number, a formula with its unit, an equation, or plain words.

Spellings that mean the same are brought to the one that Math-Verify's grammar reads: calculator notation (`pi/2`,
`exp(16)`, `sqrt(2)`), thousands separators of a bare number, mixed numbers, unicode signs, units, currency, percent. Plain
numbers become exact fractions here and never reach the grammar, which is a hundred times slower.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from covary.rewards.extract import has_prose

LONGEST = 500  # characters: reference answers of public data sets stay below half of that
DEEPEST = 12  # brackets and exponents: the grammar takes seconds for dozens, half a minute for some thousand
_LARGEST_EXPONENT = 400  # of a decimal power of ten; beyond floats anyway

_SIGNS = str.maketrans(
    {
        **{"\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u22c5": r"\cdot ", "\u00b7": r"\cdot ", "\u00f7": "/"},
        **{
            "\u2264": r"\le ",
            "\u2265": r"\ge ",
            "\u2260": r"\neq ",
            "\u03c0": r"\pi ",
            "\u221e": r"\infty ",
            "\u222a": r"\cup ",
        },
        **{
            "\u2229": r"\cap ",
            "\u2208": r"\in ",
            "\u00b0": r"^\circ ",
            "\u221a": r"\sqrt ",
            "\u00b1": r"\pm ",
            "\u2248": r"\approx ",
        },
        **{
            "\u00b2": "^2",
            "\u00b3": "^3",
            "\u00bd": r"\frac{1}{2}",
            "\u00bc": r"\frac{1}{4}",
            "\u00be": r"\frac{3}{4}",
        },
        **{"\u00a3": "", "\u20ac": "", "\u00a5": "", "\u00a0": " ", "\u2009": " ", "\u202f": " "},
    }
)
_INVISIBLE = re.compile(r"(?<!\\)\\(?:displaystyle|textstyle|left|right|limits|bigg?|Bigg?|[!,;:> ])(?![A-Za-z])|~")
_TEX_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)\s*(?=\d{3}(?!\d))")
_REPLACED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[dtc]frac", r"\\frac"),
        (r"(?<=\d)\.(?=\s*(?:[/*]|$))", ""),
        (r"\\(?:text|mbox|mathrm|textrm)\s*\{\s*(?:,\s*)?(?:and|or)\s*\}", " or "),
        (r"(?<![A-Za-z\\])(?:,\s*)?(?:and|or)(?![a-z])", " or "),
        (r"\\q?quad", " "),
        (r"\\(?:le|leq|leqslant)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:ge|geq|geqslant)(?![A-Za-z])|>=|=>", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"!=|\\ne(?![A-Za-z])", r"\\neq "),
        (r"\\mathrm\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\*\*", "^"),
        (r"(?<!\\)\bnp\.", ""),
        (r"(?<![A-Za-z\\])(arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|sqrt|pi)(?![a-z])", r"\\\1 "),
        (r"(?<![A-Za-z\\])(?:inf|infty|infinity|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<![\d.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.])", r"\1\\times 10^{\2}"),
        (r"\+\s*-", "-"),
        (r"-\s*-", "+"),
        (r"(?<![\d/^_])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"(\1+\\frac{\2}{\3})"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*(\d|[a-zA-Z])(?![A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![\d}])(?<!\d )\.(\d)", r"0.\1"),
        (r"\s+", " "),
    ]
)
_CALLS = {r"\sqrt": r"\sqrt{%s}", "exp": "e^{(%s)}", "abs": "|%s|", "^": "^{(%s)}"}
_CALL = re.compile(r"(\\sqrt|(?<![A-Za-z\\])(?:exp|abs)|\^)\s*\(")

_WORDS = re.compile(r"\\(?:text\w*|mathrm|mathbf|mathit|mbox|operatorname|rm)\s*\{([^{}]*)\}")
_PERCENT = re.compile(
    r"\s*(?:\\?%|\\(?:text|mathrm)\s*\{\s*(?:\\?%|percent|pct|percentage)\s*\}|(?:percent(?:age)?|pct)\b)\s*$", re.I
)
_UNIT = re.compile(
    r"""(?:(?P<text>\\(?:text\w*|mathrm|mbox|rm)\s*\{[^{}]*\}) (?:\s*\^\s*\{?-?\d\}?)?
          |\^\s*\{?\s*\\circ\s*\}? | \\(?:circ|degree)\b | (?P<words>(?<=[\d\s}).])(?<![\\A-Za-z])[A-Za-z]{2,}\.?(?:\^\{?-?\d\}?)?)
          |(?<=[0-9}]\s)[mgshLlNJWVKA](?:\^\{?-?\d\}?)? | [/\s]+ )$""",
    re.VERBOSE,
)
_NO_UNITS = {"or", "and", "pi", "ln", "log", "sin", "cos", "tan", "mod", "max", "min"}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# Only units between which a number changes, by what they are called; every other word beside a number is ignored.
_UNITS = {
    spelling: name
    for name, spellings in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "inch": "inch inches",
        "foot": "ft foot feet",
        "yard": "yd yard yards",
        "mile": "mi mile miles",
        "mg": "mg milligram milligrams",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "second": "s sec second seconds",
        "minute": "min minute minutes",
        "hour": "h hr hour hours",
        "day": "day days",
        "week": "week weeks",
        "year": "yr year years",
        "cent": "cent cents",
        "dollar": "dollar dollars",
        "ml": "ml milliliter milliliters millilitre millilitres",
        "liter": "l liter liters litre litres",
        "degree": "degree degrees deg",
        "radian": "radian radians rad",
    }.items()
    for spelling in spellings.split()
}

_PLAIN = re.compile(
    r"""(?P<sign>[-+]?)\s*(?:
          (?P<comma>0,\d{3,}|\d{4,},\d\d)
          |(?P<whole>\d{1,3}(?:,\s?\d{3})+|\d{1,3}(?:\ \d{3})+|\d+)(?:\.(?P<digits>\d*))?)
        (?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*(?P<exponent>[-+]?\d{1,3})\s*\}?)?""",
    re.VERBOSE,
)
_RATIO = re.compile(r"([-+]?)\s*(?:\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(-?\d+)\s*/\s*(-?\d+))")
_MIXED = re.compile(r"(-?)\s*\(?(\d+)\s*\+?\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}\)?")
_NAME = r"(?:[A-Za-z]{1,3}|\\[A-Za-z]+|[A-Za-z](?:\([A-Za-z,]+\)))(?:_(?:\{\w+\}|\w)|')*"
_NAMES = re.compile(rf"\(?\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\)?")
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?![=<>])")
_APPROX = re.compile(r"\\(?:approx|simeq|sim)(?![A-Za-z])")


@dataclass(frozen=True)
class Number:
    """An exact number as it was written.

    Attributes:
        value: exactly.
        step: one unit of the last written decimal; 0 where no decimal point was written.
        digits: significant digits that were written.
    """

    value: Fraction
    step: Fraction = Fraction(0)
    digits: int = 0


@dataclass(frozen=True)
class Formula:
    """An answer, read as far as that goes without algebra.

    Attributes:
        text: in the grammar's notation, without unit, percent sign and the name before "=".
        words: the answer as plain words, for comparing texts.
        number: where the text is nothing but a number.
        name: what stands before the first "=", where that is a name or a tuple of names.
        equation: the text with its name, or with both sides.
        percent: whether a percent sign was written.
        unit: of `_UNITS`, with its power.
        readable: whether a grammar may try the text: no prose, not too long, not too deep.
    """

    text: str
    words: str
    number: Number | None
    name: str | None
    equation: str
    percent: bool
    unit: str | None
    readable: bool


def as_words(text: str) -> str:
    r"""A text without markup, case and punctuation around it: `\text{(C)}` is "c"."""
    plain = _WORDS.sub(r"\1", text)
    plain = " ".join(unicodedata.normalize("NFC", plain).casefold().split()).lstrip("$* ").rstrip("$*. ")
    return plain[1:-1] if re.fullmatch(r"\(\w\)", plain) else plain


def read(text: str) -> Formula:
    """Read an answer's text (what an extractor found, or a reference answer)."""
    words = as_words(text)
    if len(text) > LONGEST or _depth(text) > DEEPEST:
        return Formula(text, words, None, None, text, False, None, readable=False)
    text = _normal(text)
    equation = text
    text, name = _last_side(text)
    percent = _PERCENT.search(text)
    if percent:
        text = text[: percent.start()]
    number = _number(text)
    unit = None
    if number is None:
        text, unit, scale = _without_unit(text)
        number = _number(text)
        if scale and number is not None:
            number = Number(number.value * 10**scale, number.step * 10**scale, number.digits)
        elif scale:
            text = rf"({text})\cdot 10^{{{scale}}}"
    readable = bool(text) and not has_prose(text) and not re.search(r"\d\s+\d", text)
    return Formula(text, words, number, name, equation, percent is not None, unit, readable)


def _normal(text: str) -> str:
    text = unicodedata.normalize("NFC", text).translate(_SIGNS)
    if not re.search(r"matrix|array|cases", text):
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # backslashes that were escaped twice
    text = re.sub(r"\\?\$|\\[()\[\]]", " ", text) if "$" in text or r"\(" in text or r"\[" in text else text
    text = _INVISIBLE.sub("", _TEX_THOUSANDS.sub("", text)).strip(" \n\t*`").rstrip(".,;: ")
    text = (
        re.sub(r"(?<=\d),\s(?=\d{3}(?:\D|$))(?=[\d,\s]*$)", ",", text)
        if re.fullmatch(r"-?\d{1,3}(?:,\s\d{3})+", text)
        else text
    )
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return _braced(text).strip()


def _braced(text: str) -> str:
    """Arguments in parentheses become groups in braces: `sqrt(2)`, `exp(16)`, `2^(10)`."""
    position = 0
    while match := _CALL.search(text, position):
        end = _closing(text, match.end() - 1)
        if end is None:
            return text
        text = text[: match.start()] + _CALLS[match[1]] % text[match.end() : end] + text[end + 1 :]
        position = match.start() + 1
    return text


def _closing(text: str, start: int) -> int | None:
    level = 0
    for i in range(start, len(text)):
        level += (text[i] == "(") - (text[i] == ")")
        if level == 0:
            return i
    return None


def _depth(text: str) -> int:
    level = deepest = 0
    for character in text:
        if character in "([{^":  # a tower of exponents is as deep as it is high
            level += 1
            deepest = max(deepest, level)
        elif character in ")]}":
            level = max(0, level - 1)
    return deepest


def _last_side(text: str) -> tuple[str, str | None]:
    """The value that an equation or a chain of them ends in, and the name that it gives to it.

    An equation between formulas ("2x + z = 1") is left as it is.
    """
    first, *others = _APPROX.split(text)
    if others:
        text = others[0] if _NAMES.fullmatch(first.strip(" =")) else first
    if _at_top(text, r",|;| or "):
        return text.strip(), None
    cuts = [(match.start(), match.end()) for match in _at_top(text, _EQUALS.pattern)]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    sides = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    if len(sides) > 1 and _NAMES.fullmatch(sides[0]) and sides[-1] and not re.search(r"[<>]|\\[lg]e\b", text):
        return sides[-1], re.sub(r"\s", "", sides[0]).strip("()").lower()
    if len(sides) > 2 and sides[-1]:
        return sides[-1], None
    return text.strip(), None


def _at_top(text: str, pattern: str) -> list[re.Match[str]]:
    """Matches outside of all brackets."""
    level, levels = 0, []
    for character in text:
        level += (character in "([{") - (character in ")]}")
        levels.append(level)
    return [match for match in re.finditer(pattern, text) if levels[match.start()] <= 0]


def _without_unit(text: str) -> tuple[str, str | None, int]:
    """The text before its unit, the unit where it is one of `_UNITS`, and the power of ten of "million" and the like."""
    rest, words, scale = text, [], 0
    while match := _UNIT.search(rest):
        before = rest[: match.start()].rstrip()
        word = as_words(match[0]).strip(". ")
        if (
            not before
            or not re.search(r"\d|\\pi|\\frac|[a-z]$", before)
            or word in _NO_UNITS
            or (match["words"] and not before)
        ):
            break
        if match["words"] and not re.search(r"[\d)}.]$|\d[\s\w/^.\\{}-]*$", before):
            break
        if word in _SCALES:
            scale += _SCALES[word]
        elif word:
            words.insert(0, word)
        rest = before
    if not re.search(r"[\w)}\]|!']$", rest):
        return text, None, 0
    first = re.match(r"[a-z]+", " ".join(words))
    unit = _UNITS.get(first[0]) if first else None
    power = re.search(r"\^\s*\{?(-?\d)|\b(square|sq|cubic|cu)\b", " ".join(words))
    return rest, unit and unit + (power[0] if power else ""), scale


def _number(text: str) -> Number | None:
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and re.fullmatch(r"\([-+\d./ ]*\)", text):
        text = text[1:-1].strip()
    if match := _PLAIN.fullmatch(text):
        whole = re.sub(r"[,\s]", "", match["whole"] or "")
        digits = match["digits"] or ""
        if match["comma"]:
            whole, digits = match["comma"].split(",")
        exponent = int(match["exponent"] or 0)
        if len(whole) + len(digits) > _LARGEST_EXPONENT:
            return None
        scale = Fraction(10) ** (exponent - len(digits))
        value = int(match["sign"] + (whole + digits)) * scale
        return Number(value, scale if digits else Fraction(0), len((whole + digits).lstrip("0")))
    if match := _MIXED.fullmatch(text):
        sign, whole, top, bottom = match.groups()
        if int(bottom):
            return Number(int(sign + "1") * (int(whole) + Fraction(int(top), int(bottom))))
    if match := _RATIO.fullmatch(text):
        sign, *parts = match.groups()
        top, bottom = (int(part) for part in parts if part is not None)
        if bottom:
            return Number(int(sign + "1") * Fraction(top, bottom))
    return None
