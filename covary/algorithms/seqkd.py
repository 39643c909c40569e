"""SeqKD: sequence-level knowledge distillation (arXiv 1606.07947).

    L = - 1 / tokens * sum_i sum_t log pi(y_t | x, y_<t),   y ~ teacher

SFT on the teacher's own completions, k of each prompt. The paper takes the teacher's most likely completion (beam
search); samples are the usual choice for language models. The teacher may have any tokenizer: it teaches with text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores
from covary.ops import masked_sum
from covary.types import Example, Request


@dataclass(frozen=True)
class SeqKD(Algorithm):
    """Maximum likelihood of the teacher's completions."""

    needs_reward = False
    sources = ("teacher",)

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """K completions of the teacher."""
        return [[Request(k, source="teacher")] for _ in prompts]

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean negative log-likelihood per token, in nats."""
        return -masked_sum(scores["policy"], batch.mask).sum() / batch.total("tokens")
