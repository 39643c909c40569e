"""A teacher that reads text: log-probs of its own tokens, one number per completion.

The teacher has another tokenizer, or a server runs it, so it is no stream beside the policy's in a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from covary.engines.rows import Layout, score_rows
from covary.scoring import padded, trees
from covary.scoring.reading import Reading
from covary.scoring.score import score_groups
from covary.types import Completion, Group, Score, UserError

LogProbs = Callable[[list[Group]], Sequence[Tensor | None]]
"""Groups in a teacher's ids -> log-probs of the tokens of each row, (T,) on the CPU; None where there are none."""


class Reader:
    """Scores that a teacher gives to a student's completions.

    Attributes:
        reading: what it reads.
        logps: its log-probs, at temperature 1.
    """

    def __init__(self, reading: Reading, logps: LogProbs) -> None:
        self.reading = reading
        self.logps = logps

    def __call__(self, groups: list[Group], scores: Sequence[Score]) -> dict[str, list[Tensor | float]]:
        """Per score one number per row, or one 1-D tensor over its tokens where both have the same; NaN where unreadable.

        And under the score's name with `_tokens` the number of tokens that the teacher read.

        Raises:
            ValueError: a score that a text cannot have.
        """
        for score in scores:
            if score.quantity != "logp" or score.tokens != "sampled":
                raise ValueError(f"score {score.name!r}: a teacher that reads text gives log-probs of sampled tokens")
            if score.level == "token" and not self.reading.same_tokens:
                raise ValueError(f"score {score.name!r}: the teacher's tokens are not the student's")
        rows = [completion for group in groups for completion in group.completions]
        values = self._row_logps(groups)
        lengths: list[Tensor | float] = [math.nan if logps is None else float(len(logps)) for logps in values]
        results: dict[str, list[Tensor | float]] = {f"{score.name}_tokens": lengths for score in scores}
        for score in scores:
            results[score.name] = [
                _sum(logps) if score.level == "sequence" else _placed(row, logps)
                for row, logps in zip(rows, values, strict=True)
            ]
        return results

    def _row_logps(self, groups: list[Group]) -> list[Tensor | None]:
        views: list[Group] = []
        readable: list[bool] = []
        for group in groups:
            try:
                prompt, completions = self.reading.read(group)
            except UserError:  # of some prompts only, as was checked before the run
                readable += [False] * len(group.completions)
                continue
            readable += [ids is not None for ids in completions]
            read = [Completion(ids, "", "eos") for ids in completions if ids is not None]
            views += [Group(group.example, {"prompt": prompt}, read)] if read else []
        values = iter(self.logps(views) if views else ())
        return [next(values) if ok else None for ok in readable]


class LocalLogProbs:
    """Log-probs of a model in this process.

    Attributes:
        not_packed: why rows are padded instead of packed as trees; None where they are packed.
    """

    def __init__(self, model: nn.Module, micro_batch_tokens: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self.micro_batch_tokens = micro_batch_tokens
        self.not_packed = trees.use_trees(model)
        self._layout: Layout = trees if self.not_packed is None else padded

    @torch.no_grad()
    def __call__(self, groups: list[Group]) -> list[Tensor | None]:
        """As `LogProbs`."""

        def flat(part: list[Group], scores: Sequence[Score]) -> dict:
            return score_groups(self._layout.forward, {"policy": self.model}, part, scores, temperature=1.0)

        score = Score("teacher")
        values = score_rows(self._layout, flat, groups, [score], self.micro_batch_tokens)["teacher"]
        return [value for value in values if isinstance(value, Tensor)]


def _sum(logps: Tensor | None) -> float:
    return math.nan if logps is None else float(logps.double().sum())


def _placed(row: Completion, logps: Tensor | None) -> Tensor:
    placed = torch.zeros(len(row.tokens))
    placed[row.role_positions("sampled")] = torch.nan if logps is None else logps
    return placed
