"""Attention of the newest tokens of all rows of a decoding, in two ways: prompts are shared, or copied to their rows.

A row's token sees its prompt and its own completion. Where a prompt is long, its keys and values exist once, and all its
rows look at them in one product. Where prompts are short, a copy in front of every row's own keys takes little memory,
and one call of a fused kernel does what are some forty small operations otherwise (benchmarks/decode_attention.py).

Letters in shapes: R rows, P distinct prompts, W the longest, N the most rows of one prompt, T tokens of a completion, H
heads, K heads of keys and values, J = H / K, E their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from covary.attention import to_add
from covary.partial_attention import add_part, attend_part, mask_of, scale_to_base_2


@dataclass
class Cache:
    """Keys and values of one layer.

    Attributes:
        prompt_key: (P, K, W, E), of the distinct prompts.
        prompt_value: likewise.
        key: (slots, K, F + T, E), of the rows: their prompts first where these are copied, in F places.
        value: likewise.
    """

    prompt_key: Tensor
    prompt_value: Tensor
    key: Tensor
    value: Tensor


class Step(Protocol):
    """What the newest tokens of all rows see; the layers of a model share it.

    Attributes:
        position: (R,), of the new tokens.
    """

    position: Tensor

    def attend(self, cache: Cache, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Attention (R, H, E) of the rows' new tokens, whose keys and values are in the cache."""
        ...


@dataclass(frozen=True)
class SharedPrompts:
    """Every prompt's keys once: two parts, put together by their sums of exponentials.

    Attributes:
        read: tokens of its completion that each row has read before.
        position: of the new token.
        prompt_length: (P,).
        members: the rows of each prompt; 0 stands where there are fewer.
        place: where each row is among them, flat.
        longest: tokens that the row with most of them has read, the new one included.
    """

    read: Tensor  # (R,)
    position: Tensor  # (R,)
    prompt_length: Tensor  # (P,)
    members: Tensor  # (P, N)
    place: Tensor  # (R,)
    longest: int
    _masks: dict[tuple[str, int | None], Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tree: Sequence[int], read: Sequence[int], prompts: Sequence[int], device: torch.device
    ) -> SharedPrompts:
        """From the prompt of each row, the tokens it has read, and the lengths of the prompts."""
        rows_of: list[list[int]] = [[] for _ in prompts]
        for row, prompt in enumerate(tree):
            rows_of[prompt].append(row)
        most = max(map(len, rows_of))
        place = [0] * len(tree)
        for prompt, rows in enumerate(rows_of):
            for nth, row in enumerate(rows):
                place[row] = prompt * most + nth
        members = [rows + [0] * (most - len(rows)) for rows in rows_of]
        position = [prompts[prompt] + count for prompt, count in zip(tree, read, strict=True)]
        numbers = (read, position, prompts, members, place)
        return cls(*(torch.tensor(x, device=device) for x in numbers), longest=max(read) + 1)

    def attend(self, cache: Cache, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """See `Step`."""
        rows, heads, width = query.shape
        kv = cache.key.shape[1]
        query = (query * scale_to_base_2(width, scale)).view(rows, kv, -1, width)  # (R, K, J, E)
        own = attend_part(
            query[:, :, None],
            cache.key[:rows, :, : self.longest],
            cache.value[:rows, :, : self.longest],
            self._mask("own", window, self._unseen_own),
        )
        of_prompts = query[self.members].transpose(1, 2)  # (P, K, N, J, E)
        mask = self._mask("prompt", window, self._unseen_prompt)
        shared = attend_part(of_prompts, cache.prompt_key, cache.prompt_value, mask)
        # (P, K, N, J, ...) -> (R, K, 1, J, ...)
        of_rows = (x.transpose(1, 2).flatten(0, 1)[self.place].unsqueeze(2) for x in shared)
        return add_part(*own, *of_rows).view(rows, heads, width)

    def _mask(self, part: str, window: int | None, unseen: Callable[[int | None], Tensor]) -> Tensor | None:
        """What to add to the scores of a part."""
        if (part, window) not in self._masks:
            self._masks[part, window] = mask_of(unseen(window))
        return self._masks[part, window]

    def _unseen_own(self, window: int | None) -> Tensor:
        away = self.read[:, None] - torch.arange(self.longest, device=self.read.device)
        blocked = (away < 0) if window is None else (away < 0) | (away >= window)
        return blocked[:, None, None, None]

    def _unseen_prompt(self, window: int | None) -> Tensor:
        token = torch.arange(int(self.prompt_length.max()), device=self.read.device)
        blocked = (token >= self.prompt_length[:, None])[:, None]  # (P, 1, W)
        if window is not None:
            blocked = blocked | (self.position[self.members][..., None] - token >= window)
        return blocked[:, None, :, None]


@dataclass(frozen=True)
class CopiedPrompts:
    """Every row's prompt in front of its own tokens: one call of a fused kernel.

    Attributes:
        read: tokens of its completion that each row has read before.
        position: of the new token.
        front: places before the first token of a completion; a shorter prompt leaves some unused.
        longest: tokens that the row with most of them has read, the new one included.
    """

    read: Tensor  # (R,)
    position: Tensor  # (R,)
    front: int
    longest: int
    _masks: dict[Any, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tree: Sequence[int], read: Sequence[int], prompts: Sequence[int], front: int, device: torch.device
    ) -> CopiedPrompts:
        """From the prompt of each row, the tokens it has read, and the lengths of the prompts."""
        position = [prompts[prompt] + count for prompt, count in zip(tree, read, strict=True)]
        return cls(*(torch.tensor(x, device=device) for x in (read, position)), front, max(read) + 1)

    def attend(self, cache: Cache, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """See `Step`."""
        rows, end = len(query), self.front + self.longest
        keys, values = (x[:rows, :, :end] for x in (cache.key, cache.value))
        # The heads that share keys stand where a longer sequence would have its tokens: keys are read once for all of them.
        grouped = query.unflatten(1, (keys.shape[1], -1))  # (R, K, J, E)
        mask = self._mask(query.dtype, window)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)

    def _mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """To add to attention scores, (R, 1, 1, F + T)."""
        if (dtype, window) not in self._masks:
            column = torch.arange(self.front + self.longest, device=self.read.device)
            own, length = column - self.front, (self.position - self.read)[:, None]
            sees = torch.where(own < 0, column < length, own <= self.read[:, None])
            if window is not None:
                sees &= self.position[:, None] - torch.where(own < 0, column, length + own) < window
            self._masks[dtype, window] = to_add(sees[:, None], dtype)
        return self._masks[dtype, window]
