"""GKD: generalised knowledge distillation (arXiv 2306.13649, algorithm 1).

    L = 1 / tokens * sum_i sum_t JSD_beta( pi_t(. | x, y_<t), pi(. | x, y_<t) )

    JSD_beta = beta KL(pi_t || m) + (1 - beta) KL(pi || m),   m = beta pi_t + (1 - beta) pi
    beta = 0: KL(pi_t || pi)        beta = 1: KL(pi || pi_t)

With probability `on_policy` (the paper's lambda) a batch is sampled from the student, else it comes from fixed
completions. No gradient goes through sampling. JSD_beta vanishes as beta nears 0 or 1 while both ends are whole KLs, so
the loss jumps there (in TRL's GKD too): a beta of 0.999 scales the loss by about a thousandth, and so the learning.
Whole distributions are compared, so teacher and student need one tokenizer.
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
class GKD(Algorithm):
    """Generalised Jensen-Shannon divergence to the teacher, on the student's samples and on others.

    Attributes:
        on_policy: probability that a rollout is the student's own (the paper's lambda), one coin a rollout.
        beta: of the divergence, in [0, 1]: 0 is the forward KL(teacher || student), 1 the reverse one.
        off_policy: whose completions the others are: those of the `dataset`, or the `teacher`'s.
    """

    on_policy: float = 0.5
    beta: float = 0.5
    off_policy: Literal["dataset", "teacher"] = "dataset"

    any_sampler = True
    needs_reward = False

    def __post_init__(self) -> None:
        for name in ("on_policy", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} takes a number from 0 to 1, got {getattr(self, name)}")

    @property
    def sources(self) -> tuple[str, ...]:
        """Those that the coin can fall on."""
        policy = ("policy",) if self.on_policy > 0 else ()
        return (*policy, self.off_policy) if self.on_policy < 1 else policy

    @property
    def trained(self) -> tuple[Score, ...]:
        """The divergence per token."""
        return (Score("jsd", (Stream("teacher"), Stream("policy")), ("jsd", self.beta)),)

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """K completions of one source for all prompts."""
        source = "policy" if rng.random() < self.on_policy else self.off_policy
        return [[Request(k, source=source)] for _ in prompts]

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean divergence per token, in nats."""
        return masked_sum(scores["jsd"], batch.mask).sum() / batch.total("tokens")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of the student's own completions."""
        return {"gkd/on_policy": float(batch.source_is("policy").float().mean())}
