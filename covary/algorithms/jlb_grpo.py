"""JLB's reward inside a GRPO update: the form in which CoVRL (arXiv 2512.12576, section 3.1) compares it.

    r_i = LSE_j s_j - LSE_{j != i} s_j,   s_j = log p(y|z_j,x):  what trace i adds to the bound, up to a constant
    A_i = (r_i - mean) / (std + eps)
    L   = - mean over rows of  1 / |z_i| * sum_t min(ratio A, clip(ratio) A)

No gradient through the answer; the method itself is `jlb`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import added_to_bound, check_clip, fill_with_least, log_ratio, row_surrogate, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class JLBGRPO(Algorithm):
    """GRPO on what a trace adds to the multi-sample bound.

    Attributes:
        clip: half-width of the ratio's clip range.
    """

    clip: float = 0.3

    min_group = 2
    template = "think"
    frozen = (
        Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True),
        Score("old", Stream("old")),
    )

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's log-likelihood behind the trace."""
        answered = batch.answer_mask.any(-1)
        return fill_with_least(torch.where(answered, batch["old_answer"], torch.nan), batch.group)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """What each trace adds to the bound, standardised within its group."""
        return {"advantage": standardise(added_to_bound(batch.rewards, batch.group), batch.group, eps=1e-6)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """GRPO's clipped surrogate."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        return -row_surrogate(to_old, batch["advantage"], batch.mask, self.clip, self.clip).sum() / batch.total("rows")
