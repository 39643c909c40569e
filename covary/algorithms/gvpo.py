"""GVPO: group variance policy optimization (arXiv 2504.19599; GVPO++ arXiv 2609.21432, section IV).

With Delta_i = log pi(y_i|x) - log pi'(y_i|x), summed over tokens, and a_i = beta * Delta_i - R_i:

    L = mean over prompts of  1 / (2 (k - 1)) * sum_i (a_i - mean_j a_j)^2

a regression of centred implicit rewards on centred rewards. The weights of a group sum to zero, so the
partition function cancels; the one optimum is pi' exp(R / beta) / Z under any sampler whose support
covers pi' and pi. No importance ratio, no clipping, no division by a standard deviation or a length.

Up to a constant, with l = log pi(y|x) and moments within the group (section IV-E, signs restored):

    L = mean over prompts of  - beta Cov(R, l)  - beta^2 Cov(l, l')  + beta^2 / 2 Var(l)

`terms` drops the second or the third (Table II); `entropy_coef` puts an entropy bonus in the third's place.

Official code: jszkc/GVPO, GVPO/gvpo_core_algos.py. It sums the rows of a micro-batch and averages
micro-batches, which scales the loss by rows-per-micro-batch / k; here the loss is the mean over prompts
whatever the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores
from covary.ops import group_covariance, group_variance, log_ratio, masked_sum
from covary.types import Score, Stream

Term = Literal["covariance", "variance"]


@dataclass(frozen=True)
class GVPO(Algorithm):
    """Group variance policy optimization.

    Attributes:
        beta: KL coefficient, in reward per nat (the paper's 0.1).
        terms: the regularisers beside the advantage; both are GVPO, fewer are the ablations of Table II.
        entropy_coef: weight of a token-entropy bonus in place of `variance`; an ablation too.
    """

    beta: float = 0.1
    terms: tuple[Term, ...] = ("covariance", "variance")
    entropy_coef: float = 0.0

    min_group = 2
    coupled = True
    any_sampler = True
    frozen = (Score("reference", Stream("reference")),)

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta takes a number above 0, got {self.beta}")
        if len(set(self.terms)) < len(self.terms):
            raise ValueError(f"terms takes each name at most once, got {', '.join(self.terms)}")
        if not self.entropy_coef >= 0:
            raise ValueError(f"entropy_coef takes a number from 0 on, got {self.entropy_coef}")
        if self.entropy_coef > 0 and "variance" in self.terms:
            raise ValueError("entropy_coef stands in place of the term variance: take it out of terms")

    @property
    def trained(self) -> tuple[Score, ...]:
        """The policy's log-probs, and its entropy where that has a weight."""
        policy = Score("policy")
        return (policy, Score("entropy", quantity="entropy")) if self.entropy_coef > 0 else (policy,)

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Half the mean group variance of beta * Delta - R; term by term in the ablations."""
        if set(self.terms) == {"covariance", "variance"}:
            delta = log_ratio(scores["policy"], batch["reference"], batch.mask).sum(-1)
            return group_variance(self.beta * delta - batch.rewards, batch.group).sum() / (2 * batch.total("groups"))
        named = self._terms(scores, batch)
        loss = sum((named[term] for term in self.terms), start=named["advantage"]).sum() / batch.total("groups")
        if self.entropy_coef > 0:
            entropy = masked_sum(scores["entropy"], batch.mask).sum() / batch.total("tokens")
            loss = loss - self.entropy_coef * entropy
        return loss

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """The three terms of the loss, averaged over groups, and the largest |beta * Delta|, in units of reward."""
        delta = log_ratio(scores["policy"], batch["reference"], batch.mask).sum(-1)
        named = {f"gvpo/{name}": float(value.mean()) for name, value in self._terms(scores, batch).items()}
        return {**named, "gvpo/max_implicit_reward": float((self.beta * delta).abs().max())}

    def _terms(self, scores: Scores, batch: Batch) -> dict[str, Float[Tensor, " G"]]:
        """The loss of each group, term by term; they add up to it up to what does not depend on the policy."""
        live = masked_sum(scores["policy"], batch.mask)
        reference = masked_sum(batch["reference"], batch.mask)
        return {
            "advantage": -self.beta * group_covariance(batch.rewards, live, batch.group),
            "covariance": -(self.beta**2) * group_covariance(reference, live, batch.group),
            "variance": self.beta**2 / 2 * group_variance(live, batch.group),
        }
