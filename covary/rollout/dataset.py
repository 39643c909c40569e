"""The rollout engine of offline methods: completions come from the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from covary.seeding import derive_seed
from covary.types import Completion, Group, Request, Sampling, UserError


class DatasetRollout:
    """Answers requests with each example's own completions (and their rewards, where it has them).

    Requests for k in all get all of them in order, or k drawn without replacement where there are more.
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
        return [self._answer(plan, group, sampling.max_tokens, seed) for plan, group in zip(plans, groups, strict=True)]

    def load_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Data do not depend on weights."""

    def observe(self, groups: list[Group]) -> None:
        """Data are not remembered."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def _answer(self, plan: list[Request], group: Group, max_tokens: int, seed: int) -> Group:
        example = group.example
        wanted = [request for request in plan for _ in range(request.count)]
        if not example.completions:
            raise UserError(
                f"example {example.id!r} has no completions, which rollout.engine: dataset learns from; "
                "name their column with task.completion"
            )
        chosen = list(range(len(example.completions)))
        if len(chosen) > len(wanted):
            rng = np.random.default_rng(derive_seed(seed, example.id))
            chosen = sorted(rng.choice(len(chosen), size=len(wanted), replace=False).tolist())
        completions = [
            replace(
                encode_completion(self.tokenizer, example.completions[i], max_tokens),
                context=request.context,
                learn=request.learn,
            )
            for i, request in zip(chosen, wanted, strict=False)
        ]
        rewards = None if example.rewards is None else [example.rewards[i] for i in chosen]
        return replace(group, completions=completions, rewards=rewards)


def encode_completion(tokenizer: Any, text: str, max_tokens: int) -> Completion:
    """A given text as a completion: encoded, ended, cut at `max_tokens` (its text with it)."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    if len(tokens) <= max_tokens:
        return Completion(tokens, text, "eos", source="dataset")
    # What is graded is what is learned from: the text is cut with its tokens.
    text = tokenizer.decode(tokens[:max_tokens], clean_up_tokenization_spaces=False)
    return Completion(tokens[:max_tokens], text, "length", source="dataset")
