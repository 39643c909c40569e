"""ReMax: REINFORCE with the greedy completion's reward as baseline (arXiv 2310.10505, eq. 4).

    A_i = R(y_i) - R(greedy(x))
    L   = - mean over rows of  A_i * log pi(y_i|x)

k counts the greedy row: k - 1 are sampled, one is greedy and never learned from. A group whose greedy row
has no reward leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import group_sum, masked_sum
from covary.types import Example, Request


@dataclass(frozen=True)
class ReMax(Algorithm):
    """REINFORCE with a greedy baseline."""

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """One greedy completion, which only gives the baseline, and k - 1 samples."""
        return [[Request(k - 1), Request(1, decoding="greedy", learn=False)] for _ in prompts]

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Reward minus the greedy row's; NaN, so that the row leaves, where the group has no scored greedy row."""
        baseline = group_sum(torch.where(batch.learn, 0.0, batch.rewards), batch.group)
        found = group_sum((~batch.learn).to(baseline.dtype), batch.group) > 0
        return {"advantage": batch.rewards - torch.where(found, baseline, torch.nan)[batch.group]}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the advantage times the sequence's log-prob."""
        return -(batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum() / batch.total("rows")
