"""Batches from plain lists, and a loss with its gradient. Everything is float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores, one_process
from covary.types import Score

Ragged = Sequence[Sequence[float]]


def pad(rows: Ragged, width: int, fill: float = 0.0) -> Tensor:
    """Ragged rows as a (B, width) tensor."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.float64).reshape(
        len(rows), width
    )


def make_batch(
    group: Sequence[int],
    *,
    mask: Sequence[Sequence[bool]] | None = None,
    rewards: Sequence[float] | None = None,
    numbers: Mapping[str, Tensor | Ragged | Sequence[float]] | None = None,
    source: Sequence[str] | None = None,
    max_tokens: int | None = None,
) -> Batch:
    """A batch of ragged rows, padded to the longest; without a mask every row is one sampled token."""
    rows = len(group)
    mask = [[True]] * rows if mask is None else mask
    width = max((len(row) for row in mask), default=0)
    sampled = pad(mask, width).bool()

    def tensor(value: Tensor | Ragged | Sequence[float]) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if value and isinstance(value[0], Sequence):
            return pad(value, width)  # type: ignore[arg-type]
        return torch.tensor(value, dtype=torch.float64)

    return Batch(
        tokens=torch.arange(rows * width).reshape(rows, width) % 97,
        mask=sampled,
        answer_mask=torch.zeros_like(sampled),
        group=torch.tensor(group, dtype=torch.long),
        rewards=torch.tensor([0.0] * rows if rewards is None else rewards, dtype=torch.float64),
        learn=torch.ones(rows, dtype=torch.bool),
        truncated=torch.zeros(rows, dtype=torch.bool),
        source=tuple(source or ["policy"] * rows),
        max_tokens=width if max_tokens is None else max_tokens,
        numbers={name: tensor(value) for name, value in (numbers or {}).items()},
    )


def prepared(algorithm: Algorithm, rollout: Batch) -> Batch:
    """What the loop does once per rollout: `prepare`, then the totals (of a rollout with one update)."""
    numbers = algorithm.prepare(rollout, one_process)
    return rollout.with_numbers(numbers).with_totals(algorithm.normalisers)


def value_and_grad(algorithm: Algorithm, scores: Scores, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and dloss/dscores."""
    leaves = {name: score.detach().clone().requires_grad_() for name, score in scores.items()}
    loss = algorithm.loss(leaves, batch)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(leaves, grads, strict=True))


def value_and_grad_in_parts(
    algorithm: Algorithm, scores: Scores, batch: Batch, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, summed over micro-batches of the named rows."""
    total = torch.zeros((), dtype=torch.float64)
    grads = {name: torch.zeros_like(score) for name, score in scores.items()}
    for rows in parts:
        index = torch.tensor(rows)
        part = {name: score[index] for name, score in scores.items()}
        loss, part_grads = value_and_grad(algorithm, part, batch.take(rows))
        total = total + loss
        for name, grad in part_grads.items():
            grads[name].index_add_(0, index, grad)
    return total, grads


@dataclass(frozen=True)
class Layout:
    """The shape of a ragged rollout: everything random but the scores."""

    group: list[int]
    mask: list[list[bool]]
    rewards: list[float]
    seed: int

    @property
    def width(self) -> int:
        return max(len(row) for row in self.mask)


@dataclass(frozen=True)
class Problem:
    """A rollout before `prepare`, and live scores for it."""

    rollout: Batch
    scores: Scores


def problem(algorithm: Algorithm, layout: Layout, distances: Sequence[float]) -> Problem:
    """Log-probs for every score that the algorithm reads.

    A live score lies one of `distances` nats, with either sign, from the first frozen score, at
    every token; this is what keeps a test near, far, or away from the kinks of a clip.
    """
    rng = random.Random(layout.seed)
    rows, width = len(layout.group), layout.width

    def numbers(score: Score, value: float) -> Tensor:
        shape = (rows,) if score.level == "sequence" else (rows, width)
        drawn = [value - 3 * rng.random() for _ in range(rows * width)]
        return torch.tensor(drawn, dtype=torch.float64)[: torch.Size(shape).numel()].reshape(shape)

    frozen = {score.name: numbers(score, -0.1) for score in algorithm.frozen}
    scores = {}
    for score in algorithm.trained:
        start = next(
            (f for f in frozen.values() if f.dim() == (1 if score.level == "sequence" else 2)),
            numbers(score, -0.1),
        )
        moves = [rng.choice(distances) * rng.choice((-1, 1)) for _ in range(start.numel())]
        scores[score.name] = start + torch.tensor(moves, dtype=torch.float64).reshape(start.shape)
    rollout = make_batch(
        layout.group,
        mask=layout.mask,
        rewards=layout.rewards,
        numbers=frozen,
        max_tokens=layout.width + 3,
    )
    return Problem(rollout, scores)
