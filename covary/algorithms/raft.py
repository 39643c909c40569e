"""RAFT: reward-ranked fine-tuning (arXiv 2304.06767), also known as rejection sampling.

    L = - mean over the kept rows' tokens of  log pi(y_it)

Kept are the best completion of each prompt, or every completion with a reward of at least 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import first_best, masked_sum


@dataclass(frozen=True)
class RAFT(Algorithm):
    """Reward-ranked fine-tuning.

    Attributes:
        keep: the `best` completion of each prompt (of several, the first), or all `correct` ones.
    """

    keep: Literal["best", "correct"] = "best"

    normalisers = ("kept_tokens",)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """1 for kept rows; their tokens are what the loss divides by."""
        kept = first_best(batch.rewards, batch.group) if self.keep == "best" else batch.rewards >= 1
        return {"kept": kept.float(), "kept_tokens": torch.where(kept, batch.mask.sum(-1), 0)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood of the kept rows' tokens; 0 where none is kept."""
        nll = -(batch["kept"] * masked_sum(scores["policy"], batch.mask)).sum()
        return nll / max(1.0, batch.total("kept_tokens"))
