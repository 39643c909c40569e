"""Completions from a file (demonstrations, another model's samples) as part of every group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from covary.batch import RolloutEngine
from covary.rollout.dataset import encode_completion
from covary.rollout.replay import fewer_fresh
from covary.seeding import derive_seed
from covary.types import Group, Request, Sampling


class GivenRollout:
    """Puts up to `count` given completions into each group of k, and asks another engine for the rest.

    Attributes:
        given: texts by example id; a prompt without any gets fresh completions only.
    """

    def __init__(self, inner: RolloutEngine, given: Mapping[str, list[str]], count: int, tokenizer: Any) -> None:
        self.inner = inner
        self.given = given
        self.count = count
        self.tokenizer = tokenizer

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """Fresh completions first, then given ones (source `dataset`), drawn without replacement."""
        drawn = [self._draw(group.example.id, seed) for group in groups]
        fewer = [fewer_fresh(plan, len(texts)) for plan, texts in zip(plans, drawn, strict=True)]
        fresh = self.inner.generate(fewer, groups, sampling, seed)
        return [
            replace(
                group,
                completions=[
                    *group.completions,
                    *(encode_completion(self.tokenizer, text, sampling.max_tokens) for text in texts),
                ],
            )
            for group, texts in zip(fresh, drawn, strict=True)
        ]

    def observe(self, groups: list[Group]) -> None:
        """Given completions never change."""
        self.inner.observe(groups)

    def load_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        """New weights are the other engine's."""
        self.inner.load_weights(state, version)

    def state(self) -> dict[str, Any]:
        """The other engine's."""
        return self.inner.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the other engine."""
        self.inner.load_state(state)

    def _draw(self, id: str, seed: int) -> list[str]:
        texts = self.given.get(id, [])
        count = min(self.count, len(texts))
        chosen = np.random.default_rng(derive_seed(seed, "given", id)).choice(len(texts), count, replace=False)
        return [texts[int(i)] for i in chosen] if count else []
