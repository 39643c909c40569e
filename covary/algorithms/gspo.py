"""GSPO: group sequence policy optimization (arXiv 2507.18071, eq. 5-7).

    s_i = exp( 1 / |y_i| * sum_t [log pi - log pi_old] )
    L   = - mean over rows of  min( s_i A_i, clip(s_i, 1 - low, 1 + high) A_i ),   A as in GRPO

The ratio is the sequence's, so every row counts once whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import check_clip, clipped, clipped_surrogate, log_ratio, masked_mean, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class GSPO(Algorithm):
    """Group sequence policy optimization.

    Attributes:
        clip_low: how far the sequence ratio may fall below 1 (the paper's 3e-4).
        clip_high: how far it may rise above (4e-4).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    min_group = 2
    frozen = (Score("old", Stream("old")),)

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards standardised within their group."""
        return {"advantage": standardise(batch.rewards, batch.group, eps=1e-6)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the clipped sequence surrogate (eq. 5)."""
        surrogate = clipped_surrogate(self._log_ratio(scores, batch), batch["advantage"], self.clip_low, self.clip_high)
        return -surrogate.sum() / batch.total("rows")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of rows that the clip holds."""
        held = clipped(self._log_ratio(scores, batch), batch["advantage"], self.clip_low, self.clip_high)
        return {"gspo/clip_fraction": float(held.float().mean())}

    def _log_ratio(self, scores: Scores, batch: Batch) -> Float[Tensor, " B"]:
        """Log of the length-normalised sequence ratio."""
        return masked_mean(log_ratio(scores["policy"], batch["old"], batch.mask), batch.mask)
