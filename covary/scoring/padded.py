"""Rows as right-padded sequences: plain, right for every causal model family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from covary.scoring.score import RowSize, States
from covary.types import Group


def forward(model: nn.Module, groups: Sequence[Group], context: str) -> States:
    """One sequence per row: its prompt and its completion."""
    device = model.device
    sequences = [group.contexts[context] + row.tokens[:-1] for group in groups for row in group.completions]
    width = max(len(sequence) for sequence in sequences)
    # Under causal attention no scored token sees a pad on its right, and positions count from 0.
    ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences], device=device)
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=device)
    hidden = model.base_model(  # pyright: ignore[reportCallIssue]
        input_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
    prompts = torch.tensor([len(group.contexts[context]) for group in groups for _ in group.completions], device=device)
    starts = torch.arange(len(sequences), device=device) * width + prompts
    return States(hidden.flatten(0, 1), starts - 1, starts)


def fit(units: Sequence[list[int]], sizes: Sequence[RowSize], limit: int) -> Iterator[list[int]]:
    """Micro-batches of whole units whose padded size fits `limit` tokens; a unit that does not fit comes alone.

    Units of similar length go together (less padding). Rows come in ascending order, as `take_rows` keeps them.
    """
    lengths = [size.prompt + size.completion for size in sizes]

    def longest(unit: list[int]) -> int:
        return max(lengths[i] for i in unit)

    batch: list[int] = []
    for unit in sorted(units, key=longest):
        if batch and (len(batch) + len(unit)) * longest(unit) > limit:
            yield sorted(batch)
            batch = []
        batch = batch + unit
    if batch:
        yield sorted(batch)
