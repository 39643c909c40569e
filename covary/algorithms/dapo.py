"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476, eq. 8-13).

    groups whose rewards are all equal are dropped, and new prompts drawn
    R'_i = R_i + min(0, (max_tokens - buffer - |y_i|) / buffer),   buffer = overlong_share * max_tokens
    L    = - mean over tokens of  min( r A, clip(r, 1 - low, 1 + high) A ),   A as in GRPO, of R'

Clip-higher, token mean, no KL. The length penalty is added after the selection, so it makes no group differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import all_equal, check_clip, clipped, clipped_surrogate, log_ratio, masked_sum, share, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class DAPO(Algorithm):
    """GRPO with clip-higher, token mean, dynamic sampling and soft overlong shaping.

    Attributes:
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above.
        overlong_share: share of `max_tokens` over which the length penalty grows from 0 to 1 (the paper's 4096 of
            20480); 0 for none.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    overlong_share: float = 0.2

    min_group = 2
    frozen = (Score("old", Stream("old")),)

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if not 0 <= self.overlong_share < 1:
            raise ValueError(f"overlong_share takes a number from 0 and below 1, got {self.overlong_share}")

    def select(self, batch: Batch, state: dict[str, float]) -> tuple[Bool[Tensor, " G"], dict[str, float]]:
        """Groups whose rewards differ (dynamic sampling)."""
        return ~all_equal(batch.rewards, batch.group), state

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Shaped rewards standardised within their group."""
        shaped = batch.rewards + self.overlong_penalty(batch.mask.sum(-1).to(batch.rewards.dtype), batch.max_tokens)
        return {"advantage": standardise(shaped, batch.group, eps=1e-6)}

    def overlong_penalty(self, length: Tensor, max_tokens: int) -> Tensor:
        """0 up to max_tokens - buffer, then linearly down to -1 at max_tokens (eq. 13)."""
        buffer = self.overlong_share * max_tokens
        if buffer == 0:
            return torch.zeros_like(length)
        return ((max_tokens - buffer - length) / buffer).clamp(-1, 0)

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over tokens of the clipped surrogate."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        surrogate = clipped_surrogate(to_old, batch["advantage"].unsqueeze(-1), self.clip_low, self.clip_high)
        return -masked_sum(surrogate, batch.mask).sum() / batch.total("tokens")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        held = clipped(to_old, batch["advantage"].unsqueeze(-1), self.clip_low, self.clip_high)
        return {"dapo/clip_fraction": share(held, batch.mask)}
