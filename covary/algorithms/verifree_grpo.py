"""VeriFree's reward inside a GRPO update: the form in which CoVRL (arXiv 2512.12576, section 3.1) compares it.

    r_i = p(y|z_i,x), 0 for a trace that never gets to its answer,   A_i = (r_i - mean) / (std + eps)
    L   = - mean over rows of  1 / |z_i| * sum_t min(ratio A, clip(ratio) A)

No gradient through the answer; the method itself is `verifree`, whose template and split point this has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import check_clip, log_ratio, row_surrogate, standardise
from covary.types import Score, Stream


@dataclass(frozen=True)
class VeriFreeGRPO(Algorithm):
    """GRPO on the answer's probability.

    Attributes:
        clip: half-width of the ratio's clip range.
    """

    clip: float = 0.3

    min_group = 2
    template = "verifree"
    frozen = (
        Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True),
        Score("old", Stream("old")),
    )

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's probability behind the trace."""
        return torch.where(batch.answer_mask.any(-1), batch["old_answer"].exp(), 0.0)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards standardised within their group."""
        return {"advantage": standardise(batch.rewards, batch.group, eps=1e-6)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """GRPO's clipped surrogate."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        return -row_surrogate(to_old, batch["advantage"], batch.mask, self.clip, self.clip).sum() / batch.total("rows")
