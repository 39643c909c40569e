"""What samples per problem say about a model: means over problems, their intervals, pass@k, majority.

A problem's samples are not independent of each other (a hard problem is hard for all of them), so every interval
takes the problem as its unit: it is that of a mean over independent problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and half the width of its 95 % interval (NaN for fewer than two problems)."""

    mean: float
    half: float
    problems: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one number per problem. The interval is the normal one; it has no width where all are equal."""
    count = len(values)
    if count == 0:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, Z95 * math.sqrt(variance / count), count)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k of one problem, 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).

    Raises:
        ValueError: k is larger than n.
    """
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, got {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(classes: Sequence[tuple[int, bool]]) -> float:
    """Majority vote of one problem.

    Args:
        classes: of each set of equal answers the number of votes, and whether it is correct. Samples without an answer
            do not vote.

    Returns:
        The probability that the answer is correct where equal votes are decided by lot; 0 without any vote.
    """
    most = max((votes for votes, _ in classes), default=0)
    winners = [correct for votes, correct in classes if votes == most]
    return sum(winners) / len(winners) if winners else 0.0
