"""GVPO-OPD: group variance policy optimization for on-policy distillation (GVPO++, arXiv 2609.21432, section V).

With l_i = log pi(y_i|x) and l^t_i = log pi_t(y_i|x), both summed over the whole completion, and a positive weight f:

    g_i = f_i * (l_i - l^t_i)
    L   = mean over prompts of  1 / (2 (k - 1)) * sum_i (g_i - mean_j g_j)^2

GVPO with the reward beta * log(pi_t / pi'): any reference pi' cancels, and with it beta, which would be a mere scale
(V-A, f = 1). The gradient is (g_i - mean g) f_i grad l_i: the weights sum to zero on f_i l_i, not on l_i. For any f > 0
that does not depend on the policy the one optimum is pi = pi_t, under any sampler that covers both (Theorem V.1); with
sign changes there are others, so f <= 0 is refused. With f = 1 it is REINFORCE with a leave-one-out baseline and the
reward log(pi_t / pi), on the policy's own samples the gradient of KL(pi || pi_t).

A sum needs no alignment of tokens: the teacher may have any tokenizer. Then l^t is the log-prob of one tokenisation of
the text, a target that does not sum to one over the policy's token sequences. The optimum is its normalisation for f = 1,
and pi_t exp(c / f) for one constant c otherwise: a tilt by length where f depends on it.

f = (length_ref / |y|)^alpha keeps long completions from dominating (V-C), |y| the policy's own tokens with the end token,
for both terms: normalising the teacher by its own count would move the optimum. There is no official code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores
from covary.ops import group_variance, masked_sum
from covary.types import Completion, Example, Score, Stream, UserError


@dataclass(frozen=True)
class GVPOOPD(Algorithm):
    """Distillation from a teacher with any tokenizer.

    Attributes:
        alpha: f = (length_ref / |y|)^alpha. The paper takes 1 for a teacher with another tokenizer, 0.75 for one with
            the same; 0 is plain on-policy distillation.
        length_ref: the length, in tokens, at which f = 1 (the paper's 1). It scales loss and gradient by
            length_ref^(2 alpha) and moves nothing else; near the typical length it keeps gradients near 1.
        weighting: another positive f, `(example, completion) -> float`, in the place of both.
    """

    alpha: float = 1.0
    length_ref: float = 1.0
    weighting: Callable[[Example, Completion], float] | None = None

    min_group = 2
    coupled = True
    any_sampler = True
    needs_reward = False
    frozen = (Score("teacher", Stream("teacher"), level="sequence"),)

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"alpha takes a number from 0 on, got {self.alpha}")
        if not self.length_ref > 0:
            raise ValueError(f"length_ref takes a number above 0, got {self.length_ref}")
        if self.weighting is not None and (self.alpha, self.length_ref) != (1.0, 1.0):
            raise ValueError("weighting stands in the place of alpha and length_ref: leave them out")

    def features(self, example: Example, completion: Completion) -> dict[str, float]:
        """The row's weight f. A row without tokens has none: it leaves anyway.

        Raises:
            UserError: f is no positive number, naming the row.
        """
        if not completion.sampled_length:
            return {"f": math.nan}
        try:
            f = float((self.weighting or self._by_length)(example, completion))
        except Exception as error:  # the function is the user's
            raise UserError(
                f"algorithm.weighting: {type(error).__name__}: {error} for {_row(example, completion)}"
            ) from error
        if not 0 < f < math.inf:
            raise UserError(
                f"algorithm.{'weighting' if self.weighting else 'alpha'}: f takes a finite number above 0 (with f <= 0 "
                f"the teacher is not the only optimum), got {f} for {_row(example, completion)}"
            )
        return {"f": f}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Half the mean group variance of f times the log-ratio to the teacher."""
        g = batch["f"] * self._log_ratio(scores, batch)
        return group_variance(g, batch.group).sum() / (2 * batch.total("groups"))

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """The log-ratio to the teacher in nats a completion, lengths in tokens, and the share that was cut off."""
        log_ratio = self._log_ratio(scores, batch)
        student = batch.mask.sum(-1).double()
        teacher = batch.numbers.get("teacher_tokens", student)
        return {
            "gvpo_opd/log_ratio": float(log_ratio.mean()),
            "gvpo_opd/log_ratio_variance": float(group_variance(log_ratio, batch.group).mean()),
            "gvpo_opd/student_length": float(student.mean()),
            "gvpo_opd/teacher_length": float(teacher.mean()),
            "gvpo_opd/truncated": float(batch.truncated.double().mean()),
        }

    def teacher_note(self, same_tokens: bool) -> str | None:
        """Where the optimum is not the teacher itself."""
        if same_tokens or (self.weighting is None and self.alpha == 0):
            return None
        return (
            "the teacher has another tokenizer and f is not constant, so the optimum is the teacher's distribution over "
            "texts with a tilt (by length where f depends on it); algorithm.alpha: 0 has none"
        )

    def _by_length(self, example: Example, completion: Completion) -> float:
        return (self.length_ref / completion.sampled_length) ** self.alpha

    def _log_ratio(self, scores: Scores, batch: Batch) -> Float[Tensor, " B"]:
        """L - l^t, summed in float64: the two sums have no tokens in common whose difference could come first."""
        return masked_sum(scores["policy"].double(), batch.mask) - batch["teacher"]


def _row(example: Example, completion: Completion) -> str:
    return f"example {example.id!r}, completion {completion.text[:60]!r}"
