"""CoVRL: coupled variational reinforcement learning (arXiv 2512.12576).

One model under two prompts: the prior p(z|x) sees the question, the posterior q(z|x,y) the reference answer y too; the
answer model p(y|z,x) continues a trace under the prior's prompt. For the composite p' = a p + (1 - a) q, per token,

    log p(y|x) >= E_p'[ log p(y|z,x) ] - KL(p' || p)                                (the ELBO, section 2.3)

A trace z comes from p with probability alpha, else from q. With A the centred log p(y|z,x), an old log-prob den, and
w = p' / den, u = p / p':

    L = - 1/N_z sum_t min(r A, clip(r) A)                 r = p' / den_old          (policy gradient, clip 0.3)
        - nll_coef * 1/N_y sum over selected traces of log p(y|z,x)
        + kl_coef  * 1/N_kl sum_t w (u - 1 - log u)                                 (A.2: >= 0, mean KL(p' || p))

The KL's estimator is one expression for both sources: w log w - (w - 1) for traces of p, w log(p'/p) + (1-a)/a (w - 1)
for those of q; the appendix prints the latter's coefficient for a = 1/2. Its numerators are live, its denominator is not:
only so is the expected gradient that of the KL.

No official code was at hand and the paper's displays are missing from the text that was; what it leaves open is a field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    ratio,
    share,
    standardise,
)
from covary.types import Completion, Example, Request, Score, Stream

Denominator = Literal["source", "hybrid", "hybrid_exact"]
KLDenominator = Literal["source", "hybrid", "hybrid_exact", "full"]
Selection = Literal["prior_valid_posadv", "posadv", "all", "is_weighted", "none"]
MAX_TRACE_WEIGHT = 2.0
"""Whole-trace importance weights of `nll_select: is_weighted` are cut here: products over tokens have no bound."""


def log_denominator(
    kind: Denominator,
    old_prior: Float[Tensor, "B T"],
    old_posterior: Float[Tensor, "B T"],
    from_prior: Bool[Tensor, " B"],
    prior_share: float,
) -> Float[Tensor, "B T"]:
    """Log-prob, per token, of the law that a trace is taken to come from. Masked tokens hold 0.

    Args:
        kind: `source`: the prompt that produced the trace (unbiased, unbounded ratios). `hybrid`: the mixture by
            `prior_share` of each token alone (bounded; exact for the first token only). `hybrid_exact`: the law of a
            token given its prefix, by the share's posterior odds (unbiased).
        old_prior: log p_old.
        old_posterior: log q_old.
        from_prior: which prompt produced the trace.
        prior_share: alpha.
    """
    if kind == "source":
        return torch.where(from_prior.unsqueeze(-1), old_prior, old_posterior)
    if kind == "hybrid":
        return log_mixture(old_prior, old_posterior, prior_share)
    upto_prior, upto_posterior = old_prior.cumsum(-1), old_posterior.cumsum(-1)
    upto = log_mixture(upto_prior, upto_posterior, prior_share)
    return upto - log_mixture(upto_prior - old_prior, upto_posterior - old_posterior, prior_share)


@dataclass(frozen=True)
class CoVRL(Algorithm):
    """Coupled variational reinforcement learning.

    Attributes:
        composite_weight: a, the prior's weight in the composite; between 0 and 1.
        prior_share: alpha, the probability that a trace comes from the prior.
        source_draw: drawn for every `rollout`, or once per `question` (the paper's words).
        likelihood: reward of a trace, see `covary.ops.likelihood`.
        per_source: advantages are centred among traces of one source.
        advantage_std: advantages are divided by the group's standard deviation.
        clip: half-width of the ratio's clip range.
        ratio: the ratio's denominator, see `log_denominator`.
        nll_select: traces behind which the answer is learned: valid ones of the prior with a positive advantage, all
            with one, all, all with their importance weight (the exact ELBO's, up to its cut), or none.
        nll_coef: weight of the answer term.
        kl_denominator: as `ratio`, or `full`: the exact KL over the vocabulary.
        kl_grad: who is moved by the KL: `both` prompts' distributions or one of them.
        kl_truncated: traces that met the token limit count in the KL.
        kl_coef: weight of the KL.
        preset: `paper_like`: each term is a mean over its own tokens; `elbo`: all three are divided by the traces' tokens.
    """

    composite_weight: float = 0.5
    prior_share: float = 0.5
    source_draw: Literal["rollout", "question"] = "rollout"
    likelihood: Likelihood = "sum"
    per_source: bool = False
    advantage_std: bool = False
    clip: float = 0.3
    ratio: Denominator = "hybrid"
    nll_select: Selection = "prior_valid_posadv"
    nll_coef: float = 1.0
    kl_denominator: KLDenominator = "source"
    kl_grad: Literal["both", "prior_only", "posterior_only"] = "both"
    kl_truncated: bool = False
    kl_coef: float = 1.0
    preset: Literal["paper_like", "elbo"] = "paper_like"

    template = "think"
    normalisers = ("nll_tokens", "kl_tokens")
    frozen = (
        Score("old_answer", Stream("old"), tokens="answer", early=True),
        Score("old", Stream("old")),
        Score("old_posterior", Stream("old", "posterior")),
    )

    def __post_init__(self) -> None:
        check_clip(self.clip, self.clip)
        if not 0 < self.composite_weight < 1:
            raise ValueError(f"composite_weight takes a number between 0 and 1, got {self.composite_weight}")
        if not 0 <= self.prior_share <= 1:
            raise ValueError(f"prior_share takes a number from 0 to 1, got {self.prior_share}")
        for name in ("nll_coef", "kl_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} takes a number from 0 on, got {getattr(self, name)}")
        if self.kl_denominator == "full" and self.kl_grad != "both":
            raise ValueError("kl_grad: with kl_denominator full the KL's gradient goes to both")

    @property
    def trained(self) -> tuple[Score, ...]:
        """A trace under both prompts, the answer behind it, and the exact KL where that is asked for."""
        scores = (
            Score("policy"),
            Score("posterior", Stream("policy", "posterior")),
            Score("answer", tokens="answer", level="sequence"),
        )
        if self.kl_denominator != "full":
            return scores
        return (*scores, Score("kl", (Stream(), Stream("policy", "posterior")), ("mixture_kl", self.composite_weight)))

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """K traces per question, each from the prior with probability alpha."""
        drawn = [
            rng.binomial(k, self.prior_share)
            if self.source_draw == "rollout"
            else k * rng.binomial(1, self.prior_share)
            for _ in prompts
        ]
        sources = [{"prompt": int(n), "posterior": k - int(n)} for n in drawn]
        return [[Request(n, context=name) for name, n in counts.items() if n] for counts in sources]

    def features(self, example: Example, completion: Completion) -> dict[str, float]:
        """Which prompt produced the trace, and whether it has the form: closed, nothing like a tag in it, not empty."""
        return {"from_prior": float(completion.context == "prompt"), "valid": float(completion.valid_trace)}

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's likelihood behind the trace; the least of its group for a trace that was never closed."""
        return fill_with_least(likelihood(batch["old_answer"], batch.answer_mask, self.likelihood), batch.group)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Advantages, traces whose answer is learned, and the tokens that the terms divide by."""
        group = batch.group
        if self.per_source:
            group = (2 * group + batch["from_prior"].long()).unique(return_inverse=True)[1]
        advantage = standardise(batch.rewards, group, 1e-6) if self.advantage_std else center(batch.rewards, group)
        answered = batch.answer_mask.any(-1)
        selected = {
            "prior_valid_posadv": (batch["from_prior"] > 0) & (batch["valid"] > 0) & (advantage > 0),
            "posadv": answered & (advantage > 0),
            "all": answered,
            "is_weighted": answered,
            "none": torch.zeros_like(answered),
        }[self.nll_select]
        in_kl = batch.mask if self.kl_truncated else batch.mask & ~batch.truncated.unsqueeze(-1)
        return {
            "advantage": advantage,
            "selected": selected.to(advantage.dtype),
            "nll_tokens": torch.where(selected, batch.answer_mask.sum(-1), 0),
            "kl_tokens": in_kl.sum(-1),
        }

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Policy gradient, answer and KL, each a sum over its tokens divided by its total."""
        trace = batch.total("tokens")
        own = self.preset == "paper_like"
        nll_total = max(1.0, batch.total("nll_tokens")) if own else trace
        kl_total = max(1.0, batch.total("kl_tokens")) if own else trace
        surrogate = clipped_surrogate(
            self._log_ratio(scores, batch), batch["advantage"].unsqueeze(-1), self.clip, self.clip
        )
        loss = -masked_sum(surrogate, batch.mask).sum() / trace
        if self.nll_coef > 0:
            nll = -(self._answer_weight(batch) * scores["answer"]).sum()
            loss = loss + self.nll_coef * nll / nll_total
        if self.kl_coef > 0:
            kl = masked_sum(self._kl(scores, batch), self._in_kl(batch)).sum()
            loss = loss + self.kl_coef * kl / kl_total
        return loss

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Per source: raw rewards, the answer's likelihood now, traces, ratios, clipping and KL."""
        to_den = self._log_ratio(scores, batch)
        held = clipped(to_den, batch["advantage"].unsqueeze(-1), self.clip, self.clip)
        kl, in_kl = self._kl(scores, batch), self._in_kl(batch)
        length = batch.answer_mask.sum(-1)
        found = {"covrl/selected": float(batch["selected"].mean())}
        for name, rows in (("prior", batch["from_prior"] > 0), ("posterior", batch["from_prior"] == 0)):
            tokens, answered, of_kl = batch.mask[rows], rows & (length > 0), in_kl & rows.unsqueeze(-1)
            if not len(tokens):
                continue
            own = {
                "rows": float(rows.sum()),
                "reward": float(batch.rewards[rows].mean()),
                "length": float(tokens.sum(-1).double().mean()),
                "valid": float(batch["valid"][rows].mean()),
                "clip_fraction": share(held[rows], tokens),
            }
            quantiles = ratio(to_den[rows][tokens]).quantile(to_den.new_tensor([0.05, 0.5, 0.95]))
            own |= dict(zip(("ratio_q05", "ratio_q50", "ratio_q95"), quantiles.tolist(), strict=True))
            if of_kl.any():
                own["kl"] = float(kl[of_kl].mean())
            if answered.any():
                nll = -scores["answer"][answered] / length[answered]
                own |= {"nll": float(nll.mean()), "answer_prob": float((-nll).clamp(max=0).exp().mean())}
            found |= {f"covrl/{name}/{key}": value for key, value in own.items()}
        return found

    def _log_ratio(self, scores: Scores, batch: Batch) -> Float[Tensor, "B T"]:
        prior, posterior = self._live(scores, batch)
        return log_mixture(prior, posterior, self.composite_weight) - self._log_den(self.ratio, batch)

    def _kl(self, scores: Scores, batch: Batch) -> Float[Tensor, "B T"]:
        if self.kl_denominator == "full":
            return scores["kl"]
        prior, posterior = self._live(scores, batch)
        if self.kl_grad == "prior_only":
            posterior = posterior.detach()
        elif self.kl_grad == "posterior_only":
            prior = prior.detach()
        composite = log_mixture(prior, posterior, self.composite_weight)
        return importance_k3(composite, prior, self._log_den(self.kl_denominator, batch))

    def _answer_weight(self, batch: Batch) -> Float[Tensor, " B"]:
        """1 for selected traces, or their importance weight: p' over the law they came from, at the old parameters."""
        if self.nll_select != "is_weighted":
            return batch["selected"]
        composite = log_mixture(self._old(batch, "old"), self._old(batch, "old_posterior"), self.composite_weight)
        weight = ratio(masked_sum(composite - self._log_den(self.ratio, batch), batch.mask))
        return batch["selected"] * weight.clamp(max=MAX_TRACE_WEIGHT)

    def _log_den(self, kind: Denominator, batch: Batch) -> Float[Tensor, "B T"]:
        old = (self._old(batch, "old"), self._old(batch, "old_posterior"))
        return log_denominator(kind, *old, batch["from_prior"] > 0, self.prior_share)

    def _live(self, scores: Scores, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Both log-probs of a trace with gradient, 0 where masked."""
        prior, posterior = (torch.where(batch.mask, scores[name], 0.0) for name in ("policy", "posterior"))
        return prior, posterior

    def _old(self, batch: Batch, name: str) -> Float[Tensor, "B T"]:
        return torch.where(batch.mask, batch[name], 0.0)

    def _in_kl(self, batch: Batch) -> Bool[Tensor, "B T"]:
        return batch.mask & (batch["kl_tokens"] > 0).unsqueeze(-1)
