"""Attention over some of the keys at a time, put together by their sums of exponentials.

A completion's tokens attend to the prompt, which all completions of a tree share, and to their own completion. Taken
apart, the first is one product for all tokens of a tree, no prompt is copied, and neither part is padded by the other.

Letters in shapes: N packed tokens, B blocks, Q queries, S keys, H heads, K heads of keys and values, J = H / K, E their
width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

# Scores of a product: bounds the memory, and what is freed is used again (`BLOCK_NUMBERS` of scoring/chunked.py).
_SCORES = 2**22
# Queries of a product whose keys end where its queries end.
_CAUSAL_QUERIES = 128
# Blocks of sequences of different lengths, and the share of padded tokens up to which they are worth it: each block
# more takes as long as some padding.
_MOST_BUNCHES = 3
_SAVING = 0.7


def attend_part(
    query: Float[Tensor, "B K Q J E"],
    key: Float[Tensor, "B K S E"],
    value: Float[Tensor, "B K S E"],
    mask: Float[Tensor, "b 1 q 1 S"] | None,
) -> tuple[Float[Tensor, "B K Q J E"], Float[Tensor, "B K Q J"]]:
    """Attention over some of the keys, and the log of its sum of exponentials, to base 2.

    Powers of 2 are several times faster than those of e on a CPU, above all where they vanish.

    Args:
        query: times `scale_to_base_2`.
        key: of this part.
        value: likewise.
        mask: of `mask_of`; None where everything is seen.
    """
    scores = _scores(query, key, mask)
    top = scores.amax(-1, keepdim=True)
    scores = scores.sub_(top).exp2_()
    total = scores.sum(-1, keepdim=True)
    out = _product(scores.to(value.dtype), value)
    return out.div_(total.to(value.dtype)), (top + total.log2()).squeeze(-1)


def scale_to_base_2(width: int, scale: float | None) -> float:
    """What queries are multiplied with, of heads of this width."""
    return (width**-0.5 if scale is None else scale) * math.log2(math.e)


def mask_of(blocked: Bool[Tensor, "*B"]) -> Float[Tensor, "*B"] | None:
    """To add to scores, from what is not seen; None where everything is.

    Not -inf: a query that sees nothing of a part has to have no weight beside the other part, and not NaN.
    """
    if not blocked.any():
        return None
    return torch.zeros(blocked.shape, device=blocked.device).masked_fill_(blocked, torch.finfo(torch.float32).min / 2)


def add_part(
    out: Float[Tensor, "*B E"], log_sum: Float[Tensor, "*B"], other: Float[Tensor, "*B E"], other_log_sum: Tensor
) -> Float[Tensor, "*B E"]:
    """Attention over the keys of two parts."""
    share = torch.sigmoid((other_log_sum - log_sum) * math.log(2)).to(out.dtype)
    return torch.lerp(out, other, share.unsqueeze(-1))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None) -> Float[Tensor, "B K Q J S"]:
    scores = _product(query, key.transpose(-1, -2))
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores if mask is None else scores.add_(mask)


def _product(left: Float[Tensor, "B K Q J m"], right: Float[Tensor, "B K m n"]) -> Float[Tensor, "B K Q J n"]:
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _summed(left: Float[Tensor, "B K Q J m"], right: Float[Tensor, "B K Q J n"]) -> Float[Tensor, "B K m n"]:
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)


@dataclass(frozen=True)
class Blocks:
    """Sequences that follow each other among packed tokens, side by side.

    Attributes:
        lengths: of the sequences.
        index: of their tokens among theirs alone. A pad is the sequence's own first token, so that a number that is not
            finite stays in its sequence.
    """

    lengths: Int[Tensor, " B"]
    index: Int[Tensor, "B W"]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Blocks:
        """Of sequences of these lengths."""
        length = torch.tensor(lengths, device=device, dtype=torch.long)
        offset = length.cumsum(0) - length
        index = offset[:, None] + torch.arange(max(lengths, default=0), device=device)
        pad = offset.clamp(max=max(sum(lengths) - 1, 0))  # an empty sequence at the end has no token of its own
        return cls(length, index.where(_valid(index.shape[1], length), pad[:, None]))

    def of_some(self, sequences: Sequence[int], longest: int) -> Blocks:
        """Of some of the sequences, none of them longer than `longest`; packed tokens are still those of all."""
        rows = torch.tensor(sequences, device=self.index.device, dtype=torch.long)
        return Blocks(self.lengths[rows], self.index[rows, :longest])

    @cached_property
    def valid(self) -> Bool[Tensor, "B W"]:
        """Which are no pads."""
        return _valid(self.index.shape[1], self.lengths)

    @cached_property
    def place(self) -> Int[Tensor, " N"] | None:
        """Where each packed token lies, flat; None where there are no pads."""
        return None if self.valid.all() else self.valid.flatten().nonzero()[:, 0]

    def unpack(self, packed: Float[Tensor, "N ..."]) -> Float[Tensor, "B W ..."]:
        """Side by side."""
        if self.place is None and len(packed) == self.index.numel():
            return packed.unflatten(0, self.index.shape)
        return packed.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)

    def pack(self, blocks: Float[Tensor, "B W ..."]) -> Float[Tensor, "N ..."]:
        """One after the other again."""
        flat = blocks.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)


@dataclass(frozen=True)
class Bunches:
    """Sequences that follow each other among packed tokens, in blocks of those that are of similar length.

    Attributes:
        blocks: without sequences of no tokens.
        rows: the sequences of each.
        lengths: of all sequences.
        order: where each packed token lies among those of all blocks, one after the other.
    """

    blocks: Sequence[Blocks]
    rows: Sequence[Int[Tensor, " r"]]
    lengths: Int[Tensor, " B"]
    order: Int[Tensor, " N"]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Bunches:
        """Of sequences of these lengths."""
        all_of_them, rows = Blocks.of(lengths, device), _similar(lengths)
        blocks = [all_of_them.of_some(some, max(lengths[row] for row in some)) for some in rows]
        none = torch.empty(0, dtype=torch.long, device=device)
        order = torch.cat([none, *(some.index[some.valid] for some in blocks)]).argsort()
        return cls(blocks, [torch.tensor(some, device=device) for some in rows], all_of_them.lengths, order)

    def pack(self, numbers: Sequence[Float[Tensor, "B W ..."]]) -> Float[Tensor, "N ..."]:
        """One sequence after the other again."""
        return _joined([own.pack(block) for own, block in zip(self.blocks, numbers, strict=True)], self.order)


def _joined(packed: Sequence[Float[Tensor, "n ..."]], order: Int[Tensor, " N"] | None) -> Float[Tensor, "N ..."]:
    if len(packed) == 1:
        return packed[0]
    assert order is not None
    return torch.cat(list(packed)).index_select(0, order)


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """The longest with those of more than half its length, and so on, where that saves much padding; none of no tokens."""
    longest = max(lengths, default=0)
    bunches: list[list[int]] = [[] for _ in range(_MOST_BUNCHES)]
    for row, length in enumerate(lengths):
        if length:
            halves = (longest // length).bit_length() - 1
            bunches[min(halves, _MOST_BUNCHES - 1)].append(row)
    bunches = [rows for rows in bunches if rows]
    apart = sum(len(rows) * max(lengths[row] for row in rows) for rows in bunches)
    if apart > _SAVING * longest * sum(map(len, bunches)):
        return [sorted(row for rows in bunches for row in rows)]
    return bunches


def _valid(width: int, lengths: Tensor) -> Bool[Tensor, "B W"]:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class Piece:
    """Sequences that look at others, block by block.

    Attributes:
        queries: of the sequences whose tokens look.
        keys: at which they look, block by block.
        mask: of `mask_of`, (B or 1, 1, Q or 1, 1, S); None where everything is seen.
        causal: every sequence looks at itself.
    """

    queries: Blocks
    keys: Blocks
    mask: Float[Tensor, "b 1 q 1 S"] | None
    causal: bool

    def products(self, heads: int) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
        """One after the other: its blocks, its queries, its keys and its mask."""
        (blocks, queries), keys = self.queries.index.shape, self.keys.index.shape[1]
        step = min(queries, _CAUSAL_QUERIES if self.causal else queries, max(1, _SCORES // (heads * keys)))
        many = max(1, _SCORES // (heads * step * keys))
        for block in range(0, blocks, many):
            for start in range(0, queries, step):
                q, s = slice(start, start + step), slice(0, start + step if self.causal else keys)
                b, mask = slice(block, block + many), self.mask
                if mask is not None:
                    of_block = b if mask.shape[0] > 1 else slice(None)
                    mask = mask[of_block, :, q if mask.shape[2] > 1 else slice(None), :, s]
                yield b, q, s, mask


@dataclass(frozen=True)
class Part:
    """Which queries see which keys.

    Attributes:
        pieces: have all queries between them, and all keys.
        order: where each packed query and key lies among those of all pieces, one after the other; None for one piece.
    """

    pieces: Sequence[Piece]
    order: Int[Tensor, " N"] | None = None

    def joined(self, packed: Sequence[Float[Tensor, "n ..."]]) -> Float[Tensor, "N ..."]:
        """What there is of the packed tokens of each piece, as of all."""
        return _joined(packed, self.order)


def attend_in_parts(
    query: Float[Tensor, "N H E"],
    keys_and_values: Sequence[tuple[Float[Tensor, "M K E"], Float[Tensor, "M K E"]]],
    parts: Sequence[Part],
    scale: float | None,
) -> Float[Tensor, "N H E"]:
    """Attention of packed tokens over the keys of two parts, each with all queries and with keys of its own."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, keys_and_values = query.to(dtype), [(k.to(dtype), v.to(dtype)) for k, v in keys_and_values]
    return _InParts.apply(query, scale, parts, *(x for pair in keys_and_values for x in pair))  # pyright: ignore[reportReturnType]


class _InParts(torch.autograd.Function):
    """The backward pass computes the scores once more."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "N H E"],
        scale: float | None,
        parts: Sequence[Part],
        *keys_and_values: Float[Tensor, "M K E"],
    ) -> Float[Tensor, "N H E"]:
        heads, kv = query.shape[1], keys_and_values[0].shape[1]
        found, factor = [], scale_to_base_2(query.shape[-1], scale)
        for part, (key, value) in zip(parts, _pairs(keys_and_values), strict=True):
            outs, sums = [], []
            for piece in part.pieces:
                q, (k, v) = _queries(piece, query * factor, kv), (_keys(piece, x) for x in (key, value))
                out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_exact(q.dtype))
                for b, i, j, mask in piece.products(heads):
                    out[b, :, i], log_sum[b, :, i] = attend_part(q[b, :, i], k[b, :, j], v[b, :, j], mask)
                outs.append(_packed(piece, out))
                sums.append(_packed(piece, log_sum))
            found += [part.joined(outs), part.joined(sums)]
        out = add_part(*found)
        ctx.save_for_backward(query, out, torch.logaddexp2(found[1], found[3]), *keys_and_values)
        ctx.scale, ctx.parts = scale, parts
        return out.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, out, log_sum, *keys_and_values = ctx.saved_tensors
        heads, kv, factor = query.shape[1], out.shape[1], scale_to_base_2(query.shape[-1], ctx.scale)
        d_out = d_out.view_as(out)
        # How much each token's scores have to rise together is nothing: softmax takes their mean out.
        mean = (d_out.to(log_sum.dtype) * out).sum(-1)
        d_query, others = torch.zeros_like(out, dtype=log_sum.dtype), []
        for part, (key, value) in zip(ctx.parts, _pairs(keys_and_values), strict=True):
            of_pieces = []
            for piece in part.pieces:
                q, (k, v) = _queries(piece, query * factor, kv), (_keys(piece, x) for x in (key, value))
                d_o, means = (_without_pads(piece, x) for x in (d_out, mean))
                # A pad may see what the token that stands in it does not: no weight, however large its score.
                sums = _without_pads(piece, log_sum, fill=math.inf)
                d_q, d_k, d_v = (torch.zeros_like(x, dtype=_exact(x.dtype)) for x in (q, k, v))
                for b, i, j, mask in piece.products(heads):
                    weights = _scores(q[b, :, i], k[b, :, j], mask).sub_(sums[b, :, i, :, None]).exp2_()
                    d_scores = _product(d_o[b, :, i], v[b, :, j].transpose(-1, -2)).to(weights.dtype)
                    d_scores = d_scores.sub_(means[b, :, i, :, None]).mul_(weights).to(q.dtype)
                    d_v[b, :, j] += _summed(weights.to(q.dtype), d_o[b, :, i])
                    d_k[b, :, j] += _summed(d_scores, q[b, :, i])
                    d_q[b, :, i] = _product(d_scores, k[b, :, j])
                # The derivative of 2**x has the factor log(2), by which the scaled queries are too large.
                d_keys = [piece.keys.pack(d.transpose(1, 2)) for d in (d_k.mul_(math.log(2)), d_v)]
                of_pieces.append((_packed(piece, d_q), *d_keys))
            d_q, *d_keys = (part.joined(d) for d in zip(*of_pieces, strict=True))
            d_query += d_q
            others += [d.to(key.dtype) for d in d_keys]
        return d_query.mul_(factor * math.log(2)).flatten(1, 2).to(query.dtype), None, None, *others


def _pairs(values: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(values[::2], values[1::2], strict=True)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _queries(piece: Piece, query: Float[Tensor, "N H E"], kv: int) -> Float[Tensor, "B K Q J E"]:
    return _blocks(piece, query.unflatten(1, (kv, -1)))


def _blocks(piece: Piece, packed: Float[Tensor, "N K J ..."]) -> Float[Tensor, "B K Q J ..."]:
    return piece.queries.unpack(packed).transpose(1, 2).contiguous()


def _without_pads(piece: Piece, packed: Float[Tensor, "N K J ..."], fill: float = 0.0) -> Float[Tensor, "B K Q J ..."]:
    """Zeros, or another number, for pads: what reaches them is not theirs."""
    blocks = piece.queries.unpack(packed)
    if piece.queries.place is not None:
        blocks = blocks.masked_fill(~piece.queries.valid.view(*blocks.shape[:2], *[1] * (blocks.ndim - 2)), fill)
    return blocks.transpose(1, 2).contiguous()


def _keys(piece: Piece, packed: Float[Tensor, "M K E"]) -> Float[Tensor, "B K S E"]:
    return piece.keys.unpack(packed).transpose(1, 2).contiguous()


def _packed(piece: Piece, blocks: Float[Tensor, "B K Q J ..."]) -> Float[Tensor, "N K J ..."]:
    return piece.queries.pack(blocks.transpose(1, 2))
