"""Supervised KD: word-level knowledge distillation (Hinton et al., arXiv 1503.02531; as a baseline in GKD's paper).

    L = tau^2 / tokens * sum_i sum_t KL( pi_t(. | x, y_<t) || pi(. | x, y_<t) ),   both at temperature tau

on fixed completions y: the data's, or the teacher's own. tau^2 keeps gradients of one size over temperatures. Whole
distributions are compared, so teacher and student need one tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores
from covary.ops import masked_sum
from covary.types import Example, Request, Score, Stream


@dataclass(frozen=True)
class SupervisedKD(Algorithm):
    """Forward KL to the teacher on fixed completions.

    Attributes:
        data: whose completions: those of the `dataset`, or the `teacher`'s.
        temperature: of both distributions.
    """

    data: Literal["dataset", "teacher"] = "dataset"
    temperature: float = 1.0

    needs_reward = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature takes a number above 0, got {self.temperature}")

    @property
    def offline(self) -> bool:
        """Nothing is sampled where the data have the completions."""
        return self.data == "dataset"

    @property
    def sources(self) -> tuple[str, ...]:
        """The one of the completions."""
        return (self.data,)

    @property
    def trained(self) -> tuple[Score, ...]:
        """KL(teacher || student) per token."""
        quantity = "kl" if self.temperature == 1 else ("tempered_kl", self.temperature)
        return (Score("kl", (Stream("teacher"), Stream("policy")), quantity),)

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """K completions of the chosen source."""
        return [[Request(k, source=self.data)] for _ in prompts]

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean divergence per token, in nats, times tau^2."""
        return self.temperature**2 * masked_sum(scores["kl"], batch.mask).sum() / batch.total("tokens")
