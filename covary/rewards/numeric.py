"""Numbers, up to a relative tolerance: for answers that were measured or rounded."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from covary.rewards.extract import stated_answer
from covary.rewards.formula import Formula, Number, read
from covary.rewards.math import read_gold
from covary.rewards.types import Grade

TOLERANCE = 1e-4  # relative; a row's column `tolerance`, or the grader's, replaces it


def grade_numeric(text: str, answer: str | None, columns: dict[str, Any]) -> Grade | None:
    r"""Correct if the stated number differs from the answer's by at most the tolerance times the answer's.

    Constants ("pi/2", "3 \sqrt{2}") count as numbers; units are ignored, and a percent sign may be left out or stand for
    hundredths. None where the answer is no number.
    """
    gold = read_gold(answer) if answer and answer.strip() else None
    value = gold and _value(gold)
    if gold is None or value is None:
        return None
    stated = stated_answer(text)
    said = read(stated) if stated else None
    number = said and _value(said)
    if said is None or number is None:
        return Grade("unparsable", stated)
    tolerance = Fraction(columns.get("tolerance", TOLERANCE))
    scale = 1 if gold.percent == said.percent else Fraction(1, 100) if said.percent else 100
    close = any(abs(number.value * s - value.value) <= tolerance * abs(value.value) for s in {1, scale})
    return Grade("correct" if close else "incorrect", stated)


def _value(formula: Formula) -> Number | None:
    if formula.number is not None or not formula.readable:
        return formula.number
    from covary.rewards.symbolic import evaluate  # a second of imports, so only where it is needed

    value = evaluate(formula.text)
    return None if value is None else Number(value)
