"""MiniLLM: minimal reverse KL by policy gradient (arXiv 2306.08543).

The gradient of KL(pi || pi_t) over sequences, with r_t = log pi_t(y_t) - log pi(y_t) and the single-step part exact:

    - E sum_t R_{t+1} grad log pi(y_t)  +  E sum_t grad KL( pi(. | y_<t) || pi_t(. | y_<t) ),   R_{t+1} = sum_{i>t} r_i

    L = 1 / tokens * sum_i sum_t [ KL(pi || pi_t) - min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) ]

A is R_{t+1} divided by the number of tokens it sums (length normalisation), whitened. Samples come from the token-wise
mixture p = a pi_t + (1 - a) pi_old (teacher-mixed sampling), and rho = pi / p. Official code: microsoft/LMOps, minillm/.
It (and TRL) sums from r_t on and so counts the immediate term twice; it also divides rewards by 0.5, which whitening
makes moot, and adds a pre-training loss, which is left out. Teacher and student need one tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import check_clip, clipped, clipped_surrogate, log_ratio, masked_sum, return_after, share, whiten
from covary.types import Example, Request, Score, Stream


@dataclass(frozen=True)
class MiniLLM(Algorithm):
    """Reverse KL to the teacher: long-term part by policy gradient, single-step part exactly.

    Attributes:
        teacher_mix: the teacher's share in each sampled token's distribution (the paper's alpha); 0 samples the policy.
        length_norm: divide what follows a token by its number of tokens. False: the sum, as in the exact gradient.
        gamma: discount of what follows a token, per token (the paper has none).
        clip: half-width of the ratio's clip range.
        whitening: give the long-term part mean 0 and standard deviation 1 over the rollout, as the official code does.
    """

    teacher_mix: float = 0.2
    length_norm: bool = True
    gamma: float = 1.0
    clip: float = 0.2
    whitening: bool = True

    needs_reward = False
    frozen = (Score("teacher", Stream("teacher"), early=True), Score("old", Stream("old"), early=True))
    trained = (Score("policy"), Score("kl", (Stream("policy"), Stream("teacher")), "kl"))

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)
        if not 0 <= self.teacher_mix < 1:
            raise ValueError(f"teacher_mix takes a number from 0 and below 1, got {self.teacher_mix}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma takes a number from 0 to 1, got {self.gamma}")

    @property
    def sources(self) -> tuple[str, ...]:
        """The mixture, or the policy where the teacher has no share."""
        return ("mixed",) if self.teacher_mix > 0 else ("policy",)

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """K completions of the mixture."""
        if self.teacher_mix == 0:
            return super().plan(prompts, k, rng)
        return [[Request(k, source="mixed", teacher_share=self.teacher_mix)] for _ in prompts]

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """What follows each token, and the log-probs of the distribution that was sampled from."""
        teacher, old = batch["teacher"], batch["old"]
        advantage = return_after(log_ratio(teacher, old, batch.mask), batch.mask, self.gamma)
        if self.length_norm:
            advantage = advantage / return_after(torch.ones_like(advantage), batch.mask, self.gamma).clamp(min=1)
        if self.whitening:
            advantage = whiten(advantage, batch.mask, reduce)
        mixture = old
        if self.teacher_mix > 0:
            mixture = torch.logaddexp(math.log(self.teacher_mix) + teacher, math.log1p(-self.teacher_mix) + old)
        return {"advantage": advantage, "sampler": torch.where(batch.mask, mixture, 0.0)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over tokens of the single-step divergence less the clipped surrogate."""
        to_sampler = log_ratio(scores["policy"], batch["sampler"], batch.mask)
        surrogate = clipped_surrogate(to_sampler, batch["advantage"], self.clip, self.clip)
        return masked_sum(scores["kl"] - surrogate, batch.mask).sum() / batch.total("tokens")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """The single-step divergence in nats per token, and the share of tokens that the clip holds."""
        to_sampler = log_ratio(scores["policy"], batch["sampler"], batch.mask)
        held = clipped(to_sampler, batch["advantage"], self.clip, self.clip)
        return {
            "minillm/kl": float(masked_sum(scores["kl"], batch.mask).sum() / batch.mask.sum()),
            "minillm/clip_fraction": share(held, batch.mask),
        }
