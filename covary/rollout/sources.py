"""Requests of one plan to the engines that answer their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covary.batch import RolloutEngine
from covary.seeding import derive_seed
from covary.types import Completion, Group, Request, Sampling


class SourcesRollout:
    """Sends every request to the engine of its source and puts the completions in the order of the plan.

    Attributes:
        engines: by source.
    """

    def __init__(self, engines: Mapping[str, RolloutEngine]) -> None:
        self.engines = engines

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """What `plans` ask for. Rewards that data bring are left out: completions of other sources have none."""
        answers: list[dict[str, list[Completion]]] = [{} for _ in groups]
        for source, engine in self.engines.items():
            asked = [g for g, plan in enumerate(plans) if any(request.source == source for request in plan)]
            if not asked:
                continue
            own = [[request for request in plans[g] if request.source == source] for g in asked]
            # Samples of the policy do not depend on what else a plan asks for.
            seeded = seed if source == "policy" else derive_seed(seed, source)
            done = engine.generate(own, [groups[g] for g in asked], sampling, seeded)
            for g, group in zip(asked, done, strict=True):
                answers[g][source] = group.completions
        return [
            replace(group, completions=_in_order(plan, answer))
            for group, plan, answer in zip(groups, plans, answers, strict=True)
        ]

    def observe(self, groups: list[Group]) -> None:
        """Every engine sees every row."""
        for engine in self.engines.values():
            engine.observe(groups)

    def load_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        """New weights of the policy, for the engines that sample it."""
        for engine in self.engines.values():
            engine.load_weights(state, version)

    def state(self) -> dict[str, Any]:
        """Every engine's own."""
        return {source: engine.state() for source, engine in self.engines.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore every engine."""
        for source, engine in self.engines.items():
            engine.load_state(state[source])


def _in_order(plan: list[Request], answer: Mapping[str, list[Completion]]) -> list[Completion]:
    """Completions as the plan names them; a source may have had fewer than it was asked for (data)."""
    left = {source: iter(completions) for source, completions in answer.items()}
    rows = (next(left[request.source], None) for request in plan for _ in range(request.count))
    return [row for row in rows if row is not None]
