"""The ways a reward is computed: in worker processes, or here, row by row or all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from covary.rewards.functions import call_batch_form, item_form
from covary.rewards.pool import Pool, PoolTask
from covary.rewards.types import Graded, Grader, TokenIds, as_graded, error_line
from covary.types import Example


@dataclass(frozen=True)
class PooledReward:
    """A grader, or a function that a file holds, in worker processes."""

    elsewhere: ClassVar[bool] = True
    name: str
    task: PoolTask
    pool: Pool

    @property
    def pure(self) -> bool:
        """Whether one text gets one verdict; what users wrote may keep a state."""
        return isinstance(self.task, Grader)

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Grade `completions[i]` as an answer to `examples[i]`."""
        pairs = zip(examples, completions, strict=True)
        items = [(text, example.answer, example.columns) for example, text in pairs]
        verdicts = self.pool.run(self.task, items)
        return [_of_row(example, verdict) for example, verdict in zip(examples, verdicts, strict=True)]

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()


@dataclass(frozen=True)
class ItemReward:
    """A Python function of one completion, in this process: no deadline, and a crash is a crash."""

    name: str
    function: Callable[..., object]

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Grade `completions[i]` as an answer to `examples[i]`."""
        grade = item_form(self.function)
        verdicts: list[Graded] = []
        for example, text in zip(examples, completions, strict=True):
            try:
                verdict = as_graded(grade(text, example.answer, example.columns))
            except (Exception, SystemExit) as error:  # sys.exit in a reward must not end the run silently
                verdict = Graded(None, error_line(error))
            verdicts.append(_of_row(example, verdict))
        return verdicts

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class BatchReward:
    """A Python function of all completions at once, in this process."""

    name: str
    function: Callable[..., object]

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Grade `completions[i]` as an answer to `examples[i]`."""
        return call_batch_form(self.function, examples, completions, token_ids)

    def close(self) -> None:
        """Nothing to end."""


def _of_row(example: Example, verdict: Graded) -> Graded:
    """The same verdict; an error names the row."""
    return replace(verdict, error=verdict.error and f"row {example.id}: {verdict.error}")
