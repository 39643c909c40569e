"""Every score of every row from hidden states, however a forward pass lays the rows out.

Completion coordinates: position t of a row is `tokens[t]` of its completion. The left shift (the hidden
state before a token predicts it) happens here, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from covary.quantities import QUANTITIES
from covary.scoring.chunked import Quantity, score_hidden
from covary.types import Group, Score, Stream


@dataclass(frozen=True)
class States:
    """Final hidden states of rows under one context, in the layout of a forward pass.

    Attributes:
        hidden: all of them, flat.
        first: where the state lies that predicts the first token of each row.
        second: where the one lies that predicts its second token; those of further tokens follow it.
    """

    hidden: Float[Tensor, "M D"]
    first: Int[Tensor, " B"]
    second: Int[Tensor, " B"]

    def before(self, row: Int[Tensor, " N"], position: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """States that predict token `position[n]` of row `row[n]`."""
        return self.hidden.index_select(0, torch.where(position == 0, self.first[row], self.second[row] + position - 1))


Forward = Callable[[nn.Module, Sequence[Group], str], States]
"""(model, groups, name of a context) -> states of all rows. A row's last token predicts nothing and is left out."""


@dataclass(frozen=True)
class RowSize:
    """Tokens of a row over every stream that a score reads: all their graphs live at once."""

    group: int
    prompt: int
    completion: int


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


def context_of(stream: Stream, groups: Sequence[Group]) -> str:
    """The name of the context that a stream reads: a teacher has its own rendering of the prompt, where it needs one."""
    own = stream.model == "teacher" and bool(groups) and "teacher" in groups[0].contexts
    return "teacher" if own else stream.context


def row_sizes(groups: Sequence[Group], scores: Sequence[Score]) -> list[RowSize]:
    """Sizes of all rows, in order."""
    streams = {stream for score in scores for stream in score.stream_pair}
    contexts = [context_of(stream, groups) for stream in streams]
    return [
        RowSize(g, sum(len(group.contexts[context]) for context in contexts), len(row.tokens) * len(contexts))
        for g, group in enumerate(groups)
        for row in group.completions
    ]


def score_groups(
    forward: Forward,
    models: Mapping[str, nn.Module],
    groups: Sequence[Group],
    scores: Sequence[Score],
    temperature: float,
) -> dict[str, FlatScores]:
    """Every per-row score of every row of `groups`, in one forward pass per module and context.

    Scores that read the same streams share the vocabulary projection too. Gradients flow where they are
    enabled and the model's parameters ask for them.
    """
    results: dict[str, FlatScores] = {}
    states: dict[tuple[int, str], States] = {}  # by module: `old` is the policy itself before its first update
    alike: dict[tuple, list[Score]] = defaultdict(list)
    for score in scores:
        alike[score.stream_pair, score.tokens].append(score)
    rows = [completion for group in groups for completion in group.completions]
    home = next(iter(models.values())).device  # the policy's: scores of models elsewhere come here
    for (streams, tokens), same in alike.items():
        keys = [(stream.model, context_of(stream, groups)) for stream in streams]
        for model, context in keys:
            if (id(models[model]), context) not in states:
                states[id(models[model]), context] = forward(models[model], groups, context)
        read = [states[id(models[model]), context] for model, context in keys]
        targets = [(i, t, row.tokens[t]) for i, row in enumerate(rows) for t in row.role_positions(tokens)]
        flat = torch.tensor(targets, device=home, dtype=torch.long).reshape(-1, 3)
        row, position, token = flat.unbind(1)
        values = score_hidden(
            [models[stream.model] for stream in streams],
            [state.before(row.to(state.hidden.device), position.to(state.hidden.device)) for state in read],
            token,
            [_quantity(score) for score in same],
            temperature,
        )
        for score, value in zip(same, values, strict=True):
            results[score.name] = FlatScores(value, row, position)
    return results


def _quantity(score: Score) -> Quantity:
    name, *arguments = (score.quantity,) if isinstance(score.quantity, str) else score.quantity
    quantity = QUANTITIES[str(name)]
    return partial(quantity, *arguments) if arguments else quantity
