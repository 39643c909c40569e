"""GRPO: group relative policy optimization (DeepSeekMath, arXiv 2402.03300, eq. 3).

    A_i = (R_i - mean) / (std + eps),  std unbiased
    L = - mean over rows of  1 / |y_i| * sum_t [ min(r A, clip(r, 1 - eps, 1 + eps) A) - kl_coef * k3 ]

r = pi / pi_old per token, k3 against the initial policy, as a loss term (the paper's eq. 4; its gradient on
samples of pi is the forward KL's). eps = 1e-6 as in verl (TRL: 1e-4). No dual clip (verl's default has one).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import check_clip, clipped, clipped_surrogate, k3, log_ratio, masked_mean, share, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class GRPO(Algorithm):
    """Group relative policy optimization.

    Attributes:
        clip: half-width of the ratio's clip range.
        kl_coef: weight of the k3 term against the initial policy; 0 loads no initial policy.
    """

    clip: float = 0.2
    kl_coef: float = 0.04

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
        """Rewards standardised within their group."""
        return {"advantage": standardise(batch.rewards, batch.group, eps=1e-6)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the mean over tokens (eq. 3)."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        per_token = -clipped_surrogate(to_old, batch["advantage"].unsqueeze(-1), self.clip, self.clip)
        if self.kl_coef > 0:
            to_initial = log_ratio(scores["policy"], batch["initial"], batch.mask)
            per_token = per_token + self.kl_coef * k3(to_initial)
        return masked_mean(per_token, batch.mask).sum() / batch.total("rows")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        held = clipped(to_old, batch["advantage"].unsqueeze(-1), self.clip, self.clip)
        return {"grpo/clip_fraction": share(held, batch.mask)}
