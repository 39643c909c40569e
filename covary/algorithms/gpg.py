"""GPG: group policy gradient (arXiv 2504.02546, eq. 6 and 9).

    A_i = alpha * (R_i - mean),   alpha = rows / rows of groups whose rewards differ
    L   = - mean over tokens of  A_i * log pi(y_it)

No ratio, no standard deviation. alpha makes up for groups of equal rewards, which have no gradient; it is one
number of the rollout. (verl's alpha counts non-zero scores instead of groups that differ; the paper is followed.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import all_equal, center, masked_sum


@dataclass(frozen=True)
class GPG(Algorithm):
    """Group policy gradient."""

    min_group = 2

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Centred rewards, scaled up for the share of rows that have no gradient."""
        differs = ~all_equal(batch.rewards, batch.group)[batch.group]
        counts = reduce(torch.stack([torch.ones_like(differs).sum(), differs.sum()]).double())
        alpha = float(counts[0] / counts[1].clamp(min=1))
        return {"advantage": alpha * center(batch.rewards, batch.group)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over tokens of the advantage times the log-prob."""
        return -(batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum() / batch.total("tokens")
