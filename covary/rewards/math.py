r"""Mathematical equality: Math-Verify's grammar and comparison, with guards of our own around them.

Text is parsed by grammars, never evaluated. What a completion states as its answer is found here (`extract.py`) and read as a
whole: a formula of which only a part can be parsed is unparsable. docs/grading.md has the policy for everything ambiguous.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

from covary.rewards.extract import has_prose, stated_answer
from covary.rewards.formula import Formula, Number, as_words, read
from covary.rewards.types import Grade

SIGNIFICANT = 6  # digits from which on a decimal stands for the number that it rounds
_MARKED_TEXT = re.compile(r"\$*\s*\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}\s*\.?\$*")


def grade_math(text: str, answer: str | None, columns: dict[str, Any]) -> Grade | None:
    r"""Compare the answer that a completion states with the reference answer.

    Args:
        text: the completion. The last complete `\boxed{}` is its answer; `extract.stated_answer` says what is without one.
        answer: plain, LaTeX with or without `$`, or a solution that ends in a box or in `#### 18`.
        columns: `tolerance`, if given, is the relative difference that decimals may have.

    Returns:
        None without an answer, and where the answer is a phrase ("see the diagram") that the text does not repeat: no text
        says anything about such a row.
    """
    if answer and (words := as_words(answer)) and as_words(text) == words:
        return Grade("correct", text.strip())
    return grade_stated(stated_answer(text), answer, columns)


def grade_stated(stated: str | None, answer: str | None, columns: dict[str, Any]) -> Grade | None:
    """The same for an answer that has been found already (None: there is none)."""
    if not answer or not as_words(answer):
        return None
    gold = read_gold(answer)
    kind = _kind(gold)
    said = None if stated is None or not stated.strip() else read(stated)
    if said and (gold.words == said.words or _squeezed(gold) == _squeezed(said)):
        return Grade("correct", stated)
    if kind == "phrase":
        return None
    if said is None:
        return Grade("unparsable")
    if kind == "text":
        return Grade("incorrect", stated)
    tolerance = columns.get("tolerance")
    if gold.number is not None and said.number is not None:
        return Grade("correct" if _same(gold, said, tolerance) else "incorrect", stated)
    if not said.readable:
        return Grade("unparsable", stated)
    verdict = _symbolic(gold, said, tolerance)
    return Grade(verdict, stated)


@functools.lru_cache(maxsize=4096)
def read_gold(answer: str) -> Formula:
    """Read a reference answer; a data set's answers come back with every completion, so they are kept."""
    found = None
    if re.search(r"\\(?:boxed|fbox)\s*\{|####", answer):
        found = stated_answer(answer)
        if found is None:  # a box that is never closed; the reference is right all the same
            found = re.split(r"\\(?:boxed|fbox)\s*\{", answer)[-1].replace("$", "")
    return read(answer if found is None else found)


def same_number(gold: Number, said: Number, tolerance: float | None = None) -> bool:
    """Exact equality; a decimal of at least six significant digits also stands for what it rounds or cuts off.

    Args:
        gold: the reference.
        said: the answer.
        tolerance: relative; replaces the rule of six digits.
    """
    difference = abs(gold.value - said.value)
    if difference == 0:
        return True
    if tolerance is not None:
        return difference <= Fraction(tolerance) * abs(gold.value)
    steps = [n.step for n in (gold, said) if n.step and n.digits >= SIGNIFICANT]
    return bool(steps) and difference <= max(steps)


def _same(gold: Formula, said: Formula, tolerance: float | None) -> bool:
    """Numbers with their percent signs and units. A bare 50 and 50 % are the same answer, 0.5 and 50 % the same number."""
    assert gold.number is not None
    assert said.number is not None
    if gold.unit and said.unit and gold.unit != said.unit:
        return False
    if gold.name and said.name and gold.name != said.name:
        return False
    if same_number(gold.number, said.number, tolerance):
        return True
    if gold.percent == said.percent:
        return False
    return same_number(_fraction(gold), _fraction(said), tolerance)


def _fraction(formula: Formula) -> Number:
    number = formula.number
    assert number is not None
    return Number(number.value / 100, number.step / 100, number.digits) if formula.percent else number


def _symbolic(gold: Formula, said: Formula, tolerance: float | None) -> Any:
    from covary.rewards.symbolic import compare  # a second of imports, so only where it is needed

    if gold.unit and said.unit and gold.unit != said.unit:
        return "incorrect"
    return compare(gold, said, tolerance)


def _kind(gold: Formula) -> str:
    """Whether a reference answer is mathematics, a text that other texts differ from, or a phrase beyond comparison."""
    if gold.number is not None or (gold.readable and _parses(gold)):
        return "math"
    one_word = " " not in gold.words and len(gold.words) <= 40
    return "text" if one_word or _MARKED_TEXT.fullmatch(gold.equation.strip()) else "phrase"


def _parses(gold: Formula) -> bool:
    if not has_prose(gold.text) and re.fullmatch(r"\s*\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}\s*", gold.text):
        return False  # \text{east} is a word, not a product of letters
    from covary.rewards.symbolic import parse

    return parse(gold.text) is not None or parse(gold.equation) is not None


def _squeezed(formula: Formula) -> tuple[str, bool, str | None]:
    return re.sub(r"\s", "", formula.equation), formula.percent, formula.unit
