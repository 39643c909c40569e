"""CISPO: clipped importance-sampling weight policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    L = - mean over tokens of  sg[ min(r_it, 1 + clip_high) ] * A_i * log pi(y_it),      A as in GRPO

The weight is clipped and detached, the gradient of no token is dropped, and there is no lower bound. `clip_high`
is relative to 1 (verl's convention; TRL's epsilon_high is the absolute cap 1 + clip_high, 5.0 recommended).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import log_ratio, masked_sum, ratio, share, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class CISPO(Algorithm):
    """Clipped importance-sampling weights.

    Attributes:
        clip_high: the weight is at most 1 + clip_high.
    """

    clip_high: float = 4.0

    min_group = 2
    frozen = (Score("old", Stream("old")),)

    def __post_init__(self) -> None:
        if not self.clip_high > 0:
            raise ValueError(f"clip_high takes a number above 0, got {self.clip_high}")

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards standardised within their group."""
        return {"advantage": standardise(batch.rewards, batch.group, eps=1e-6)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over tokens of the weighted log-prob."""
        r = ratio(log_ratio(scores["policy"], batch["old"], batch.mask)).detach()
        weight = r.clamp(max=1 + self.clip_high) * batch["advantage"].unsqueeze(-1)
        return -masked_sum(weight * scores["policy"], batch.mask).sum() / batch.total("tokens")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens whose weight the cap holds."""
        r = ratio(log_ratio(scores["policy"], batch["old"], batch.mask))
        return {"cispo/clip_fraction": share(r > 1 + self.clip_high, batch.mask)}
