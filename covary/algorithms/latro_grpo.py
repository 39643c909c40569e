"""LaTRO's reward inside a GRPO update: the form in which CoVRL (arXiv 2512.12576, section 3.1) compares it.

    r_i = log p(y|z_i,x) - b sum_t (log p_old - log p_initial)(z_it),   A_i = (r_i - mean) / (std + eps)
    L   = - mean over rows of  1 / |z_i| * sum_t min(ratio A, clip(ratio) A)

No gradient through the answer; the method itself is `latro`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import check_clip, fill_with_least, log_ratio, masked_sum, row_surrogate, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class LaTROGRPO(Algorithm):
    """GRPO on the answer's log-likelihood.

    Attributes:
        kl_coef: b, weight of the KL to the initial policy inside the reward; 0 loads no initial policy.
        clip: half-width of the ratio's clip range.
    """

    kl_coef: float = 0.05
    clip: float = 0.3

    min_group = 2
    template = "think"

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef takes a number from 0 on, got {self.kl_coef}")

    @property
    def frozen(self) -> tuple[Score, ...]:
        """The answer behind the trace, the old policy, and the initial one where the KL counts."""
        answer = Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True)
        if self.kl_coef == 0:
            return (answer, Score("old", Stream("old")))
        return (answer, Score("old", Stream("old"), early=True), Score("initial", Stream("initial"), early=True))

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's log-likelihood, less the trace's share of the KL."""
        answered = batch.answer_mask.any(-1)
        reward = fill_with_least(torch.where(answered, batch["old_answer"], torch.nan), batch.group)
        if self.kl_coef > 0:
            reward = reward - self.kl_coef * masked_sum(batch["old"] - batch["initial"], batch.mask)
        return reward

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards standardised within their group."""
        return {"advantage": standardise(batch.rewards, batch.group, eps=1e-6)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """GRPO's clipped surrogate."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        return -row_surrogate(to_old, batch["advantage"], batch.mask, self.clip, self.clip).sum() / batch.total("rows")
