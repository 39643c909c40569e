"""Samples of a mixture of policy and teacher, token by token (MiniLLM's teacher-mixed sampling, arXiv 2306.08543).

Every token is drawn from teacher_share * teacher + (1 - teacher_share) * policy, each at the rollout temperature. Both
models read the row as it grows, each behind its own prompt; the vocabulary is one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from covary.rollout.transformers import Decoding, Reads, Row, TransformersRollout, model_bytes
from covary.types import Sampling, Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class MixtureRollout(TransformersRollout):
    """Answers requests for the source `mixed`. Log-probs of its completions are the mixture's."""

    source: ClassVar[Source] = "mixed"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        teacher: PreTrainedModel,
        *,
        teacher_context: str,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Shares both models with the trainer.

        Args:
            model: the policy.
            tokenizer: of both.
            teacher: its outputs are labelled as the policy's.
            teacher_context: the name of the prompt that the teacher reads.
            autocast: compute type of the forward passes, the same as the trainer's; None for each model's own.
        """
        super().__init__(model, tokenizer, autocast=autocast)
        self.teacher = teacher
        self.teacher_context = teacher_context

    def _row_bytes(self) -> tuple[int, int]:
        ours, theirs = (model_bytes(model, self.autocast) for model in (self.model, self.teacher))
        return ours[0] + theirs[0], ours[1] + theirs[1]

    def _begin(self, rows: list[Row], sampling: Sampling) -> Reads:
        return _Mixture(
            super()._begin(rows, sampling),
            Decoding(self.teacher, [tuple(row.contexts[self.teacher_context]) for row in rows], sampling.max_tokens),
            torch.tensor([row.request.teacher_share for row in rows], device=self.model.device),
            sampling.temperature,
        )

    def _temperature(self, sampling: Sampling) -> float:
        return 1.0  # the mixture's parts have theirs already


class _Mixture:
    """Two decodings of the same rows as one; its logits are the log-probs of the mixture."""

    def __init__(self, policy: Reads, teacher: Reads, share: Tensor, temperature: float) -> None:
        self.parts = (policy, teacher)
        self.share = share
        self.temperature = temperature

    @property
    def logits(self) -> Tensor:
        policy = self._logps(self.parts[0].logits)
        # The vocabulary is the policy's: padding that only the teacher has is cut, what it lacks it never says.
        teacher = self._logps(self.parts[1].logits[:, : policy.shape[-1]])
        teacher = pad(teacher, (0, policy.shape[-1] - teacher.shape[-1]), value=-math.inf)
        share = self.share[:, None]
        return torch.logaddexp(share.log() + teacher, torch.log1p(-share) + policy)

    def _logps(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / self.temperature, -1).to(self.share.device)

    def keep(self, rows: Tensor) -> None:
        for part in self.parts:
            part.keep(rows)
        self.share = self.share[rows]

    def step(self, tokens: Tensor) -> None:
        for part in self.parts:
            part.step(tokens)
