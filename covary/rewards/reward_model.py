"""A reward that a sequence classifier of one label gives: its logit for prompt and completion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from covary.rewards.judge import control_tokens, question_of, without_control
from covary.rewards.types import Graded, TokenIds
from covary.types import Example


@dataclass(frozen=True)
class ModelReward:
    """The logit of a classifier, float32, the same for any batch up to rounding.

    A conversation is rendered by the classifier's own chat template, the completion as the assistant's turn; without a
    template, question and completion go in as a pair of texts. Nothing is cut: what is longer than `context` is
    unscorable.

    Attributes:
        name: how messages call it.
        model: in evaluation mode, one label; its `config.pad_token_id` is -1 where it has no padding token.
        tokenizer: the model's own.
        context: tokens that the model can read; None: no limit known.
        micro_batch_tokens: of a forward pass with its padding; a longer row runs alone.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    context: int | None
    micro_batch_tokens: int

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Score `completions[i]` as an answer to `examples[i]`."""
        rows = [self._encode(example, text) for example, text in zip(examples, completions, strict=True)]
        graded: list[Graded] = [
            Graded(None, f"row {example.id}: prompt and completion have {len(row['input_ids'])} tokens, and the reward "
                         f"model {self.name} reads {self.context}")
            for example, row in zip(examples, rows, strict=True)
        ]  # fmt: skip
        fitting = [i for i, row in enumerate(rows) if self.context is None or len(row["input_ids"]) <= self.context]
        for part in self._batches(fitting, rows):
            for i, score in zip(part, self._scores([rows[i] for i in part]), strict=True):
                error = f"row {examples[i].id}: the reward model {self.name} gave {score}"
                graded[i] = Graded(score) if math.isfinite(score) else Graded(None, error)
        return graded

    def close(self) -> None:
        """Nothing to end."""

    @property
    def _padding(self) -> int:
        return self.model.config.pad_token_id  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]

    def _encode(self, example: Example, completion: str) -> dict[str, list[int]]:
        # A completion that writes control tokens must not end its own turn, or start one that praises it.
        text = without_control(completion, control_tokens(self.tokenizer))
        if self.tokenizer.chat_template is None:
            return dict(self.tokenizer(question_of(example), text))
        prompt = example.prompt
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [*turns, {"role": "assistant", "content": text}]
        return dict(self.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True))

    def _batches(self, fitting: list[int], rows: Sequence[dict[str, list[int]]]) -> Iterator[list[int]]:
        """Rows of similar length, longest first. A model without a padding token gets rows of one length only.

        A decoder reads its score at the last token that is no padding, which it tells by that id.
        """
        padded = self._padding >= 0
        part: list[int] = []
        width = 0
        for i in sorted(fitting, key=lambda i: -len(rows[i]["input_ids"])):
            length = len(rows[i]["input_ids"])
            if part and ((len(part) + 1) * width > self.micro_batch_tokens or not (padded or length == width)):
                yield part
                part = []
            width = width if part else length
            part.append(i)
        if part:
            yield part

    @torch.no_grad()
    def _scores(self, rows: Sequence[dict[str, list[int]]]) -> list[float]:
        """One number a row."""
        width = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": self._padding}
        device = next(self.model.parameters()).device
        batch = {
            name: torch.tensor(
                [row[name] + [fill.get(name, 0)] * (width - len(row[name])) for row in rows], device=device
            )
            for name in rows[0]
        }  # attention_mask, and token_type_ids where the model tells the two texts of a pair apart
        return self.model(**batch).logits.float().squeeze(-1).tolist()
