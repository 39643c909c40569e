"""Dr. GRPO: GRPO done right (arXiv 2503.20783): no division by the standard deviation or by the length.

    A_i = R_i - mean
    L = - 1 / (rows * max_tokens) * sum_i sum_t min(r A, clip(r, 1 - eps, 1 + eps) A)

The constant length is the rollout's token limit and rows are counted, as in TRL and in verl from 0.7.1 on;
earlier, verl's "seq-mean-token-sum-norm" left the number of rows out. No KL term (the paper's setting).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import center, check_clip, clipped, clipped_surrogate, log_ratio, masked_sum, share
from covary.types import Score, Stream


@dataclass(frozen=True)
class DrGRPO(Algorithm):
    """GRPO without standard-deviation and length normalisation.

    Attributes:
        clip: half-width of the ratio's clip range.
    """

    clip: float = 0.2

    min_group = 2
    frozen = (Score("old", Stream("old")),)

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards centred within their group."""
        return {"advantage": center(batch.rewards, batch.group)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Sum over tokens, divided by rows times the constant length."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        per_token = -clipped_surrogate(to_old, batch["advantage"].unsqueeze(-1), self.clip, self.clip)
        return masked_sum(per_token, batch.mask).sum() / (batch.total("rows") * batch.max_tokens)

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        held = clipped(to_old, batch["advantage"].unsqueeze(-1), self.clip, self.clip)
        return {"dr_grpo/clip_fraction": share(held, batch.mask)}
