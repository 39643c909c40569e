"""Groups as trees: a prompt once, its completions as branches, many trees in one sequence without padding.

Everything but attention sees one sequence of N tokens: first the prompts, then the branches. Attention
alone is computed on padded blocks, in two calls a layer: prompts on themselves, and branches on their
prompt and themselves. Letters in shapes: N packed tokens, G prompts, P the longest, R branches, T the
longest, H heads, K heads of keys and values, E their width.

transformers is imported where it is first needed: that takes seconds, which `covary check` does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from covary.scoring import padded
from covary.scoring.score import RowSize, States
from covary.types import Completion, Example, Group

ATTENTION = "covary_trees"
# Attention pads: bound on its blocks' tokens, as a multiple of the packed tokens a forward pass may have.
_PADDING = 4
# By which packed and padded states of a model may differ, relative to their size: rounding is a hundred times
# smaller in float32 (eight bits less in bfloat16), a wrong mask or position is far larger.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Forest:
    """Where the tokens of packed trees lie.

    Attributes:
        prompts: indices into the packed tokens. A pad is the sequence's own first token, so that a number that is
            not finite stays in its row.
        branches: likewise.
        tree: the prompt of each branch.
        lengths: of the prompts, and of the branches.
    """

    prompts: Int[Tensor, "G P"]
    branches: Int[Tensor, "R T"]
    tree: Int[Tensor, " R"]
    lengths: tuple[Int[Tensor, " G"], Int[Tensor, " R"]]
    _masks: dict[Any, Tensor] = field(default_factory=dict)  # the layers of a model share them

    def flat(self, prompts: Tensor, branches: Tensor) -> Tensor:
        """(G, P, ...) and (R, T, ...) blocks back as (N, ...) packed tokens."""
        blocks = zip((prompts, branches), self.lengths, strict=True)
        return torch.cat([block[_valid(block.shape[1], lengths)] for block, lengths in blocks])

    def prompt_mask(self, dtype: torch.dtype, window: int | None) -> Float[Tensor, "1 1 P P"] | None:
        """To add to attention scores; None where plain causal attention is right."""
        width = self.prompts.shape[1]
        if window is None or width <= window:
            return None
        return self._mask("prompt", dtype, window, lambda: _causal(width, width, self.tree.device, window)[None])

    def branch_mask(self, dtype: torch.dtype, window: int | None) -> Float[Tensor, "R 1 T P+T"]:
        """To add to attention scores."""
        return self._mask("branch", dtype, window, lambda: self._branch_sees(window))

    def _branch_sees(self, window: int | None) -> Bool[Tensor, "R T P+T"]:
        device, (_, width), length = self.tree.device, self.branches.shape, self.lengths[0][self.tree]
        prompt = torch.arange(self.prompts.shape[1], device=device)
        sees_prompt = (prompt < length[:, None])[:, None].expand(-1, width, -1)
        if window is not None:
            position = length[:, None] + torch.arange(width, device=device)  # (R, T), of the branches' tokens
            sees_prompt = sees_prompt & (position[:, :, None] - prompt < window)
        own = _causal(width, width, device, window).expand(len(self.tree), -1, -1)
        return torch.cat([sees_prompt, own], dim=-1)

    def _mask(self, kind: str, dtype: torch.dtype, window: int | None, sees: Any) -> Tensor:
        key = (kind, dtype, window)
        if key not in self._masks:
            allowed = sees()
            blocked = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, -torch.inf)
            self._masks[key] = blocked[:, None]
        return self._masks[key]


def _causal(queries: int, keys: int, device: torch.device, window: int | None) -> Bool[Tensor, "Q K"]:
    away = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    return (away >= 0) if window is None else (away >= 0) & (away < window)


def _valid(width: int, lengths: Tensor) -> Bool[Tensor, "B W"]:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _blocks(lengths: Sequence[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, W) indices of sequences that follow each other from `start` on, and (B,) their lengths."""
    length = torch.tensor(lengths, device=device)
    offset = length.cumsum(0) - length + start
    width = max(lengths, default=0)
    index = offset[:, None] + torch.arange(width, device=device)
    pad = offset.clamp(max=max(start + sum(lengths) - 1, 0))  # an empty sequence at the end has no token of its own
    return index.where(_valid(width, length), pad[:, None]), length


def forward(model: nn.Module, groups: Sequence[Group], context: str) -> States:
    """All trees in one forward pass. The model has to have taken this module's attention (`use_trees`)."""
    device = model.device
    prompts = [group.contexts[context] for group in groups]
    branches = [row.tokens[:-1] for group in groups for row in group.completions]
    of_row = [g for g, group in enumerate(groups) for _ in group.completions]
    packed = [*prompts, *branches]
    starts = [0] * len(prompts) + [len(prompts[g]) for g in of_row]
    ids = torch.tensor([[token for part in packed for token in part]], device=device)
    positions = torch.tensor(
        [[s + i for s, part in zip(starts, packed, strict=True) for i in range(len(part))]], device=device
    )
    tree = torch.tensor(of_row, device=device)
    prompt_index, prompt_lengths = _blocks([len(p) for p in prompts], 0, device)
    branch_index, branch_lengths = _blocks([len(b) for b in branches], sum(len(p) for p in prompts), device)
    hidden = model.base_model(  # pyright: ignore[reportCallIssue]
        input_ids=ids,
        position_ids=positions,
        attention_mask=torch.zeros(1, 1, 1, 1, device=device),  # four dimensions: taken as it is, and not read below
        use_cache=False,
        forest=Forest(prompt_index, branch_index, tree, (prompt_lengths, branch_lengths)),
    ).last_hidden_state[0]
    ends = prompt_lengths.cumsum(0) - 1
    return States(hidden, ends[tree], branch_lengths.cumsum(0) - branch_lengths + prompt_lengths.sum())


def tree_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H N E"],
    key: Float[Tensor, "1 K N E"],
    value: Float[Tensor, "1 K N E"],
    attention_mask: Tensor | None,
    *,
    forest: Forest | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "1 N H E"], None]:
    """Attention of packed trees; without a forest, that of transformers."""
    if forest is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **others
        )
    if others.get("softcap") is not None:
        raise NotImplementedError("attention with a soft cap")
    repeats = query.shape[1] // key.shape[1]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, H, E)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, tokens, E)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=repeats > 1
        )
        return out.transpose(1, 2)

    prompt_key, prompt_value = key[forest.prompts], value[forest.prompts]
    of_prompts = attend(
        query[forest.prompts], prompt_key, prompt_value, forest.prompt_mask(query.dtype, sliding_window)
    )
    of_branches = query[forest.branches]
    if of_branches.numel():
        of_branches = attend(
            of_branches,
            torch.cat([prompt_key[forest.tree], key[forest.branches]], dim=1),
            torch.cat([prompt_value[forest.tree], value[forest.branches]], dim=1),
            forest.branch_mask(query.dtype, sliding_window),
        )
    return forest.flat(of_prompts, of_branches)[None], None


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


@torch.no_grad()
def use_trees(model: nn.Module) -> str | None:
    """Let a model attend in trees, if it then gives the scores of padded rows; else leave it as it was.

    Returns:
        None, or why it cannot.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, tree_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    before = model.config._attn_implementation  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.set_attn_implementation(ATTENTION)  # pyright: ignore[reportCallIssue]
        difference = _difference(model)
    except Exception as error:  # whatever a model family does not know about packed trees
        why = f"{type(error).__name__}: {error}"
    else:
        if difference < _TOLERANCE[model.get_input_embeddings().weight.dtype]:
            return None
        why = f"hidden states differ by {difference:.1e} of their size"
    model.set_attn_implementation(before)  # pyright: ignore[reportCallIssue]
    return why


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
