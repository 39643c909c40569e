"""GMPO: geometric-mean policy optimization (arXiv 2507.20673, eq. 4).

    L = - mean over rows of  A_i * exp( 1 / |y_i| * sum_t m_it ),      A as in GRPO
    m_it = min(d_it, clip(d_it)) where A_i > 0,  max(d_it, clip(d_it)) where A_i < 0,  d = log pi - log pi_old

The clip is in log space, [-clip, clip], and one-sided like PPO's. Unclipped, the exponential is GSPO's s_i.
`clip` is the paper's 0.4 (verl's geo_mean reuses its ratio clip of 0.2 there).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import log_ratio, masked_mean, ratio, share, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class GMPO(Algorithm):
    """Geometric-mean policy optimization.

    Attributes:
        clip: half-width of the clip range of the token log-ratio, in nats.
    """

    clip: float = 0.4

    min_group = 2
    frozen = (Score("old", Stream("old")),)

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip takes a number above 0, got {self.clip}")

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards standardised within their group."""
        return {"advantage": standardise(batch.rewards, batch.group, eps=1e-6)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the advantage times the geometric mean of clipped ratios."""
        d = log_ratio(scores["policy"], batch["old"], batch.mask)
        clipped = d.clamp(-self.clip, self.clip)
        gains = (batch["advantage"] > 0).unsqueeze(-1)
        one_sided = torch.where(gains, torch.minimum(d, clipped), torch.maximum(d, clipped))
        return -(batch["advantage"] * ratio(masked_mean(one_sided, batch.mask))).sum() / batch.total("rows")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds."""
        d = log_ratio(scores["policy"], batch["old"], batch.mask)
        a = batch["advantage"].unsqueeze(-1)
        held = ((d > self.clip) & (a > 0)) | ((d < -self.clip) & (a < 0))
        return {"gmpo/clip_fraction": share(held, batch.mask)}
