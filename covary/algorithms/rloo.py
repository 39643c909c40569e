"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740, eq. 10).

    R'_i = R_i - kl_coef * sum_t [log pi_old - log pi_initial](y_it)        (k1 in the reward, detached)
    A_i  = R'_i - mean of R'_j over j != i
    L    = - mean over rows of  A_i * log pi(y_i|x)

The paper's REINFORCE form, without importance ratio: with several updates a rollout the later ones are
off-policy and uncorrected. TRL has a clipped sequence ratio in its place, verl a clipped token ratio.
`kl_coef` is TRL's 0.05.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import leave_one_out, log_ratio, masked_sum
from covary.types import Score, Stream


@dataclass(frozen=True)
class RLOO(Algorithm):
    """REINFORCE with a leave-one-out baseline.

    Attributes:
        kl_coef: weight of the KL to the initial policy inside the reward, in reward per nat; 0 loads none.
    """

    kl_coef: float = 0.05

    min_group = 2

    def __post_init__(self) -> None:
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef takes a number from 0 on, got {self.kl_coef}")

    @property
    def frozen(self) -> tuple[Score, ...]:
        """The old and the initial policy where the KL counts; `prepare` reads both."""
        names = ("old", "initial") if self.kl_coef > 0 else ()
        return tuple(Score(name, Stream(name), early=True) for name in names)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Each row's reward less its KL, minus the mean of the others'."""
        rewards = batch.rewards
        if self.kl_coef > 0:
            kl = log_ratio(batch["old"], batch["initial"], batch.mask).sum(-1)
            rewards = rewards - self.kl_coef * kl
        return {"advantage": leave_one_out(rewards, batch.group)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the advantage times the sequence's log-prob."""
        return -(batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum() / batch.total("rows")
