"""GVPO: group variance policy optimization (arXiv 2504.19599; GVPO++ arXiv 2609.21432, section IV).

With Delta_i = log pi(y_i|x) - log pi'(y_i|x), summed over tokens, and a_i = beta * Delta_i - R_i:

    L = mean over prompts of  1 / (2 (k - 1)) * sum_i (a_i - mean_j a_j)^2

a regression of centred implicit rewards on centred rewards. The weights of a group sum to zero, so the
partition function cancels; the one optimum is pi' exp(R / beta) / Z under any sampler whose support
covers pi' and pi. No importance ratio, no clipping, no division by a standard deviation or a length.

Official code: jszkc/GVPO, GVPO/gvpo_core_algos.py. It sums the rows of a micro-batch and averages
micro-batches, which scales the loss by rows-per-micro-batch / k; here the loss is the mean over prompts
whatever the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores
from covary.ops import group_variance, masked_sum
from covary.types import Score, Stream


@dataclass(frozen=True)
class GVPO(Algorithm):
    """Group variance policy optimization.

    Attributes:
        beta: KL coefficient, in reward per nat (the paper's 0.1).
    """

    beta: float = 0.1

    min_group = 2
    coupled = True
    any_sampler = True
    frozen = (Score("reference", Stream("reference")),)

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta takes a number above 0, got {self.beta}")

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Half the mean group variance of beta * Delta - R (GVPO++ eq. of section IV-B)."""
        delta = masked_sum(scores["policy"] - batch["reference"], batch.mask)
        return group_variance(self.beta * delta - batch.rewards, batch.group).sum() / (2 * batch.total("groups"))

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """The largest |beta * Delta|: how far implicit rewards have moved, in units of reward."""
        delta = masked_sum(scores["policy"] - batch["reference"], batch.mask)
        return {"gvpo/max_implicit_reward": float((self.beta * delta).abs().max())}
