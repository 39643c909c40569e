"""Scores of completions by right-padded forward passes: plain, right for every causal model family.

Completion coordinates: position t of a row is `tokens[t]` of its completion. The left shift (the hidden
state before a token predicts it) happens here, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from covary.quantities import QUANTITIES
from covary.scoring.chunked import Quantity, score_hidden
from covary.types import Group, Score


@dataclass(frozen=True)
class FlatScores:
    """Scored tokens of several rows: `values[n]` belongs to token `position[n]` of row `row[n]`."""

    values: Tensor
    row: Tensor
    position: Tensor

    def padded(self, rows: int, width: int) -> Tensor:
        """(B, T), 0 at positions that were not scored. Differentiable."""
        return self.values.new_zeros(rows, width).index_put((self.row, self.position), self.values)

    def summed(self, rows: int) -> Tensor:
        """(B,) sums over tokens, in float64. Differentiable."""
        return torch.zeros(rows, dtype=torch.float64, device=self.values.device).index_add(
            0, self.row, self.values.double()
        )


def sequence_lengths(groups: Sequence[Group], scores: Sequence[Score]) -> list[int]:
    """Tokens of each row over every stream that a score reads: all their graphs live at once."""
    streams = {stream for score in scores for stream in score.stream_pair}
    return [
        sum(len(group.contexts[stream.context]) + len(completion.tokens) for stream in streams)
        for group in groups
        for completion in group.completions
    ]


def score_groups(
    models: Mapping[str, nn.Module], groups: Sequence[Group], scores: Sequence[Score], temperature: float
) -> dict[str, FlatScores]:
    """Every per-row score of every row of `groups`, in one forward pass per module and context.

    Scores that read the same streams share the vocabulary projection too. Gradients flow where they are
    enabled and the model's parameters ask for them.
    """
    results: dict[str, FlatScores] = {}
    states: dict[tuple[int, str], Tensor] = {}  # by module: `old` is the policy itself before its first update
    alike: dict[tuple, list[Score]] = defaultdict(list)
    for score in scores:
        alike[score.stream_pair, score.tokens].append(score)
    rows = [(group, completion) for group in groups for completion in group.completions]
    for (streams, tokens), same in alike.items():
        for stream in streams:
            key = (id(models[stream.model]), stream.context)
            if key not in states:
                sequences = [group.contexts[stream.context] + completion.tokens for group, completion in rows]
                states[key] = _final_states(models[stream.model], sequences)
        device = states[id(models[streams[0].model]), streams[0].context].device
        targets = [
            (i, t, completion.tokens[t])
            for i, (_, completion) in enumerate(rows)
            for t in completion.role_positions(tokens)
        ]
        row, position, token = torch.tensor(targets, device=device, dtype=torch.long).reshape(-1, 3).unbind(1)
        hidden = []
        for stream in streams:
            starts = torch.tensor([len(group.contexts[stream.context]) for group, _ in rows], device=device)
            hidden.append(states[id(models[stream.model]), stream.context][row, starts[row] + position - 1])
        values = score_hidden(
            [models[stream.model] for stream in streams], hidden, token, [_quantity(s) for s in same], temperature
        )
        for score, value in zip(same, values, strict=True):
            results[score.name] = FlatScores(value, row, position)
    return results


def _quantity(score: Score) -> Quantity:
    name, *arguments = (score.quantity,) if isinstance(score.quantity, str) else score.quantity
    quantity = QUANTITIES[str(name)]
    return partial(quantity, *arguments) if arguments else quantity


def _final_states(model: nn.Module, sequences: Sequence[list[int]]) -> Tensor:
    """(B, W, D) final hidden states of right-padded sequences."""
    device = model.device
    width = max(len(sequence) for sequence in sequences)
    # Under causal attention no scored token sees a pad on its right, and positions count from 0.
    ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences], device=device)
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=device)
    return model.base_model(  # pyright: ignore[reportCallIssue]
        input_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
