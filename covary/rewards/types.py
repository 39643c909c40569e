"""The nouns of rewards: a grader, its verdict, and what the loop calls."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from covary.types import Example

Verdict = Literal["correct", "incorrect", "unparsable"]

TokenIds = Sequence[Sequence[int]]
"""Of each completion, the end token included where the model gave one."""

_LONGEST_ERROR = 500  # characters; a message may quote a whole completion


@dataclass(frozen=True)
class Grader:
    """A built-in grader and what it reads.

    Attributes:
        name: a key of `covary.rewards.GRADERS`.
        extract: a key of `covary.rewards.EXTRACTORS`, applied to the completion first.
        tolerance: relative, for `numeric` and the decimals of `math`; a column `tolerance` of the row goes first.
            None: what the grader says.
    """

    name: str
    extract: str = "none"
    tolerance: float | None = None


@dataclass(frozen=True)
class Grade:
    """What a grader says of a completion.

    Attributes:
        verdict: `unparsable` where no answer could be read; as a reward that is a wrong answer.
        extracted: the answer as the completion states it; None where none was found.
        credit: of an incorrect answer, where the grader gives partial credit (Reasoning Gym's scorers).
    """

    verdict: Verdict
    extracted: str | None = None
    credit: float = 0.0

    @property
    def value(self) -> float:
        """The reward, in [0, 1]."""
        return 1.0 if self.verdict == "correct" else self.credit


@dataclass(frozen=True)
class Graded:
    """The reward of one completion.

    Attributes:
        value: the reward; None where the completion could not be scored.
        error: why not, with the type of the exception. None beside a value of None is a reward
            function, or a grader, that abstained.
        grade: what a built-in grader said.
    """

    value: float | None
    error: str | None = None
    grade: Grade | None = None


class Reward(Protocol):
    """What the loop and the evaluation call."""

    @property
    def name(self) -> str:
        """How metrics and messages call it."""
        ...

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Grade `completions[i]`, whose tokens are `token_ids[i]`, as an answer to `examples[i]`; one verdict each."""
        ...

    def close(self) -> None:
        """End whatever processes it started."""
        ...


def as_graded(value: object) -> Graded:
    """What a reward function returned, as a verdict.

    None and NaN abstain. A number (bools, numpy scalars and 0-d tensors among them) is the reward;
    anything else, and an infinite number, is an error.
    """
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if value is None:
        return Graded(None)
    if not isinstance(value, numbers.Real):
        return Graded(None, f"TypeError: returned {type(value).__name__}, not a number or None")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if math.isinf(score):
        return Graded(None, f"ValueError: returned {score}, not a finite number")
    return Graded(None if math.isnan(score) else score)


def error_line(error: BaseException) -> str:
    """An exception as one line: its type and its message."""
    line = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return line if len(line) <= _LONGEST_ERROR else line[:_LONGEST_ERROR] + "..."
