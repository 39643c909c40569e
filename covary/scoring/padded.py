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
from covary.types import Completion, Group, Score, Stream


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


@dataclass(frozen=True)
class _Row:
    """What one stream reads: a prompt, then the completion's tokens or the reference answer's."""

    prompt: list[int]
    tokens: list[int]
    completion: Completion


def sequence_lengths(groups: Sequence[Group], scores: Sequence[Score]) -> list[int]:
    """Tokens of each row with the longest context that a score reads: what a forward pass of it costs."""
    contexts = {stream.context for score in scores for stream in score.stream_pair}
    return [
        max(len(group.contexts[context]) for context in contexts) + len(completion.tokens)
        for group in groups
        for completion in group.completions
    ]


def score_groups(
    models: Mapping[str, nn.Module], groups: Sequence[Group], scores: Sequence[Score], temperature: float
) -> dict[str, FlatScores]:
    """Every score of every row of `groups`, in one forward pass per stream.

    Scores that read the same streams share the pass and the vocabulary projection. Gradients flow where
    they are enabled and the model's parameters ask for them.
    """
    results: dict[str, FlatScores] = {}
    states: dict[tuple[Stream, str], Tensor] = {}
    alike: dict[tuple, list[Score]] = defaultdict(list)
    for score in scores:
        alike[score.stream_pair, score.tokens, score.per].append(score)
    for (streams, tokens, per), same in alike.items():
        for stream in streams:
            if (stream, per) not in states:
                states[stream, per] = _final_states(models[stream.model], _rows(groups, stream, per))
        device = states[streams[0], per].device
        targets = [
            (i, t, row.tokens[t])
            for i, row in enumerate(_rows(groups, streams[0], per))
            for t in (range(len(row.tokens)) if per == "example" else row.completion.role_positions(tokens))
        ]
        row, position, token = torch.tensor(targets, device=device, dtype=torch.long).reshape(-1, 3).unbind(1)
        hidden = []
        for stream in streams:
            starts = [len(r.prompt) for r in _rows(groups, stream, per)]
            before = torch.tensor(starts, device=device)[row] + position - 1
            hidden.append(states[stream, per][row, before])
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


def _rows(groups: Sequence[Group], stream: Stream, per: str) -> list[_Row]:
    return [
        _Row(
            group.contexts[stream.context],
            (group.answer_tokens or []) if per == "example" else completion.tokens,
            completion,
        )
        for group in groups
        for completion in group.completions
    ]


def _final_states(model: nn.Module, rows: Sequence[_Row]) -> Tensor:
    """(B, W, D) final hidden states of right-padded sequences."""
    device = next(model.parameters()).device
    sequences = [row.prompt + row.tokens for row in rows]
    width = max(len(sequence) for sequence in sequences)
    # Under causal attention no scored token sees a pad on its right, and positions count from 0.
    ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences], device=device)
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=device)
    return model.base_model(  # pyright: ignore[reportCallIssue]
        input_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
