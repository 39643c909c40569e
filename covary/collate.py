"""list[Group] -> Batch. Nothing else pads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covary.batch import Algorithm, Batch
from covary.types import Completion, Group


def rows_of(groups: Sequence[Group]) -> list[Completion]:
    """All completions in the row order of `collate`."""
    return [completion for group in groups for completion in group.completions]


def take_rows(groups: Sequence[Group], rows: Sequence[int]) -> list[Group]:
    """Groups with only the named rows (in ascending order); groups that keep none are left out."""
    wanted = set(rows)
    taken, row = [], 0
    for group in groups:
        kept = [i for i in range(len(group.completions)) if row + i in wanted]
        row += len(group.completions)
        if kept:
            rewards = None if group.rewards is None else [group.rewards[i] for i in kept]
            taken.append(replace(group, completions=[group.completions[i] for i in kept], rewards=rewards))
    return taken


def attach(groups: Sequence[Group], numbers: dict[str, list[Any]]) -> None:
    """Give every row its number of each name (a frozen score or a feature)."""
    for name, values in numbers.items():
        for completion, value in zip(rows_of(groups), values, strict=True):
            _name(completion, name, value)


def attach_features(groups: Sequence[Group], algorithm: Algorithm) -> None:
    """Give every row the algorithm's own numbers from text or data."""
    for group in groups:
        for completion in group.completions:
            for name, value in algorithm.features(group.example, completion).items():
                _name(completion, name, value)


def _name(completion: Completion, name: str, value: Any) -> None:
    if name in completion.numbers:
        raise ValueError(f"two numbers of one row are called {name!r}")
    completion.numbers[name] = value


def collate(groups: Sequence[Group], max_tokens: int) -> Batch:
    """The batch of all rows of `groups`, in order, on the CPU.

    Every row must carry the same names in `numbers`. Token-level numbers are padded with 0.
    """
    rows = rows_of(groups)
    width = max((len(row.tokens) for row in rows), default=0)
    tokens = torch.tensor([[*row.tokens, *[0] * (width - len(row.tokens))] for row in rows], dtype=torch.long)
    lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.long)
    mask = torch.arange(width) < lengths[:, None]
    answer_mask = torch.zeros_like(mask)
    for i, row in enumerate(rows):
        if row.roles is not None:
            mask[i] = False
            mask[i, row.role_positions("sampled")] = True
            answer_mask[i, row.role_positions("answer")] = True
    rewards = [
        float("nan") if reward is None else float(reward)
        for group in groups
        for reward in (group.rewards or [None] * len(group.completions))
    ]
    names = list(rows[0].numbers) if rows else []
    if any(row.numbers.keys() != set(names) for row in rows):
        raise ValueError(f"rows carry different numbers; every row needs the same features (the first has {names})")
    return Batch(
        tokens=tokens.view(len(rows), width),
        mask=mask,
        answer_mask=answer_mask,
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.completions], dtype=torch.long),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        learn=torch.tensor([row.learn for row in rows], dtype=torch.bool),
        truncated=torch.tensor([row.finish == "length" for row in rows], dtype=torch.bool),
        source=tuple(row.source for row in rows),
        max_tokens=max_tokens,
        numbers={name: pad([row.numbers[name] for row in rows], width) for name in names},
    )


def pad(values: Sequence[Tensor | float], width: int) -> Tensor:
    """(B, T) from one 1-D tensor per row, or (B,) in float64 (sums over a sequence) from one number per row."""
    if not isinstance(values[0], Tensor):
        return torch.tensor(values, dtype=torch.float64)
    padded = values[0].new_zeros(len(values), width)
    for i, value in enumerate(values):
        padded[i, : value.shape[0]] = value  # pyright: ignore[reportAttributeAccessIssue]
    return padded
