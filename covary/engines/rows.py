"""Scores of rows without gradient, micro-batch by micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from covary.collate import take_rows
from covary.scoring.score import FlatScores, Forward, RowSize, row_sizes
from covary.types import Group, Score


class Layout(Protocol):
    """How rows are laid out in a forward pass: `covary.scoring.trees` or `covary.scoring.padded`."""

    forward: Forward

    def fit(self, units: Sequence[list[int]], sizes: Sequence[RowSize], limit: int) -> Iterator[list[int]]:
        """Micro-batches of whole units within `limit` tokens."""
        ...


def micro_batches(layout: Layout, sizes: Sequence[RowSize], limit: int) -> Iterator[list[list[int]]]:
    """Whole groups that fit a forward pass together; a group that does not fit one comes alone, in parts."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, size in enumerate(sizes):
        groups[size.group].append(i)
    for rows in layout.fit(list(groups.values()), sizes, limit):
        yield list(layout.fit([[i] for i in rows], sizes, limit))


def score_rows(
    layout: Layout,
    flat: Callable[[list[Group], Sequence[Score]], dict[str, FlatScores]],
    groups: list[Group],
    scores: Sequence[Score],
    limit: int,
) -> dict[str, list[Tensor | float]]:
    """Per score: one 1-D tensor over each row's tokens (0 where not scored), or one number per row, on the CPU.

    Args:
        layout: of a forward pass.
        flat: scores of the rows of one micro-batch.
        groups: whose rows are scored.
        scores: per row.
        limit: tokens a forward pass.
    """
    sizes = row_sizes(groups, scores)
    widths = [len(completion.tokens) for group in groups for completion in group.completions]
    results: dict[str, list[Tensor | float]] = {score.name: [0.0] * len(sizes) for score in scores}
    for rows in (part for parts in micro_batches(layout, sizes, limit) for part in parts):
        scored = flat(take_rows(groups, rows), scores)
        for score in scores:
            if score.level == "sequence":
                values: list = scored[score.name].summed(len(rows)).tolist()
            else:
                padded = scored[score.name].padded(len(rows), max(widths[i] for i in rows)).cpu()
                values = [padded[j, : widths[i]] for j, i in enumerate(rows)]
            for i, value in zip(rows, values, strict=True):
                results[score.name][i] = value
    return results
