"""DPO: direct preference optimization (arXiv 2305.18290, eq. 7).

    L = - mean over pairs of  log sigmoid( beta * [(l_w - l'_w) - (l_l - l'_l)] ),   l' of the initial policy

A group's pair is its best and its worst completion by reward: chosen and rejected columns of a preference data
set come with rewards 1 and 0, and samples of the policy itself have their own. Groups of equal rewards have none.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import all_equal, first_best, group_sum, log_ratio
from covary.types import Score, Stream


@dataclass(frozen=True)
class DPO(Algorithm):
    """Direct preference optimization.

    Attributes:
        beta: KL coefficient of the implicit reward, per nat.
    """

    beta: float = 0.1

    min_group = 2
    coupled = True
    any_sampler = True
    normalisers = ("pairs",)
    frozen = (Score("initial", Stream("initial")),)

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta takes a number above 0, got {self.beta}")

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """+1 for the chosen row of a pair, -1 for the rejected one, else 0; `pairs` sums to the number of pairs."""
        paired = ~all_equal(batch.rewards, batch.group)[batch.group]
        chosen = (first_best(batch.rewards, batch.group) & paired).float()
        rejected = (first_best(-batch.rewards, batch.group) & paired).float()
        return {"side": chosen - rejected, "pairs": chosen}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over pairs of the logistic loss; 0 where there is no pair."""
        per_pair = -logsigmoid(self.beta * self._margin(scores, batch))
        return (per_pair * self._whole(batch)).sum() / max(1.0, batch.total("pairs"))

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of pairs in which the chosen completion has the larger implicit reward, and the mean margin."""
        margin = self.beta * self._margin(scores, batch)[self._whole(batch) > 0]
        if not len(margin):
            return {}
        return {"dpo/accuracy": float((margin > 0).float().mean()), "dpo/margin": float(margin.mean())}

    def _whole(self, batch: Batch) -> Float[Tensor, " G"]:
        """1 for groups that have both rows of their pair: one may have left for a log-prob that is not finite."""
        return (group_sum(batch["side"].abs(), batch.group) == 2).float()

    def _margin(self, scores: Scores, batch: Batch) -> Float[Tensor, " G"]:
        """Log-ratio of the chosen row minus that of the rejected one, in nats."""
        delta = log_ratio(scores["policy"], batch["initial"], batch.mask).sum(-1)
        return group_sum(batch["side"].to(delta.dtype) * delta, batch.group)
