"""A local chat model that answers messages: the greedy reply to each, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covary.prompts import Room, Template, prompt_group
from covary.rewards.judge import Reply
from covary.rollout.transformers import TransformersRollout
from covary.types import Example, Request, Sampling


@dataclass(frozen=True)
class LocalChat:
    """Replies of a model in this process. Without a chat template, the message itself is the prompt.

    Attributes:
        rollout: the model's sampler.
        tokenizer: the model's own.
        room: what it can read; a longer message has no reply.
        max_tokens: of a reply, at most.
    """

    rollout: TransformersRollout
    tokenizer: Any
    room: Room
    max_tokens: int

    def __call__(self, messages: Sequence[str]) -> list[Reply]:
        """One reply for each user message, in order."""
        chats = self.tokenizer.chat_template is not None
        groups = [
            prompt_group(
                Example(f"message {i}", [{"role": "user", "content": text}] if chats else text),
                Template("chat"),
                self.tokenizer,
            )
            for i, text in enumerate(messages)
        ]
        complaints = [self.room.complaint(group) for group in groups]
        fitting = [group for group, complaint in zip(groups, complaints, strict=True) if complaint is None]
        plan = [Request(1, decoding="greedy")]
        done = iter(self.rollout.generate([plan] * len(fitting), fitting, Sampling(self.max_tokens), seed=0))
        return [
            Reply(next(done).completions[0].text) if complaint is None else Reply(None, complaint)
            for complaint in complaints
        ]
