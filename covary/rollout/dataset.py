"""The rollout engine of offline methods: completions come from the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from covary.seeding import derive_seed
from covary.types import Completion, Group, Request, Sampling, UserError


class DatasetRollout:
    """Answers policy requests with each example's own completions (and their rewards, where it has them).

    A request for k gets all of them, or k drawn without replacement where there are more.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("the model's tokenizer has no end token, so given completions cannot be ended")
        self.tokenizer = tokenizer

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """Groups with their examples' completions, encoded, ended, and cut at `sampling.max_tokens`.

        Raises:
            UserError: an example has no completions.
        """
        return [
            self._answer(sum(request.count for request in plan), group, sampling.max_tokens, seed)
            for plan, group in zip(plans, groups, strict=True)
        ]

    def load_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Data do not depend on weights."""

    def _answer(self, k: int, group: Group, max_tokens: int, seed: int) -> Group:
        example = group.example
        if not example.completions:
            raise UserError(
                f"example {example.id!r} has no completions, which rollout.engine: dataset learns from; "
                "name their column with task.completion"
            )
        chosen = list(range(len(example.completions)))
        if len(chosen) > k:
            rng = np.random.default_rng(derive_seed(seed, example.id))
            chosen = sorted(rng.choice(len(chosen), size=k, replace=False).tolist())
        completions = [self._encode(example.completions[i], max_tokens) for i in chosen]
        rewards = None if example.rewards is None else [example.rewards[i] for i in chosen]
        return replace(group, completions=completions, rewards=rewards)

    def _encode(self, text: str, max_tokens: int) -> Completion:
        tokens = [
            *self.tokenizer.encode(text, add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]
        ended = len(tokens) <= max_tokens
        return Completion(tokens[:max_tokens], text, "eos" if ended else "length", source="dataset")
