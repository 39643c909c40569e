"""A task's test split, the same grader and rollout engine as in training, no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from covary.batch import RolloutEngine
from covary.prompts import Template, prompt_group
from covary.rewards import Reward
from covary.types import Example, Group, Request, Sampling


@dataclass(frozen=True)
class Evaluator:
    """Everything that measuring a policy on a test split needs.

    Attributes:
        name: of the task; metrics are `eval/<name>/...`.
        examples: the test split.
        samples: sampled completions per example (N), beside one greedy completion.
        seed: of the sampling; the same at every call, so that two evaluations differ by the policy alone.
    """

    name: str
    examples: Sequence[Example]
    rollout: RolloutEngine
    reward: Reward
    template: Template
    tokenizer: Any
    sampling: Sampling
    samples: int
    seed: int

    def __call__(self) -> tuple[dict[str, float], list[str]]:
        """Metrics, and the reasons of rows that could not be scored.

        `accuracy` is the mean over examples of the share of sampled completions whose reward is 1 (Average@N);
        `pass@N` the share of examples with at least one; `greedy` the greedy completions' accuracy;
        `reward` the mean reward where graders give partial credit. Rows that cannot be scored are left out of
        all of them and counted.
        """
        groups, errors = self.graded()
        return self._metrics(groups), errors

    def graded(self) -> tuple[list[Group], list[str]]:
        """The graded groups, `samples` sampled completions and a greedy one each, and reasons of missing rewards."""
        groups = [prompt_group(example, self.template, self.tokenizer) for example in self.examples]
        plan = [Request(self.samples), Request(1, decoding="greedy")]
        groups = self.rollout.generate([plan] * len(groups), groups, self.sampling, self.seed)
        return groups, grade(groups, self.reward)

    def _metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        prefix = f"eval/{self.name}/"
        sampled = [[r for r in (g.rewards or [])[:-1] if r is not None] for g in groups]
        sampled = [rewards for rewards in sampled if rewards]
        greedy = [g.rewards[-1] for g in groups if g.rewards and g.rewards[-1] is not None]
        rows = [c for g in groups for c in g.completions[:-1]]
        unscorable = sum(r is None for g in groups for r in g.rewards or [])
        metrics = {
            "accuracy": _mean([np.mean([is_correct(r) for r in rewards]) for rewards in sampled]),
            "greedy": _mean([float(is_correct(r)) for r in greedy]),
            "reward": _mean([np.mean(rewards) for rewards in sampled]),
            "length": _mean([float(len(c.tokens)) for c in rows]),
            "truncated": _mean([float(c.finish == "length") for c in rows]),
            "unscorable": float(unscorable),
        }
        if self.samples > 1:
            full = [rewards for rewards in sampled if len(rewards) == self.samples]
            metrics[f"pass@{self.samples}"] = _mean(
                [pass_at_k(len(r), sum(map(is_correct, r)), self.samples) for r in full]
            )
        return {prefix + name: float(value) for name, value in metrics.items()}


def grade(groups: Sequence[Group], reward: Reward) -> list[str]:
    """Set every group's rewards from its completions' texts; returns the reasons of rows without a score."""
    examples = [group.example for group in groups for _ in group.completions]
    rows = [completion for group in groups for completion in group.completions]
    graded = iter(reward(examples, [row.text for row in rows], [row.tokens for row in rows]))
    errors = []
    for group in groups:
        results = [next(graded) for _ in group.completions]
        group.rewards = [result.value for result in results]
        errors += [result.error for result in results if result.error is not None]
    return errors


def is_correct(reward: float) -> bool:
    """A reward of 1 is a correct answer; partial credit is not."""
    return reward >= 1.0


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k of one problem, 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).

    Raises:
        ValueError: k is larger than n.
    """
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, got {n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if values else float("nan")
