"""LaTRO: latent reasoning optimization (arXiv 2411.04282).

    J   = E_{z ~ p(.|x)}[ log p(y|z,x) ] - b KL(p(z|x) || p_initial(z|x))
    r_i = log p(y|z_i,x) - b sum_t (log p_old - log p_initial)(z_it),   A_i = r_i - mean of the others' r
    L   = - mean over rows of  A_i log p(z_i|x) + c log p(y|z_i,x)

The gradient of J is exactly this at c = 1. The official code (SalesforceAIResearch/LaTRO) leaves the answer's own gradient
out by default (`sft_penalty` 0) and gives a trace without an end twice the batch's mean reward; here it gets the least of
its group and has no answer term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import fill_with_least, leave_one_out, masked_sum
from covary.types import Score, Stream


@dataclass(frozen=True)
class LaTRO(Algorithm):
    """REINFORCE on the answer's log-likelihood, and its gradient.

    Attributes:
        kl_coef: b, weight of the KL to the initial policy inside the reward; 0 loads no initial policy.
        answer_coef: c, weight of the answer's own gradient.
    """

    kl_coef: float = 0.05
    answer_coef: float = 1.0

    min_group = 2
    template = "think"
    trained = (Score("policy"), Score("answer", tokens="answer", level="sequence"))

    def __post_init__(self) -> None:
        for name in ("kl_coef", "answer_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} takes a number from 0 on, got {getattr(self, name)}")

    @property
    def frozen(self) -> tuple[Score, ...]:
        """The answer behind the trace, and the trace under the old and the initial policy where the KL counts."""
        answer = Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True)
        if self.kl_coef == 0:
            return (answer,)
        return (answer, Score("old", Stream("old"), early=True), Score("initial", Stream("initial"), early=True))

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's log-likelihood, less the trace's share of the KL."""
        answered = batch.answer_mask.any(-1)
        reward = fill_with_least(torch.where(answered, batch["old_answer"], torch.nan), batch.group)
        if self.kl_coef > 0:
            reward = reward - self.kl_coef * masked_sum(batch["old"] - batch["initial"], batch.mask)
        return reward

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Reward minus the mean of the others."""
        return {"advantage": leave_one_out(batch.rewards, batch.group)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the trace's and the answer's term."""
        trace = (batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum()
        answer = torch.where(batch.answer_mask.any(-1), scores["answer"], 0.0).sum()
        return -(trace + self.answer_coef * answer) / batch.total("rows")
