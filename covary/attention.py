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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

PACKED = "covary_packed"
# By which packed and plain numbers of a model may differ, relative to their size: rounding is a hundred times
# smaller in float32 (eight bits less in bfloat16), a wrong mask or position is far larger.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


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
    """Trees: each prompt sees itself, each branch its prompt and itself.

    Attention pads: it is computed on blocks, in two calls a layer, prompts and branches.

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

    @classmethod
    def of(cls, prompts: Sequence[int], branches: Sequence[int], tree: Sequence[int], device: torch.device) -> Forest:
        """Of the lengths of prompts and branches, packed in this order, and the prompt of each branch."""
        prompt_index, prompt_lengths = _blocks(prompts, 0, device)
        branch_index, branch_lengths = _blocks(branches, sum(prompts), device)
        return cls(
            prompt_index,
            branch_index,
            torch.tensor(tree, device=device, dtype=torch.long),
            (prompt_lengths, branch_lengths),
        )

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """See `Layout.attend`."""
        prompt_key, prompt_value = key[self.prompts], value[self.prompts]
        prompts = _attend(query[self.prompts], prompt_key, prompt_value, self._prompt_mask(query.dtype, window), scale)
        branches = query[self.branches]
        if branches.numel():
            branches = _attend(
                branches,
                torch.cat([prompt_key[self.tree], key[self.branches]], dim=1),
                torch.cat([prompt_value[self.tree], value[self.branches]], dim=1),
                self._branch_mask(query.dtype, window),
                scale,
            )
        blocks = zip((prompts, branches), self.lengths, strict=True)
        return torch.cat([block[_valid(block.shape[1], lengths)] for block, lengths in blocks])

    def _prompt_mask(self, dtype: torch.dtype, window: int | None) -> Float[Tensor, "1 1 P P"] | None:
        """To add to attention scores; None where plain causal attention is right."""
        width = self.prompts.shape[1]
        if window is None or width <= window:
            return None
        return self._mask("prompt", dtype, window, lambda: _causal(width, width, self.tree.device, window)[None])

    def _branch_mask(self, dtype: torch.dtype, window: int | None) -> Float[Tensor, "R 1 T P+T"]:
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

    def _mask(self, kind: str, dtype: torch.dtype, window: int | None, sees: Callable[[], Tensor]) -> Tensor:
        key = (kind, dtype, window)
        if key not in self._masks:
            allowed = sees()
            blocked = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, -torch.inf)
            self._masks[key] = blocked[:, None]
        return self._masks[key]


def _attend(
    query: Float[Tensor, "B Q H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K E"],
    mask: Tensor | None,
    scale: float | None,
) -> Float[Tensor, "B Q H E"]:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] > key.shape[1],
    )
    return out.transpose(1, 2)


def _causal(queries: int, keys: int, device: torch.device, window: int | None) -> Bool[Tensor, "Q K"]:
    away = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    return (away >= 0) if window is None else (away >= 0) & (away < window)


def _valid(width: int, lengths: Tensor) -> Bool[Tensor, "B W"]:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _blocks(lengths: Sequence[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, W) indices of sequences that follow each other from `start` on, and (B,) their lengths."""
    length = torch.tensor(lengths, device=device, dtype=torch.long)
    offset = length.cumsum(0) - length + start
    width = max(lengths, default=0)
    index = offset[:, None] + torch.arange(width, device=device)
    pad = offset.clamp(max=max(start + sum(lengths) - 1, 0))  # an empty sequence at the end has no token of its own
    return index.where(_valid(width, length), pad[:, None]), length
