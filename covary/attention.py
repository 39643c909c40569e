"""Attention over one packed sequence: what each token sees is said by a layout, not by a mask.

The models of transformers hand their attention to a registered function, and hand it their own keyword arguments. A
forward pass that gives a `layout` therefore runs every layer on one sequence of N tokens without padding, and here alone
is it known which of them belong together. Without a layout, attention is transformers' own.

Letters in shapes: N packed tokens, G prompts, P the longest, R branches, T the longest, H heads, K heads of keys and
values, E their width.

transformers is imported where it is first needed: that takes seconds, which `covary check` does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from covary.partial_attention import Blocks, Bunches, Part, Piece, attend_in_parts, mask_of

PACKED = "covary_packed"
# By which packed and plain numbers of a model may differ, relative to their size: rounding is a hundred times
# smaller in float32 (eight bits less in bfloat16), a wrong mask or position is far larger.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
# Mean tokens of a branch up to which products of parts are faster than a CPU's fused kernel (benchmarks/attention.py).
_SHORT = 12
# Queries of a sequence up to which a CPU's fused kernel is faster in float32 than in half precision, most of all backwards.
_FEW_QUERIES = 128


class Layout(Protocol):
    """What the tokens of a packed sequence are to each other."""

    def attend(
        self,
        layer: nn.Module,
        query: Float[Tensor, "N H E"],
        key: Float[Tensor, "N K E"],
        value: Float[Tensor, "N K E"],
        scale: float | None,
        window: int | None,
    ) -> Float[Tensor, "N H E"]:
        """Attention of one layer; `window`: tokens that a token sees, itself included, or None for all."""
        ...


@torch.no_grad()
def use_packed(model: nn.Module, difference: Callable[[nn.Module], float]) -> str | None:
    """Let a model attend as a layout says, if it then computes what it computes plainly; else leave it as it was.

    Args:
        model: a transformers causal language model.
        difference: relative difference of what the model computes packed and plainly.

    Returns:
        None, or why it cannot.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    windows: set[int | None] = set()

    def watched(*args: Any, **given: Any) -> tuple[Tensor, None]:
        if given.get("layout") is not None:
            windows.add(given.get("sliding_window"))
        return packed_attention(*args, **given)

    AttentionInterface.register(PACKED, watched)
    AttentionMaskInterface.register(PACKED, sdpa_mask)
    before = model.config._attn_implementation  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.set_attn_implementation(PACKED)  # pyright: ignore[reportCallIssue]
        found = difference(model)
    except Exception as error:  # whatever a model family does not know about packed sequences
        why = f"{type(error).__name__}: {error}"
    else:
        why = _not_told(model.config.get_text_config(decoder=True), windows)  # pyright: ignore[reportCallIssue]
        if why is None and not found < _TOLERANCE[model.get_input_embeddings().weight.dtype]:
            why = f"its numbers differ by {found:.1e} of their size"
    AttentionInterface.register(PACKED, packed_attention)
    if why is not None:
        model.set_attn_implementation(before)  # pyright: ignore[reportCallIssue]
    return why


def _not_told(config: Any, windows: set[int | None]) -> str | None:
    """How layers restrict attention without telling it, which sequences as short as those compared do not show.

    Args:
        config: of the model.
        windows: that its layers told.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of type {min(others)}"
    slides = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None) is not None)
    return "its layers do not tell their sliding window" if slides and windows <= {None} else None


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H N E"],
    key: Float[Tensor, "1 K N E"],
    value: Float[Tensor, "1 K N E"],
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "1 N H E"], None]:
    """Attention as `layout` says; without one, that of transformers."""
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **others
        )
    if others.get("softcap") is not None:
        raise NotImplementedError("attention with a soft cap")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, H, E)
    return layout.attend(module, query, key, value, scaling, sliding_window)[None], None


def packed_inputs(tokens: Sequence[int] | Tensor, positions: Sequence[int] | Tensor, device: torch.device) -> dict:
    """What a forward pass over one packed sequence is given, beside its layout."""
    return {
        "input_ids": torch.as_tensor(tokens, device=device)[None],
        "position_ids": torch.as_tensor(positions, device=device)[None],
        "attention_mask": torch.zeros(1, 1, 1, 1, device=device),  # four dimensions: taken as it is, and never read
        "use_cache": False,
    }


@dataclass(frozen=True)
class Forest:
    """Trees: each prompt sees itself, each branch its prompt and itself. All prompts come first, then all branches.

    Attributes:
        prompts: one a tree.
        branches: in the order of their trees; attention pads those alone that are of similar length.
        crowns: the branches of each tree as one sequence.
        tree: the prompt of each branch.
        sizes: packed tokens of all prompts, and of all branches.
    """

    prompts: Blocks
    branches: Bunches
    crowns: Blocks
    tree: Int[Tensor, " R"]
    sizes: tuple[int, int]
    _masks: dict[Any, Any] = field(default_factory=dict)  # the layers of a model share them

    @classmethod
    def of(cls, prompts: Sequence[int], branches: Sequence[int], tree: Sequence[int], device: torch.device) -> Forest:
        """Of the lengths of prompts and branches, and the prompt of each branch, ascending."""
        crowns = [0] * len(prompts)
        for prompt, length in zip(tree, branches, strict=True):
            crowns[prompt] += length
        return cls(
            Blocks.of(prompts, device),
            Bunches.of(branches, device),
            Blocks.of(crowns, device),
            torch.tensor(tree, device=device, dtype=torch.long),
            (sum(prompts), sum(branches)),
        )

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """See `Layout.attend`."""
        of_prompts, of_branches = zip(*(x.split(self.sizes) for x in (query, key, value)), strict=True)
        blocks = [self.prompts.unpack(x) for x in of_prompts]
        prompts = self.prompts.pack(attend_densely(*blocks, self._prompt_mask(query.dtype, window), scale))
        if not self.sizes[1]:
            return prompts
        short = self.sizes[1] <= _SHORT * len(self.tree)
        attend = self._in_parts if short and query.device.type == "cpu" else self._at_once
        return torch.cat([prompts, attend(of_prompts, of_branches, scale, window)])

    def _in_parts(
        self, of_prompts: tuple[Tensor, ...], of_branches: tuple[Tensor, ...], scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of the branches: products of many small matrices, at which a CPU's fused kernel is slow."""
        query, *own = of_branches
        return attend_in_parts(query, [tuple(own), of_prompts[1:]], self._parts(window), scale)

    def _at_once(
        self, of_prompts: tuple[Tensor, ...], of_branches: tuple[Tensor, ...], scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of the branches in calls of a fused kernel, each branch with a copy of its prompt's keys."""
        prompts, outs = [self.prompts.unpack(x) for x in of_prompts[1:]], []
        for bunch, (branches, rows) in enumerate(zip(self.branches.blocks, self.branches.rows, strict=True)):
            query, *own = (branches.unpack(x) for x in of_branches)
            keys, values = (
                torch.cat([x.index_select(0, self.tree[rows]), y], dim=1) for x, y in zip(prompts, own, strict=True)
            )
            outs.append(attend_densely(query, keys, values, self._branch_mask(bunch, query.dtype, window), scale))
        return self.branches.pack(outs)

    def _prompt_mask(self, dtype: torch.dtype, window: int | None) -> Float[Tensor, "1 1 P P"] | None:
        """To add to attention scores; None where plain causal attention is right."""
        width = self.prompts.index.shape[1]
        if window is None or width <= window:
            return None
        return self._once(
            ("prompt", dtype, window), lambda: to_add(_causal(width, width, self.tree.device, window)[None], dtype)
        )

    def _branch_mask(self, bunch: int, dtype: torch.dtype, window: int | None) -> Float[Tensor, "r 1 T P+T"]:
        """To add to attention scores."""

        def mask() -> Tensor:
            branches, tree = self.branches.blocks[bunch], self.tree[self.branches.rows[bunch]]
            width = branches.index.shape[1]
            prompt = self._sees_prompt(branches, tree, window).expand(-1, width, -1)
            own = _causal(width, width, tree.device, window).expand(len(tree), -1, -1)
            return to_add(torch.cat([prompt, own], dim=-1), dtype)

        return self._once(("branch", bunch, dtype, window), mask)

    def _parts(self, window: int | None) -> tuple[Part, Part]:
        """What branches see of themselves, and of their prompts."""

        def parts() -> tuple[Part, Part]:
            device = self.tree.device
            own = []
            for branches in self.branches.blocks:
                width = branches.index.shape[1]
                mask = mask_of(~_causal(width, width, device, window)[None, None, :, None])
                own.append(Piece(branches, branches, mask, causal=True))
            sees = self._sees_prompt(self.crowns, torch.arange(len(self.prompts.index), device=device), window)
            shared = Piece(self.crowns, self.prompts, mask_of(~sees[:, None, :, None]), causal=False)
            return Part(own, self.branches.order), Part([shared])

        return self._once(("parts", window), parts)

    def _sees_prompt(self, tokens: Blocks, tree: Tensor, window: int | None) -> Bool[Tensor, "B W P"]:
        """Which of its prompt's tokens each sees; (B, 1, P) where all tokens of a sequence see the same."""
        length = self.prompts.lengths[tree]
        prompt = torch.arange(self.prompts.index.shape[1], device=length.device)
        sees = (prompt < length[:, None])[:, None]
        if window is None:
            return sees
        # Positions of the packed branches, from the prompts' ends on.
        return sees & (length[:, None, None] + tokens.unpack(self._depth)[:, :, None] - prompt < window)

    @property
    def _depth(self) -> Int[Tensor, " N"]:
        """Tokens of its own branch that come before each token of the branches."""
        return self.branches.pack(
            [
                torch.arange(branches.index.shape[1], device=self.tree.device).expand(len(branches.index), -1)
                for branches in self.branches.blocks
            ]
        )

    def _once(self, name: tuple, made: Callable[[], Any]) -> Any:
        if name not in self._masks:
            self._masks[name] = made()
        return self._masks[name]


def attend_densely(
    query: Float[Tensor, "B Q H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K E"],
    mask: Tensor | None,
    scale: float | None,
) -> Float[Tensor, "B Q H E"]:
    """One call of a fused kernel for sequences side by side; `mask` as of `to_add`, or None for plain causal attention."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    cast: AbstractContextManager = nullcontext()
    if query.device.type == "cpu" and query.shape[2] <= _FEW_QUERIES and torch.is_autocast_enabled("cpu"):
        query, key, value = (x.float() for x in (query, key, value))
        cast = torch.autocast("cpu", enabled=False)
    with cast:
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask if mask is None else mask.to(query.dtype),
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] > key.shape[1],
        )
    return out.transpose(1, 2)


def _causal(queries: int, keys: int, device: torch.device, window: int | None) -> Bool[Tensor, "Q K"]:
    away = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    return (away >= 0) if window is None else (away >= 0) & (away < window)


def to_add(sees: Bool[Tensor, "B Q S"], dtype: torch.dtype) -> Float[Tensor, "B 1 Q S"]:
    """What to add to attention scores."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, -torch.inf)[:, None]
