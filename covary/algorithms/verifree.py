r"""VeriFree: reinforcing general reasoning without verifiers (arXiv 2505.21493).

    J = E_{z ~ p(.|x)}[ p(y|z,x) ] = p(y|x), the exact marginal
    L = - mean over rows of  (p_i - mean of the others' p) log p(z_i|x) + p_i log p(y|z_i,x),   p_i = p(y|z_i,x) detached

A trace ends within the answer's tag, at "<answer" (template `verifree`): the tag's own closing bracket is often merged with
what follows it, so it belongs to the answer, "> \boxed{y} </answer>". A trace that never gets there has p_i = 0.
Official code: sail-sg/VeriFree, verifree.py with the settings of run.sh (critic rloo, reward_source p, sft_coef_source
reward); its bare defaults (log-probs as rewards, advantages as the answer's weight) are another estimator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import leave_one_out, masked_sum
from covary.types import Score, Stream


@dataclass(frozen=True)
class VeriFree(Algorithm):
    """The gradient of the reference answer's marginal probability."""

    min_group = 2
    template = "verifree"
    frozen = (Score("old_answer", Stream("old"), tokens="answer", level="sequence", early=True),)
    trained = (Score("policy"), Score("answer", tokens="answer", level="sequence"))

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """The answer's probability behind the trace."""
        return torch.where(batch.answer_mask.any(-1), batch["old_answer"].exp(), 0.0)

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Probability minus the mean of the others."""
        return {"advantage": leave_one_out(batch.rewards, batch.group)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over rows of the trace's and the answer's term; the baseline acts on the trace alone."""
        trace = (batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum()
        answered = batch.answer_mask.any(-1)
        answer = torch.where(answered, batch.rewards * scores["answer"], 0.0).sum()
        return -(trace + answer) / batch.total("rows")
