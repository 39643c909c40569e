"""How far two rewards of right and wrong agree on the same completions: a judge with `math`, before training on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from covary.rewards.types import Graded


@dataclass(frozen=True)
class Agreement:
    """Counts of completions; a reward of 1 or more is right, anything below wrong.

    Attributes:
        both_right: right for both.
        both_wrong: wrong for both.
        only_first: right for the first alone.
        only_second: right for the second alone.
        first_unscorable: without a reward of the first.
        second_unscorable: with one of the first and none of the second.
        disagreements: their positions, in order.
    """

    both_right: int
    both_wrong: int
    only_first: int
    only_second: int
    first_unscorable: int
    second_unscorable: int
    disagreements: tuple[int, ...]

    @property
    def scored(self) -> int:
        """Completions with a reward of both."""
        return self.both_right + self.both_wrong + self.only_first + self.only_second

    @property
    def share(self) -> float:
        """Share of those on which both say the same; NaN where there are none."""
        return (self.both_right + self.both_wrong) / self.scored if self.scored else float("nan")

    @property
    def kappa(self) -> float:
        """Cohen's kappa: agreement beyond what two raters with these shares of right would reach by chance.

        NaN where chance alone agrees always.
        """
        if not self.scored:
            return float("nan")
        first = (self.both_right + self.only_first) / self.scored
        second = (self.both_right + self.only_second) / self.scored
        chance = first * second + (1 - first) * (1 - second)
        return (self.share - chance) / (1 - chance) if chance < 1 else float("nan")


def agreement(first: Sequence[Graded], second: Sequence[Graded]) -> Agreement:
    """Compare two rewards' verdicts on the same completions, in the same order."""
    kinds = [_kind(a.value, b.value) for a, b in zip(first, second, strict=True)]
    count = Counter(kinds)
    return Agreement(
        count["both right"],
        count["both wrong"],
        count["only first"],
        count["only second"],
        count["first unscorable"],
        count["second unscorable"],
        tuple(i for i, kind in enumerate(kinds) if kind.startswith("only")),
    )


def _kind(first: float | None, second: float | None) -> str:
    if first is None or second is None:
        return "first unscorable" if first is None else "second unscorable"
    return {
        (True, True): "both right",
        (False, False): "both wrong",
        (True, False): "only first",
        (False, True): "only second",
    }[first >= 1, second >= 1]
