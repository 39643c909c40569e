"""Groups as trees: a prompt once, its completions as branches, many trees in one sequence without padding.

Everything but attention sees one sequence of packed tokens: first the prompts, then the branches (`covary/attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from covary.attention import Forest, packed_inputs, use_packed
from covary.scoring import padded
from covary.scoring.score import RowSize, States
from covary.types import Completion, Example, Group

# Attention pads: bound on its blocks' tokens, as a multiple of the packed tokens a forward pass may have.
_PADDING = 4


def forward(model: nn.Module, groups: Sequence[Group], context: str) -> States:
    """All trees in one forward pass. The model has to have taken packed attention (`use_trees`)."""
    prompts = [group.contexts[context] for group in groups]
    branches = [row.tokens[:-1] for group in groups for row in group.completions]
    of_row = [g for g, group in enumerate(groups) for _ in group.completions]
    starts = [0] * len(prompts) + [len(prompts[g]) for g in of_row]
    packed = [*prompts, *branches]
    forest = Forest.of([len(p) for p in prompts], [len(b) for b in branches], of_row, model.device)
    hidden = model.base_model(  # pyright: ignore[reportCallIssue]
        **packed_inputs(
            [token for part in packed for token in part],
            [start + i for start, part in zip(starts, packed, strict=True) for i in range(len(part))],
            model.device,
        ),
        layout=forest,
    ).last_hidden_state[0]
    prompt_lengths, branch_lengths = forest.prompts.lengths, forest.branches.lengths
    ends = prompt_lengths.cumsum(0) - 1
    return States(hidden, ends[forest.tree], branch_lengths.cumsum(0) - branch_lengths + prompt_lengths.sum())


def fit(units: Sequence[list[int]], sizes: Sequence[RowSize], limit: int) -> Iterator[list[int]]:
    """Micro-batches of whole units whose packed size fits `limit` tokens; a unit that does not fit comes alone.

    A prompt counts once. Units of similar length go together (attention pads). Rows come in ascending order, as
    `take_rows` keeps them.
    """

    def longest(unit: list[int]) -> int:
        return max(sizes[i].prompt + sizes[i].completion for i in unit)

    batch: list[int] = []
    groups: set[int] = set()
    packed = 0
    for unit in sorted(units, key=longest):
        padded_with = (len(batch) + len(unit)) * longest(unit)
        if batch and (packed + _added(unit, sizes, groups) > limit or padded_with > _PADDING * limit):
            yield sorted(batch)
            batch, groups, packed = [], set(), 0
        packed += _added(unit, sizes, groups)
        groups |= {sizes[i].group for i in unit}
        batch = batch + unit
    if batch:
        yield sorted(batch)


def _added(unit: Sequence[int], sizes: Sequence[RowSize], groups: set[int]) -> int:
    """Tokens by which a unit makes a forward pass longer that holds some groups' prompts already."""
    prompts = {sizes[i].group: sizes[i].prompt for i in unit if sizes[i].group not in groups}
    return sum(prompts.values()) + sum(sizes[i].completion for i in unit)


def use_trees(model: nn.Module) -> str | None:
    """Let a model attend in trees, if it then gives the scores of padded rows; else leave it as it was.

    Returns:
        None, or why it cannot.
    """
    return use_packed(model, _difference)


def _difference(model: nn.Module) -> float:
    """Root mean square difference of packed and padded final states, relative, on trees of several sizes."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportCallIssue]
    shapes = ((5, (3, 7, 2)), (9, (6,)), (2, (4, 1)))
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=draw).tolist()

    groups = [
        Group(Example(str(g), ""), {"prompt": ids(prompt)}, [Completion(ids(n), "", "eos") for n in rows])
        for g, (prompt, rows) in enumerate(shapes)
    ]
    rows = [row for group in groups for row in group.completions]
    row, position = torch.tensor([(i, t) for i, row in enumerate(rows) for t in range(len(row.tokens))]).unbind(1)
    device = model.device
    packed, plain = (
        layout(model, groups, "prompt").before(row.to(device), position.to(device)).double()
        for layout in (forward, padded.forward)
    )
    return float((packed - plain).norm() / plain.norm())
