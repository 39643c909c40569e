"""RAVR: reference-answer-guided variational reasoning (arXiv 2510.25206).

Traces come from the posterior q(z|x,y), which sees the answer. As many come from the prior p(z|x); they give a baseline and
are not learned from. With m_i = 1/|y| log p(y|z_i,x), the utility of a trace is what it adds to the prior's mean:

    r_i = max(0, m_i - mean over prior traces of m),   A_i = (r_i - mean) / (std + eps)
    L   = - mean over rows of  1/|z_i| sum_t min(ratio A, clip(ratio) A)                ratio = q / q_old
          + kl_coef * r_i * 1/|z_i| sum_t (q/q_old) (u - 1 - log u)                     u = p / q: KL(q || p)
          - nll_coef * r_i * m_i (live)

The KL moves p and q: it is what carries the posterior's traces to the prior. Written from the paper's abstract and descriptions of
the method, not from its code: how the terms are normalised and weighed against each other is ours. The answer follows in
answer tags (template `think`); the paper's cue is "The answer is".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import (
    above_baseline,
    check_clip,
    clipped,
    importance_k3,
    log_ratio,
    masked_mean,
    row_surrogate,
    share,
    standardise,
)
from covary.types import Example, Request, Score, Stream


@dataclass(frozen=True)
class RAVR(Algorithm):
    """Traces of the posterior, rewarded by what they add to those of the prior.

    Attributes:
        clip: half-width of the ratio's clip range.
        kl_coef: weight of the KL from the posterior to the prior.
        nll_coef: weight of the answer term.
    """

    clip: float = 0.2
    kl_coef: float = 1.0
    nll_coef: float = 1.0

    min_group = 2
    template = "think"
    frozen = (
        Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True),
        Score("old", Stream("old", "posterior")),
    )
    trained = (
        Score("policy", Stream("policy", "posterior")),
        Score("prior"),
        Score("answer", tokens="answer", level="sequence"),
    )

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)
        for name in ("kl_coef", "nll_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} takes a number from 0 on, got {getattr(self, name)}")

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
        """Mean over rows of the three terms."""
        mask, length = batch.mask, batch.answer_mask.sum(-1)
        to_old = log_ratio(scores["policy"], batch["old"], mask)
        surrogate = row_surrogate(to_old, batch["advantage"], mask, self.clip, self.clip)
        answer = torch.where(length > 0, scores["answer"] / length.clamp(min=1), 0.0)
        guided = self.kl_coef * masked_mean(self._kl(scores, batch), mask) - self.nll_coef * answer
        return (batch.rewards * guided - surrogate).sum() / batch.total("rows")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds, share of traces that add anything, and the KL from posterior to prior."""
        held = clipped(
            log_ratio(scores["policy"], batch["old"], batch.mask),
            batch["advantage"].unsqueeze(-1),
            self.clip,
            self.clip,
        )
        return {
            "ravr/clip_fraction": share(held, batch.mask),
            "ravr/useful": float((batch.rewards > 0).double().mean()),
            "ravr/kl": float(self._kl(scores, batch)[batch.mask].mean()),
        }

    def _kl(self, scores: Scores, batch: Batch) -> Float[Tensor, "B T"]:
        posterior, prior, old = (
            torch.where(batch.mask, x, 0.0) for x in (scores["policy"], scores["prior"], batch["old"])
        )
        return importance_k3(posterior, prior, old)
