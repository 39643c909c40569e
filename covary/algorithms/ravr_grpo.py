"""RAVR's reward inside a GRPO update: the form in which CoVRL (arXiv 2512.12576, section 3.1) compares it.

    r_i = max(0, m_i - mean over prior traces of m),   m_i = 1/|y| log p(y|z_i,x),   A_i = (r_i - mean) / (std + eps)
    L   = - mean over rows of  1 / |z_i| * sum_t min(ratio A, clip(ratio) A),        ratio = q / q_old

Traces come from the posterior q, which alone is trained: what the prior gains, it gains through shared weights. No KL and
no gradient through the answer; the method itself is `ravr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import above_baseline, check_clip, log_ratio, row_surrogate, standardise
from covary.types import Example, Request, Score, Stream


@dataclass(frozen=True)
class RAVRGRPO(Algorithm):
    """GRPO on what a trace of the posterior adds to those of the prior.

    Attributes:
        clip: half-width of the ratio's clip range.
    """

    clip: float = 0.3

    min_group = 2
    template = "think"
    frozen = (
        Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True),
        Score("old", Stream("old", "posterior")),
    )
    trained = (Score("policy", Stream("policy", "posterior")),)

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """Half of the k traces from the posterior, half from the prior as a baseline."""
        return [[Request(k - k // 2, context="posterior"), Request(k // 2, learn=False)] for _ in prompts]

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The utility; 0 for a trace that was never closed, unscorable where the prior closed none."""
        length = batch.answer_mask.sum(-1)
        mean = torch.where(length > 0, batch["old_answer"] / length.clamp(min=1), torch.nan)
        return above_baseline(mean, ~batch.learn, batch.group)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """The posterior's utilities, standardised within their group."""
        advantage = torch.zeros_like(batch.rewards)
        advantage[batch.learn] = standardise(batch.rewards[batch.learn], batch.group[batch.learn], eps=1e-6)
        return {"advantage": advantage}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """GRPO's clipped surrogate under the posterior's prompt."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        return -row_surrogate(to_old, batch["advantage"], batch.mask, self.clip, self.clip).sum() / batch.total("rows")
