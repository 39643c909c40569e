"""Policy-gradient on-policy distillation, per sequence: a baseline that GVPO++ (arXiv 2609.21432) names in Table VI.

    R_i = sg[ log pi_t(y_i|x) - log pi_old(y_i|x) ]
    L   = - mean over rows of  A_i * log pi(y_i|x),   A_i = R_i - mean of R_j over j != i

REINFORCE on minus the sampled KL(pi || pi_t). The paper does not say how the reward is normalised, so the baseline is an
option. With the leave-one-out one and one update a rollout it is GVPO-OPD with f = 1. The teacher may have any tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import center, leave_one_out, masked_sum, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class PGOPDSequence(Algorithm):
    """REINFORCE with the log-ratio to the teacher as the reward of a completion.

    Attributes:
        baseline: `rloo` subtracts the mean of the other rows of the group, `mean` that of all; `grpo_std` divides by the
            group's standard deviation too; `none` leaves the reward as it is.
    """

    baseline: Literal["rloo", "mean", "grpo_std", "none"] = "rloo"

    frozen = (
        Score("teacher", Stream("teacher"), level="sequence", early=True),
        Score("old", Stream("old"), level="sequence", early=True),
    )

    @property
    def min_group(self) -> int:
        """Two rows, where they are compared."""
        return 1 if self.baseline == "none" else 2

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """Log-ratio of the teacher to the policy that sampled, in nats a completion."""
        return batch["teacher"] - batch["old"]

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards less their baseline."""
        rewards, group = batch.rewards, batch.group
        if self.baseline == "none":
            return {"advantage": rewards}
        if self.baseline == "grpo_std":
            return {"advantage": standardise(rewards, group, eps=1e-6)}
        return {"advantage": (leave_one_out if self.baseline == "rloo" else center)(rewards, group)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the advantage times the sequence's log-prob."""
        return -(batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum() / batch.total("rows")
