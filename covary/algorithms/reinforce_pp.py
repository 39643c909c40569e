"""REINFORCE++ (arXiv 2501.03262, section 3).

    return_it = R_i - kl_coef * sum over s >= t of [log pi_old - log pi_initial](y_is)      (k1, detached)
    A_it      = return_it, whitened over all tokens of the rollout
    L         = - mean over tokens of  min( r A, clip(r, 1 - eps, 1 + eps) A )

Whitening is token-weighted, as in verl, with the population variance (verl's is unbiased: a factor
sqrt((n - 1) / n) of n tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import check_clip, clipped, clipped_surrogate, log_ratio, masked_sum, share, whiten
from covary.types import Score, Stream


@dataclass(frozen=True)
class ReinforcePP(Algorithm):
    """REINFORCE with token-level KL in the return and whitening over the rollout.

    Attributes:
        clip: half-width of the ratio's clip range.
        kl_coef: weight of the KL to the initial policy inside the return, in reward per nat; 0 loads none.
    """

    clip: float = 0.2
    kl_coef: float = 0.01

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef takes a number from 0 on, got {self.kl_coef}")

    @property
    def frozen(self) -> tuple[Score, ...]:
        """The old policy, and the initial one where its KL counts; `prepare` then reads both."""
        if self.kl_coef == 0:
            return (Score("old", Stream("old")),)
        return tuple(Score(name, Stream(name), early=True) for name in ("old", "initial"))

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Returns-to-go, whitened."""
        returns = batch.rewards.unsqueeze(-1).expand(batch.mask.shape)
        if self.kl_coef > 0:
            kl = log_ratio(batch["old"], batch["initial"], batch.mask)
            returns = returns - self.kl_coef * kl.flip(-1).cumsum(-1).flip(-1)
        return {"advantage": whiten(returns, batch.mask, reduce)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over tokens of the clipped surrogate."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        surrogate = clipped_surrogate(to_old, batch["advantage"], self.clip, self.clip)
        return -masked_sum(surrogate, batch.mask).sum() / batch.total("tokens")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds."""
        held = clipped(log_ratio(scores["policy"], batch["old"], batch.mask), batch["advantage"], self.clip, self.clip)
        return {"reinforce_pp/clip_fraction": share(held, batch.mask)}
