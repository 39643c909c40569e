"""Batches from plain lists, and a loss with its gradient. Everything is float64."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores, one_process
from covary.types import Completion, Example, Role, Score

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
    learn: Sequence[bool] | None = None,
    source: Sequence[str] | None = None,
    max_tokens: int | None = None,
    answer: Sequence[Sequence[bool]] | None = None,
    truncated: Sequence[bool] | None = None,
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
        answer_mask=torch.zeros_like(sampled) if answer is None else pad(answer, width).bool(),
        group=torch.tensor(group, dtype=torch.long),
        rewards=torch.tensor([0.0] * rows if rewards is None else rewards, dtype=torch.float64),
        learn=torch.tensor([True] * rows if learn is None else learn, dtype=torch.bool),
        truncated=torch.tensor([False] * rows if truncated is None else truncated, dtype=torch.bool),
        source=tuple(source or ["policy"] * rows),
        max_tokens=width if max_tokens is None else max_tokens,
        numbers={name: tensor(value) for name, value in (numbers or {}).items()},
    )


def prepared(algorithm: Algorithm, rollout: Batch, reduce: Reduce = one_process) -> Batch:
    """What the loop does once per rollout: `prepare`, rows that are not learned from leave, totals (of one update)."""
    batch = rollout.with_numbers(algorithm.prepare(rollout, reduce)).take(rollout.learn)
    return batch.with_totals(algorithm.normalisers, reduce)


def on_ranks(works: Sequence[Callable[[Reduce], Tensor]]) -> list[Tensor]:
    """Results of functions that run at the same time, one per rank; their `reduce` sums over all of them."""
    barrier = threading.Barrier(len(works))
    given: list[Tensor] = [torch.zeros(())] * len(works)

    def run(rank: int) -> Tensor:
        def reduce(x: Tensor) -> Tensor:
            given[rank] = x
            barrier.wait()
            total = torch.stack(given).sum(0)
            barrier.wait()  # nobody gives the next one before everybody has read this one
            return total

        try:
            return works[rank](reduce)
        except BaseException:
            barrier.abort()  # the others would wait for ever
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, range(len(works))))


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
    learn: list[bool] | None = None
    answer: list[list[bool]] | None = None
    truncated: list[bool] | None = None

    @property
    def width(self) -> int:
        return max(len(row) for row in self.mask)


@dataclass(frozen=True)
class Problem:
    """A rollout before `prepare`, and live scores for its rows to learn from, in their order."""

    rollout: Batch
    scores: Scores


def with_unlearned(algorithm: Algorithm, layout: Layout) -> Layout:
    """The layout's rows are to be learned from; every group also gets the other rows that the algorithm plans."""
    rng = random.Random(layout.seed)
    (requests,) = algorithm.plan([Example("", "")], 2, np.random.default_rng(0))
    beside = sum(request.count for request in requests if not request.learn)
    rows = list(zip(layout.group, layout.mask, layout.rewards, [True] * len(layout.group), strict=True))
    for g in sorted(set(layout.group)) * beside:
        mask = [True, *(rng.random() < 0.5 for _ in range(layout.width - 1))]
        rows.insert(rng.randrange(len(rows) + 1), (g, mask, rng.choice((0.0, 0.5, 1.0)), False))
    group, masks, rewards, learn = (list(column) for column in zip(*rows, strict=True))
    return replace(layout, group=group, mask=masks, rewards=rewards, learn=learn)


def with_answers(algorithm: Algorithm, layout: Layout) -> Layout:
    """The layout with 0 to 2 answer tokens behind each row, for algorithms that score answers; a row without may be cut off."""
    if not any(score.tokens == "answer" for score in (*algorithm.frozen, *algorithm.trained)):
        return layout
    rng = random.Random(layout.seed)
    lengths = [(2, 1, 0, 1)[(i + layout.seed) % 4] for i in range(len(layout.mask))]
    return replace(
        layout,
        mask=[[*row, *[False] * n] for row, n in zip(layout.mask, lengths, strict=True)],
        answer=[[False] * len(row) + [True] * n for row, n in zip(layout.mask, lengths, strict=True)],
        truncated=[n == 0 and rng.random() < 0.5 for n in lengths],
    )


def features(algorithm: Algorithm, layout: Layout) -> dict[str, list[float]]:
    """The algorithm's own numbers per row, of made-up completions in the contexts that it plans."""
    rng, draws = random.Random(f"features {layout.seed}"), np.random.default_rng(0)
    planned = [r for _ in range(9) for plan in algorithm.plan([Example("", "")], 4, draws) for r in plan]
    rows = []
    for i in range(len(layout.group)):
        learn = layout.learn is None or layout.learn[i]
        context = rng.choice(sorted({r.context for r in planned if r.learn == learn}))
        roles: list[Role] = ["sampled"] * sum(layout.mask[i])
        roles += ["answer"] * sum(layout.answer[i]) if layout.answer is not None else []
        text = rng.choice(("a trace", "a trace", " "))
        completion = Completion([1] * len(roles), text, "stop_string", roles=roles, context=context, learn=learn)
        rows.append(algorithm.features(Example("", ""), completion))
    return {name: [row[name] for row in rows] for name in rows[0]}


def _kind(score: Score) -> tuple:
    return score.quantity, score.level, score.tokens, tuple(stream.context for stream in score.stream_pair)


def problem(algorithm: Algorithm, layout: Layout, distances: Sequence[float]) -> Problem:
    """Numbers for every score that the algorithm reads.

    A live score lies one of `distances` nats, with either sign, from the first frozen score of its
    kind, at every token; this is what keeps a test near, far, or away from the kinks of a clip.
    """
    layout = with_answers(algorithm, with_unlearned(algorithm, layout))
    rng = random.Random(layout.seed)
    rows, width = len(layout.group), layout.width

    def numbers(score: Score) -> Tensor:
        shape = (rows,) if score.level == "sequence" else (rows, width)
        drawn = [3 * rng.random() + 0.1 for _ in range(rows * width)]
        sign = 1 if score.quantity == "entropy" else -1
        return sign * torch.tensor(drawn, dtype=torch.float64)[: torch.Size(shape).numel()].reshape(shape)

    frozen = {score.name: numbers(score) for score in algorithm.frozen}
    rollout = make_batch(
        layout.group,
        mask=layout.mask,
        rewards=layout.rewards,
        numbers={**frozen, **features(algorithm, layout)},
        learn=layout.learn,
        answer=layout.answer,
        truncated=layout.truncated,
        max_tokens=layout.width + 3,
    )
    scores = {}
    for score in algorithm.trained:
        alike = [f.name for f in algorithm.frozen if _kind(f) == _kind(score)]
        start = frozen[alike[0]] if alike else numbers(score)
        moves = [rng.choice(distances) * rng.choice((-1, 1)) for _ in range(start.numel())]
        live = start + torch.tensor(moves, dtype=torch.float64).reshape(start.shape)
        scores[score.name] = live[rollout.learn]
    return Problem(rollout, scores)
