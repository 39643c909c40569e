"""JLB: the multi-sample Jensen lower bound, also JEPO (arXiv 2503.19618).

    L_n = E[ log 1/n sum_j p(y|z_j,x) ] <= log p(y|x),  increasing in n

    A_i = (LSE_j s_j - log n) - (LSE_{j != i} s_j - log(n - 1)),   s_j = log p(y|z_j,x), detached
    L   = - mean over prompts of  sum_i A_i log p(z_i|x) + LSE_j s_j (live)

A_i is what trace i adds to the bound: used as it is, for centring it again biases. The live term's gradient gives the
answer behind each trace its posterior weight, softmax(s)_i. The bound of a single trace is LaTRO's objective without its KL.
A trace that was never closed counts with the least s of its group, and its answer is not learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import added_to_bound, fill_with_least, group_logsumexp, masked_sum
from covary.types import Score, Stream


@dataclass(frozen=True)
class JLB(Algorithm):
    """The gradient of the multi-sample bound on log p(y|x)."""

    min_group = 2
    coupled = True
    template = "think"
    frozen = (Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True),)
    trained = (Score("policy"), Score("answer", tokens="answer", level="sequence"))

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's log-likelihood behind the trace."""
        answered = batch.answer_mask.any(-1)
        return fill_with_least(torch.where(answered, batch["old_answer"], torch.nan), batch.group)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """What each trace adds to the bound."""
        return {"advantage": added_to_bound(batch.rewards, batch.group)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over prompts of the traces' terms and the bound itself."""
        trace = (batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum()
        answered = batch.answer_mask.any(-1)
        group = batch.group[answered].unique(return_inverse=True)[1]
        bound = group_logsumexp(scores["answer"][answered], group).sum()
        return -(trace + bound) / batch.total("groups")
