"""CoVRL with a Jensen-Shannon term (arXiv 2512.12576, appendix A.3).

Traces come from the prior p with probability a and from the posterior q otherwise, and both are held to the composite
p' = a p + (1 - a) q, which is then also the law of a token at a given prefix:

    J = E[ log p(y|z,x) ] - JSD_a,    JSD_a = a KL(p || p') + (1 - a) KL(q || p')  per token

    L = - 1/N_z sum_t min(r A, clip(r) A)                          r = p' / p'_old
        - nll_coef * 1/N_y sum over selected traces of log p(y|z,x)
        + jsd_coef * 1/N_jsd sum_t (s / s_old) (u - 1 - log u)     u = p' / s, s the trace's own source

The paper derives the idea and leaves the estimator open: this one is unbiased for the JSD at each prefix, and with the
ratio s / s_old so is its gradient. Selected are, as in CoVRL, traces of the prior that have the form and a positive
advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import (
    Likelihood,
    center,
    check_clip,
    clipped,
    clipped_surrogate,
    fill_with_least,
    importance_k3,
    likelihood,
    log_mixture,
    masked_sum,
    share,
)
from covary.types import Completion, Example, Request, Score, Stream


@dataclass(frozen=True)
class CoVRLJSD(Algorithm):
    """CoVRL, symmetric in prior and posterior.

    Attributes:
        composite_weight: a, the prior's weight in the composite and the probability that a trace comes from it.
        likelihood: reward of a trace, see `covary.ops.likelihood`.
        clip: half-width of the ratio's clip range.
        nll_coef: weight of the answer term.
        jsd_coef: weight of the JSD.
    """

    composite_weight: float = 0.5
    likelihood: Likelihood = "sum"
    clip: float = 0.3
    nll_coef: float = 1.0
    jsd_coef: float = 1.0

    template = "think"
    normalisers = ("nll_tokens", "jsd_tokens")
    frozen = (
        Score("old_answer", Stream("old"), tokens="answer", early=True),
        Score("old", Stream("old")),
        Score("old_posterior", Stream("old", "posterior")),
    )
    trained = (
        Score("policy"),
        Score("posterior", Stream("policy", "posterior")),
        Score("answer", tokens="answer", level="sequence"),
    )

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)
        if not 0 < self.composite_weight < 1:
            raise ValueError(f"composite_weight takes a number between 0 and 1, got {self.composite_weight}")
        for name in ("nll_coef", "jsd_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} takes a number from 0 on, got {getattr(self, name)}")

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """K traces per question, each from the prior with probability a."""
        sources = [{"prompt": (n := int(rng.binomial(k, self.composite_weight))), "posterior": k - n} for _ in prompts]
        return [[Request(n, context=name) for name, n in counts.items() if n] for counts in sources]

    def features(self, example: Example, completion: Completion) -> dict[str, float]:
        """Which prompt produced the trace, and whether it has the form."""
        return {"from_prior": float(completion.context == "prompt"), "valid": float(completion.valid_trace)}

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's likelihood behind the trace; the least of its group for a trace that was never closed."""
        return fill_with_least(likelihood(batch["old_answer"], batch.answer_mask, self.likelihood), batch.group)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Centred rewards, traces whose answer is learned, and the tokens that the terms divide by."""
        advantage = center(batch.rewards, batch.group)
        selected = (batch["from_prior"] > 0) & (batch["valid"] > 0) & (advantage > 0)
        return {
            "advantage": advantage,
            "selected": selected.to(advantage.dtype),
            "nll_tokens": torch.where(selected, batch.answer_mask.sum(-1), 0),
            "jsd_tokens": torch.where(batch.truncated, 0, batch.mask.sum(-1)),
        }

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Policy gradient, answer and JSD, each a mean over its own tokens."""
        surrogate = clipped_surrogate(
            self._log_ratio(scores, batch), batch["advantage"].unsqueeze(-1), self.clip, self.clip
        )
        nll = -(batch["selected"] * scores["answer"]).sum()
        jsd = masked_sum(self._jsd(scores, batch), self._in_jsd(batch)).sum()
        return (
            -masked_sum(surrogate, batch.mask).sum() / batch.total("tokens")
            + self.nll_coef * nll / max(1.0, batch.total("nll_tokens"))
            + self.jsd_coef * jsd / max(1.0, batch.total("jsd_tokens"))
        )

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Raw rewards by source, and what holds the two together."""
        held = clipped(self._log_ratio(scores, batch), batch["advantage"].unsqueeze(-1), self.clip, self.clip)
        found = {"covrl_jsd/clip_fraction": share(held, batch.mask)}
        in_jsd = self._in_jsd(batch)
        if in_jsd.any():
            found["covrl_jsd/jsd"] = float(self._jsd(scores, batch)[in_jsd].mean())
        for name, rows in (("prior", batch["from_prior"] > 0), ("posterior", batch["from_prior"] == 0)):
            if rows.any():
                found[f"covrl_jsd/{name}/reward"] = float(batch.rewards[rows].mean())
                found[f"covrl_jsd/{name}/valid"] = float(batch["valid"][rows].mean())
        return found

    def _composite(self, prior: Tensor, posterior: Tensor, mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        return log_mixture(torch.where(mask, prior, 0.0), torch.where(mask, posterior, 0.0), self.composite_weight)

    def _log_ratio(self, scores: Scores, batch: Batch) -> Float[Tensor, "B T"]:
        live = self._composite(scores["policy"], scores["posterior"], batch.mask)
        return live - self._composite(batch["old"], batch["old_posterior"], batch.mask)

    def _jsd(self, scores: Scores, batch: Batch) -> Float[Tensor, "B T"]:
        """KL(s || p') of each row's own source s."""
        prior = (batch["from_prior"] > 0).unsqueeze(-1)
        source = torch.where(prior, scores["policy"], scores["posterior"])
        old = torch.where(prior, batch["old"], batch["old_posterior"])
        source, old = (torch.where(batch.mask, x, 0.0) for x in (source, old))
        return importance_k3(source, self._composite(scores["policy"], scores["posterior"], batch.mask), old)

    def _in_jsd(self, batch: Batch) -> Bool[Tensor, "B T"]:
        return batch.mask & ~batch.truncated.unsqueeze(-1)
