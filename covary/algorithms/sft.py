"""SFT: supervised fine-tuning on given completions, the baseline of every table.

    L = - 1 / tokens * sum_i sum_t log pi(y_t | x, y_<t)

Token mean over the optimizer batch, the end token included.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores
from covary.ops import masked_sum


@dataclass(frozen=True)
class SFT(Algorithm):
    """Maximum likelihood of the data's completions."""

    any_sampler = True
    offline = True
    needs_reward = False

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood per token, in nats."""
        return -masked_sum(scores["policy"], batch.mask).sum() / batch.total("tokens")
