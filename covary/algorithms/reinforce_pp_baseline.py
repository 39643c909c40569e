"""REINFORCE++-baseline (arXiv 2501.03262, section 3.3): the group mean as baseline, whitening over the rollout.

    A_it = R_i - mean, whitened over all tokens of the rollout
    L    = - mean over tokens of  min( r A, clip(r, 1 - eps, 1 + eps) A )  -  kl_coef * k2

k2 = (log pi - log pi_initial)^2 / 2 per token, as a loss: on samples of the policy its gradient is that of
KL(pi || pi_initial). Whitening is token-weighted, with the population variance.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import center, check_clip, clipped, clipped_surrogate, log_ratio, masked_sum, share, whiten
from covary.types import Score, Stream


@dataclass(frozen=True)
class ReinforcePPBaseline(Algorithm):
    """REINFORCE++ with the group mean as baseline.

    Attributes:
        clip: half-width of the ratio's clip range.
        kl_coef: weight of the k2 term against the initial policy; 0 loads none.
    """

    clip: float = 0.2
    kl_coef: float = 0.001

    min_group = 2

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef takes a number from 0 on, got {self.kl_coef}")

    @property
    def frozen(self) -> tuple[Score, ...]:
        """The old policy, and the initial one where its KL term counts."""
        old = Score("old", Stream("old"))
        return (old, Score("initial", Stream("initial"))) if self.kl_coef > 0 else (old,)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Centred rewards, whitened over tokens."""
        centred = center(batch.rewards, batch.group).unsqueeze(-1).expand(batch.mask.shape)
        return {"advantage": whiten(centred, batch.mask, reduce)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over tokens of the clipped surrogate and the k2 term."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        per_token = -clipped_surrogate(to_old, batch["advantage"], self.clip, self.clip)
        if self.kl_coef > 0:
            to_initial = log_ratio(scores["policy"], batch["initial"], batch.mask)
            per_token = per_token + self.kl_coef * to_initial.square() / 2
        return masked_sum(per_token, batch.mask).sum() / batch.total("tokens")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds."""
        held = clipped(log_ratio(scores["policy"], batch["old"], batch.mask), batch["advantage"], self.clip, self.clip)
        return {"reinforce_pp_baseline/clip_fraction": share(held, batch.mask)}
