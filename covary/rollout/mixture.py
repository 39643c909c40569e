"""Samples of a mixture of policy and teacher, token by token (MiniLLM's teacher-mixed sampling, arXiv 2306.08543).

Every token is drawn from teacher_share * teacher + (1 - teacher_share) * policy, each at the rollout temperature. Both
models read the row as it grows, each behind its own prompt; the vocabulary is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from covary.rollout.decoding import Decoding, Row, decoding_of, places_for_copies
from covary.rollout.transformers import TransformersRollout
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
        self._decoding_of_teacher, _ = decoding_of(teacher)
        self.teacher_context = teacher_context

    def _models(self) -> list[PreTrainedModel]:
        return [self.model, self.teacher]

    def _begin(self, rows: Sequence[Row], sampling: Sampling) -> Decoding:
        def read_by_teacher(row: Row) -> tuple[int, ...]:
            return row.asked.contexts[self.teacher_context]

        front = places_for_copies([len(read_by_teacher(row)) for row in rows])
        return _Mixture(
            super()._begin(rows, sampling),
            self._decoding_of_teacher(self.teacher, read_by_teacher, front, sampling.max_tokens, self.autocast),
            sampling.temperature,
        )

    def _temperature(self, sampling: Sampling) -> float:
        return 1.0  # the mixture's parts have theirs already


class _Mixture:
    """Two decodings of the same rows as one; its logits are the log-probs of the mixture."""

    def __init__(self, policy: Decoding, teacher: Decoding, temperature: float) -> None:
        self.parts = (policy, teacher)
        self.flexible = policy.flexible and teacher.flexible
        self.share = torch.empty(0)
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

    def bytes(self, rows: Sequence[Row]) -> int:
        return sum(part.bytes(rows) for part in self.parts)

    def join(self, rows: Sequence[Row]) -> None:
        for part in self.parts:
            part.join(rows)
        new = torch.tensor([row.asked.request.teacher_share for row in rows], device=self.parts[0].logits.device)
        self.share = torch.cat([self.share.to(new), new]) if self.flexible else new

    def keep(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.keep(rows)
        self.share = self.share[torch.tensor(rows, device=self.share.device, dtype=torch.long)]

    def step(self, tokens: Tensor) -> None:
        for part in self.parts:
            part.step(tokens)
