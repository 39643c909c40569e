"""Comparing formulas with Math-Verify and sympy, which this file imports (a second, so it is imported when first needed).

Math-Verify compares numbers by their difference to so many decimals, which makes all small numbers equal; constants are
therefore compared here, exactly if rational and by relative difference otherwise, also inside tuples, sets, intervals and
matrices. Formulas with variables are compared at a few points. The rest (equations, inequalities, unions) is Math-Verify's.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from sympy.core.function import AppliedUndef

from covary.rewards.formula import Formula, Number
from covary.rewards.math import SIGNIFICANT, same_number
from covary.rewards.types import Verdict

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts, which need signals, are off

_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_MOST_BITS = 1 << 17  # of a number that is written as a power or factorial: 2004! has 19,000
_DEEPEST_FUNCTIONS = 4  # sympy's log of a log takes twice as long with every level
_PRECISION = 40  # digits to which irrational numbers are computed
_CLOSE = sympy.Float("1e-25", _PRECISION)  # relative difference of equal ones
_CLOSE_DECIMALS = sympy.Float("1e-13")  # with decimals, which sympy holds in 53 bits
_TAME = 120  # nodes of a formula
_VALUES = (sympy.Expr, sympy.Tuple, sympy.FiniteSet, sympy.Interval)
_UNFINISHED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
_COMPLEX = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])|\\(?:i|imath|Re|Im|arg|mathbb\s*\{C\})(?![A-Za-z])")
_POINTS = ((1, 1, 1, 1), (-1, -1, -1, -1), (1, -1, 1, -1))  # signs of the variables


def compare(gold: Formula, said: Formula, tolerance: float | None) -> Verdict:
    """Whether two readable formulas say the same; `unparsable` where the second cannot be parsed, or not within bounds."""
    # Sides of equations are compared, unless one names a value and the other is a curve, or both name a function.
    sides = _is_equation(gold) == _is_equation(said) and not (gold.name and said.name and "(" in gold.name)
    g, s = (parse(formula.text if sides else formula.equation) for formula in (gold, said))
    if s is None or not is_small(s):
        return "unparsable"
    if g is None or not is_small(g):
        return "incorrect"
    if _holds(s, _UNFINISHED) and not _holds(g, _UNFINISHED):
        return "unparsable"  # an integral that is left to the grader is no answer, and may take for ever
    if (_is_set(gold.text) and _is_tuple(said.text)) or (_is_tuple(gold.text) and _is_set(said.text)):
        return "incorrect"
    if sides and gold.name and said.name and gold.name != said.name:
        return "incorrect"
    if gold.percent != said.percent and _equal(_hundredth(g, gold.percent), _hundredth(s, said.percent), tolerance):
        return "correct"
    return "correct" if _equal(g, s, tolerance) else "incorrect"


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Any | None:
    """The sympy object that the whole of a text stands for, with exact decimals; None if the grammar does not take all of it."""
    if "or" in text and (union := _alternatives(text)) is not None:
        return union
    text = text.replace(" or ", ",")
    if re.search(r"\\binom\s*\{\s*\d{4,}|\^\s*\{?\s*\d{5,}", text):
        return None  # binomials, greatest common divisors and the like are computed while they are parsed
    try:
        text = normalize_latex(text, _NORMALIZATION)
        parsed = latex2sympy(text, is_real=not _COMPLEX.search(text), convert_degrees=False, normalization_config=None)
    except Exception:  # the grammar's own, and whatever sympy's constructors say of nonsense
        return None
    if isinstance(parsed, sympy.Eq) and isinstance(parsed.rhs, sympy.Set):
        return parsed.rhs  # "x in [1, 2]"
    return parsed


def is_small(value: Any) -> bool:
    """Whether no power or factorial in it is too large to compute, and no function nested too deep."""
    try:
        return all(_nesting(e) <= _DEEPEST_FUNCTIONS and _bits(e) <= _MOST_BITS for e in _leaves(value))
    except (RecursionError, OverflowError, ValueError, TypeError):
        return False


def constant(value: Any) -> Number | None:
    """The exact number of a small rational constant; a decimal with the digits that it was written with."""
    if isinstance(value, sympy.Float):
        mantissa, _, exponent = str(value).lstrip("-").partition("e")
        mantissa = mantissa.rstrip("0")  # sympy pads to 15 digits
        digits = mantissa.partition(".")[2]
        step = Fraction(10) ** (int(exponent or 0) - len(digits))
        return Number(Fraction(str(value)), step, len(mantissa.replace(".", "").lstrip("0")))
    exact = _exact(value)
    return None if exact is None else Number(exact)


def _exact(value: Any) -> Fraction | None:
    """A rational constant, computed here: sympy's own evaluation asks about signs, which can take for ever."""
    if isinstance(value, sympy.Rational):
        return Fraction(int(value.p), int(value.q))
    if isinstance(value, sympy.Float):
        return Fraction(str(value))
    if not isinstance(value, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.UnevaluatedExpr):
        return None
    parts = []
    for arg in value.args:
        part = _exact(arg)
        if part is None:
            return None
        parts.append(part)
    if isinstance(value, sympy.Add):
        return sum(parts, Fraction(0))
    if isinstance(value, sympy.Mul):
        return math.prod(parts, start=Fraction(1))
    if isinstance(value, sympy.UnevaluatedExpr):
        return parts[0]
    if isinstance(value, sympy.factorial):
        return Fraction(math.factorial(int(parts[0]))) if parts[0].denominator == 1 and parts[0] >= 0 else None
    base, exponent = parts
    return base ** int(exponent) if exponent.denominator == 1 and (base or exponent >= 0) else None


def _alternatives(text: str) -> Any | None:
    """Inequalities joined by "or", as the union of the sets that they describe."""
    parts = text.split(" or ")
    if len(parts) < 2 or not all(re.search(r"[<>]|\\[lg]e\b|\\in\b", part) for part in parts):
        return None
    sets = [_as_set(parse(part)) for part in parts]
    return sympy.Union(*sets) if all(s is not None for s in sets) else None


def _as_set(value: Any) -> Any | None:
    if isinstance(value, sympy.Set):
        return value
    try:
        return value.as_set()
    except Exception:  # not every relation can be solved
        return None


def _is_equation(formula: Formula) -> bool:
    """Whether it relates several quantities, rather than naming one value."""
    return formula.name is None and "=" in formula.text and "," not in formula.text


def _is_set(text: str) -> bool:
    return text.startswith(r"\{") and text.endswith(r"\}")


def _is_tuple(text: str) -> bool:
    return text.startswith("(") and text.endswith(")") and "," in text


def _hundredth(value: Any, percent: bool) -> Any:
    if not percent or not isinstance(value, sympy.Expr):
        return value
    return sympy.Mul(value, sympy.Rational(1, 100), evaluate=False)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, sympy.MatrixBase):
        return list(value)
    if isinstance(value, sympy.Basic) and not isinstance(value, sympy.Expr):
        return [leaf for arg in value.args for leaf in _leaves(arg)]
    return [value]


def _bits(value: Any) -> float:
    """An upper bound of log2 |value|, for any formula, without computing it."""
    if isinstance(value, sympy.Rational):
        return max(int(value.p).bit_length(), int(value.q).bit_length())
    parts = [_bits(arg) for arg in getattr(value, "args", ())]
    if isinstance(value, sympy.Pow | sympy.exp):
        base = max(parts[0], 1) if isinstance(value, sympy.Pow) else 2
        size = base * _magnitude(value.args[-1])  # its own parts have been found small
        if size > _MOST_BITS:
            raise OverflowError
        return size
    if isinstance(value, sympy.factorial | sympy.factorial2 | sympy.gamma):
        size = 2.0 ** min(parts[0], 64) * max(parts[0], 1)
        if size > _MOST_BITS:
            raise OverflowError
        return size
    total = sum(parts) + 4
    if total > _MOST_BITS:
        raise OverflowError
    return total


def _nesting(value: Any) -> int:
    inner = max((_nesting(arg) for arg in getattr(value, "args", ())), default=0)
    return inner + isinstance(value, sympy.Function)


def _magnitude(value: Any) -> float:
    return abs(complex(value.evalf(5, subs=dict.fromkeys(value.free_symbols, 3))))


def _holds(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, sympy.Basic | sympy.MatrixBase) and bool(value.has(*kinds))


def _equal(gold: Any, said: Any, tolerance: float | None) -> bool:
    if isinstance(gold, sympy.MatrixBase) and isinstance(said, sympy.MatrixBase):
        return gold.shape == said.shape and all(_equal(g, s, tolerance) for g, s in zip(gold, said, strict=True))
    if isinstance(gold, sympy.Tuple) and isinstance(said, sympy.Tuple):
        return len(gold) == len(said) and all(_equal(g, s, tolerance) for g, s in zip(gold, said, strict=True))
    if isinstance(gold, sympy.FiniteSet) and isinstance(said, sympy.FiniteSet):
        return _same_elements(gold, said, tolerance)
    if isinstance(gold, sympy.Interval) and isinstance(said, sympy.Interval):
        ends = gold.left_open == said.left_open and gold.right_open == said.right_open
        return ends and _equal(gold.start, said.start, tolerance) and _equal(gold.end, said.end, tolerance)
    if isinstance(gold, sympy.Expr) and isinstance(said, sympy.Expr):
        same = _same_expression(gold, said, tolerance)
        if same is not None:
            return same
    elif isinstance(gold, _VALUES) and isinstance(said, _VALUES):
        if isinstance(gold, sympy.Expr) != isinstance(said, sympy.Expr):
            return False  # one value and several
    elif isinstance(gold, sympy.Rel) and isinstance(said, sympy.Rel) and _same_relation(gold, said):
        return True
    return _is_tame(said) and _verify(gold, said)


def _same_relation(gold: Any, said: Any) -> bool:
    """Whether the two differ by a constant factor, and by sides that are swapped."""
    if isinstance(said, sympy.Gt | sympy.Ge):
        said = said.reversed
    if isinstance(gold, sympy.Gt | sympy.Ge):
        gold = gold.reversed
    if type(gold) is not type(said):
        return False
    if isinstance(gold.lhs, AppliedUndef) and isinstance(said.lhs, AppliedUndef):  # f(x) = 2x is f(t) = 2t
        renamed = dict(zip(said.lhs.args, gold.lhs.args, strict=False))
        return said.lhs.xreplace(renamed) == gold.lhs and _equal(gold.rhs, said.rhs.xreplace(renamed), None)
    g, s = (sympy.Add(r.lhs, sympy.Mul(-1, r.rhs, evaluate=False), evaluate=False) for r in (gold, said))
    variables = sorted(g.free_symbols | s.free_symbols, key=str)
    ratios = []
    for point in _points(variables):
        left, right = _at(g, point), _at(s, point)
        if left is None or right is None or _is_zero(left) or _is_zero(right):
            return False
        ratios.append(left / right)
    same = all(abs(ratio - ratios[0]) <= _CLOSE * abs(ratios[0]) for ratio in ratios)
    return bool(same and (isinstance(gold, sympy.Eq | sympy.Ne) or (ratios[0].is_real and ratios[0] > 0)))


def _is_tame(value: Any) -> bool:
    """Whether sympy can solve and simplify what a completion states without taking for ever.

    Short formulas, low powers of variables; equations and inequalities of polynomials.
    """
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        return False
    powers = value.atoms(sympy.Pow)
    if (
        len(value.atoms(sympy.Function)) > 6
        or sum(1 for _ in sympy.preorder_traversal(value)) > _TAME
        or any(p.base.free_symbols and not (p.exp.is_Rational and abs(p.exp) <= 10) for p in powers)
    ):
        return False
    relations = value.atoms(sympy.Rel)
    functions = {f for r in relations for f in r.atoms(sympy.Function) if not isinstance(f, sympy.Abs | AppliedUndef)}
    return not any(f.free_symbols for f in functions) and not any(
        p.exp.free_symbols or not (p.exp.is_Integer or not p.base.free_symbols)
        for r in relations
        for p in r.atoms(sympy.Pow)
    )


def _same_elements(gold: Any, said: Any, tolerance: float | None) -> bool:
    left = list(said.args)
    for g in gold.args:
        match = next((s for s in left if _equal(g, s, tolerance)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same_expression(gold: Any, said: Any, tolerance: float | None) -> bool | None:
    """None where numbers cannot tell."""
    if gold == said:
        return True
    g, s = constant(gold), constant(said)
    if g is not None and s is not None:
        return same_number(g, s, tolerance)
    if isinstance(gold, sympy.Symbol) and isinstance(said, sympy.Symbol):
        return None  # names: Math-Verify's rules of case
    variables = sorted(gold.free_symbols | said.free_symbols, key=str)
    if not variables:
        return _close(gold, said, {}, tolerance)
    agreed = []
    for point in _points(variables):
        close = _close(gold, said, point, tolerance)
        if close is None:
            return None
        agreed.append(close)
    if not agreed[0]:
        return False
    return True if all(agreed) else None


def _points(variables: list[Any]) -> list[dict[Any, Any]]:
    return [
        {v: sympy.Rational(signs[i % 4] * (3 * i + 7), 2 * i + 5) for i, v in enumerate(variables)} for signs in _POINTS
    ]


def _close(gold: Any, said: Any, point: dict[Any, Any], tolerance: float | None) -> bool | None:
    """Whether two formulas are equal at a point, up to the precision; None if they are no finite numbers there."""
    g, s = _at(gold, point), _at(said, point)
    if g is None or s is None:
        return None
    if _is_zero(g) or _is_zero(s):
        return _is_zero(g) and _is_zero(s)
    difference = abs(g - s)
    if tolerance is not None:
        return bool(difference <= tolerance * abs(g))
    decimal = next((constant(value) for value in (gold, said) if isinstance(value, sympy.Float)), None)
    if decimal is not None and decimal.digits >= SIGNIFICANT:
        return bool(difference <= sympy.Rational(decimal.step.numerator, decimal.step.denominator))
    written = gold.has(sympy.Float) or said.has(sympy.Float)
    return bool(difference <= (_CLOSE_DECIMALS if written else _CLOSE) * abs(g))


def _at(value: Any, point: dict[Any, Any]) -> Any | None:
    # With `subs` evalf computes numbers only; substituting first would rebuild the formula, and sympy would ask about
    # the signs of all its parts.
    try:
        number = value.evalf(_PRECISION, subs=point)
        return number if number.is_number and number.is_finite else None
    except Exception:  # undefined there, or sympy cannot tell
        return None


def _is_zero(value: Any) -> bool:
    """Zero, or what is left of it after cancellation (sympy marks such a number with one bit of precision)."""
    return all(part == 0 or getattr(part, "_prec", 2) == 1 for part in value.as_real_imag())


def _verify(gold: Any, said: Any) -> bool:
    # Gold first: the order matters to Math-Verify.
    return bool(math_verify.verify(gold, said, allow_set_relation_comp=True, timeout_seconds=None))


def evaluate(text: str) -> Fraction | None:
    """The real number that a formula without variables stands for, to 17 digits."""
    value = parse(text)
    if not isinstance(value, sympy.Expr) or value.free_symbols or not is_small(value) or _holds(value, _UNFINISHED):
        return None
    if (exact := _exact(value)) is not None:
        return exact
    number = _at(value, {})
    return Fraction(str(number)) if isinstance(number, sympy.Float) else None
