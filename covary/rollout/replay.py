"""Experience replay: a prompt's own past completions as part of its group (GVPO++ section VI-B, portfolios h:f).

Any sampler is allowed to methods like GVPO, so a past completion needs no importance ratio; its reference
log-prob is scored anew under the current old policy, as every row's is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from covary.batch import RolloutEngine
from covary.seeding import derive_seed
from covary.types import Completion, Group, Request, Sampling


class ReplayRollout:
    """Answers part of each group from that prompt's history, and asks another engine for the rest.

    A group of k gets `history` past completions, drawn uniformly without replacement, and k - history fresh ones;
    while fewer are stored, all k are fresh. The newest `size` completions are kept per prompt;
    where completions are graded, those that had a reward.
    """

    def __init__(self, inner: RolloutEngine, history: int, size: int) -> None:
        self.inner = inner
        self.history = history
        self.size = size
        self._past: dict[str, deque[Completion]] = {}

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """Fresh completions first, then replayed ones (source `replay`).

        Raises:
            ValueError: a plan asks for anything but samples of the policy.
        """
        seen: Counter[str] = Counter()  # a prompt that recurs in a batch draws anew
        replayed = []
        for group in groups:
            again = seen[group.example.id]
            replayed.append(self._draw(group.example.id, derive_seed(seed, again) if again else seed))
            seen[group.example.id] += 1
        fewer = [fewer_fresh(plan, len(past)) for plan, past in zip(plans, replayed, strict=True)]
        fresh = self.inner.generate(fewer, groups, sampling, seed)
        return [
            replace(group, completions=[*group.completions, *past]) for group, past in zip(fresh, replayed, strict=True)
        ]

    def observe(self, groups: list[Group]) -> None:
        """Remember the fresh completions, without those that a reward could not grade."""
        self.inner.observe(groups)
        for group in groups:
            past = self._past.setdefault(group.example.id, deque(maxlen=self.size))
            graded = (
                [True] * len(group.completions) if group.rewards is None else [r is not None for r in group.rewards]
            )
            for completion, known in zip(group.completions, graded, strict=True):
                if completion.source == "policy" and known and completion.tokens:
                    past.append(_bare(completion))

    def load_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        """New weights are the other engine's; history stays."""
        self.inner.load_weights(state, version)

    def state(self) -> dict[str, Any]:
        """The history as JSON values, and the other engine's state."""
        past = {
            id: [[c.tokens, c.text, c.finish, c.roles, c.weights_version] for c in completions]
            for id, completions in self._past.items()
        }
        return {"past": past, "inner": self.inner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        self.inner.load_state(state["inner"])
        self._past = {
            id: deque(
                (
                    Completion(tokens, text, finish, roles=roles, source="replay", weights_version=version)
                    for tokens, text, finish, roles, version in completions
                ),
                maxlen=self.size,
            )
            for id, completions in state["past"].items()
        }

    def _draw(self, id: str, seed: int) -> list[Completion]:
        past = self._past.get(id, ())
        if len(past) < self.history:
            return []
        chosen = np.random.default_rng(derive_seed(seed, "replay", id)).choice(len(past), self.history, replace=False)
        # A copy each time: the row gets numbers and a weight of its own in every step.
        return [_bare(past[int(i)]) for i in chosen]


def _bare(completion: Completion) -> Completion:
    """What is worth remembering. The log-probs are of old weights: replayed rows are scored anew."""
    return Completion(
        completion.tokens,
        completion.text,
        completion.finish,
        roles=completion.roles,
        source="replay",
        weights_version=completion.weights_version,
    )


def fewer_fresh(plan: list[Request], count: int) -> list[Request]:
    """A plan of policy samples with `count` less of them.

    Raises:
        ValueError: it asks for anything else, or no fresh sample would be left.
    """
    if count == 0:
        return plan
    if len(plan) != 1 or plan[0] != Request(plan[0].count) or plan[0].count <= count:
        raise ValueError(f"replay of {count} completions needs a plan of more policy samples, got {plan}")
    return [replace(plan[0], count=plan[0].count - count)]
