"""A test split, graded: the same graders and rollout engines as in training, no gradient.

`Evaluator.samples` asks a policy and grades what it says; `figures` turns samples into numbers. Evaluation inside
training, `covary.evaluate` and `covary eval` all go through these two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from covary.batch import RolloutEngine
from covary.prompts import Template, prompt_group
from covary.rewards import Graded, Reward
from covary.rewards.ahead import ahead
from covary.rewards.facts import compares_answers, reads_answers
from covary.statistics import Estimate, estimate, majority, pass_at_k
from covary.types import Example, Group, Request, Sampling


@dataclass(frozen=True)
class Sample:
    """One graded completion of a test question.

    Attributes:
        id: of the question.
        index: among the completions of that question; the greedy one comes last.
        greedy: sampled at temperature 0.
        completion: its text, as graders read it.
        finish: what ended it.
        tokens: how many.
        reward: None where it could not be scored.
        error: why it could not.
        verdict: of a built-in grader: correct, incorrect or unparsable.
        extracted: the answer that it found in the completion.
        vote: index of the first sampled completion of the question whose answer equals this one's; None without an
            answer, and for the greedy one.
        category: of the question, where the task has categories.
    """

    id: str
    index: int
    greedy: bool
    completion: str
    finish: str
    tokens: int
    reward: float | None
    error: str | None = None
    verdict: str | None = None
    extracted: str | None = None
    vote: int | None = None
    category: str | None = None


@dataclass(frozen=True)
class Evaluator:
    """Everything that measuring a policy on a test split needs.

    Attributes:
        name: of the task; metrics are `eval/<name>/...`.
        examples: the test split.
        samples: sampled completions per example (N).
        seed: of the sampling; the same at every call, so that two evaluations differ by the policy alone.
        greedy: also one greedy completion per example.
        pass_at: the k of pass@k; None: N where that is above 1.
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
    greedy: bool = True
    pass_at: tuple[int, ...] | None = None

    def __call__(self) -> tuple[dict[str, float], list[str]]:
        """Metrics, and the reasons of rows that could not be scored."""
        samples = self.ask(self.examples)
        return self.metrics(samples), [sample.error for sample in samples if sample.error is not None]

    def ask(self, examples: Sequence[Example]) -> list[Sample]:
        """Every completion of these examples, sampled and graded, example by example.

        They depend on the seed, the example's id and the completion's index, not on which examples come together.
        """
        plan = [Request(self.samples)] + ([Request(1, decoding="greedy")] if self.greedy else [])
        groups = [prompt_group(example, self.template, self.tokenizer) for example in examples]
        with grading_ahead(self.rollout, self.reward) as reward:
            groups = self.rollout.generate([plan] * len(groups), groups, self.sampling, self.seed)
        verdicts = grade(groups, reward)
        votes = self._votes(groups, verdicts)
        return [
            Sample(
                id=group.example.id,
                index=index,
                greedy=completion.greedy,
                completion=completion.text,
                finish=completion.finish,
                tokens=len(completion.tokens),
                reward=verdict.value,
                error=verdict.error,
                extracted=verdict.grade.extracted if verdict.grade else None,
                verdict=verdict.grade.verdict if verdict.grade else None,
                vote=votes.get((number, index)),
                category=group.example.columns.get("category"),
            )
            for number, (group, own) in enumerate(zip(groups, verdicts, strict=True))
            for index, (completion, verdict) in enumerate(zip(group.completions, own, strict=True))
        ]

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """The `figures` of this evaluation as metrics."""
        found = figures(samples, self.samples, self.pass_at, reads_answers(self.reward))
        return {f"eval/{self.name}/{name}": value for name, value in found.items()}

    def _votes(self, groups: Sequence[Group], verdicts: Sequence[Sequence[Graded]]) -> dict[tuple[int, int], int]:
        """(group, index) -> index of the first sample with an equal answer.

        Equal texts are equal; others are where the grader takes one for right with the other as the reference. In each
        round the first answer without a class, of every group at once, founds one and meets those that are left.
        """
        if self.samples == 1 or not reads_answers(self.reward):
            return {}
        votes: dict[tuple[int, int], int] = {}
        waiting: dict[int, dict[str, list[int]]] = {}  # group -> answer -> indices
        for number, own in enumerate(verdicts):
            answers: dict[str, list[int]] = defaultdict(list)
            for index, verdict in enumerate(own[: self.samples]):
                if verdict.grade is not None and verdict.grade.extracted is not None:
                    answers[verdict.grade.extracted].append(index)
            waiting[number] = answers
        while waiting := {number: answers for number, answers in waiting.items() if answers}:
            meetings: list[tuple[int, str, int]] = []
            examples, texts = [], []
            for number, answers in waiting.items():
                founder = next(iter(answers))
                members = answers.pop(founder)
                votes |= {(number, index): members[0] for index in members}
                for answer, (first, *_) in answers.items() if compares_answers(self.reward) else ():
                    meetings.append((number, answer, members[0]))
                    examples.append(replace(groups[number].example, answer=founder))
                    texts.append(groups[number].completions[first].text)
            for (number, answer, founder), verdict in zip(meetings, self.reward(examples, texts), strict=True):
                if verdict.value is not None and is_correct(verdict.value):
                    votes |= {(number, index): founder for index in waiting[number].pop(answer)}
        return votes


def figures(
    samples: Sequence[Sample], count: int, pass_at: Sequence[int] | None = None, reads: bool = True
) -> dict[str, float]:
    """The numbers of an evaluation, by the last part of their metrics' names.

    Rows that cannot be scored are left out of what needs a score, and counted (`unscorable`).

    Args:
        samples: of any number of questions, in any order.
        count: sampled completions per question (N).
        pass_at: the k of pass@k; None: N where that is above 1.
        reads: the grader says which answer it read, so `unparsable` and `majority@N` mean something.
    """
    sampled = [sample for sample in samples if not sample.greedy]
    scores = [[s.reward for s in own if s.reward is not None] for own in by_question(sampled).values()]
    scores = [own for own in scores if own]
    accuracy = estimate([_share(map(is_correct, own)) for own in scores])
    found = {"accuracy": accuracy.mean, "interval": accuracy.half}
    if greedy := [sample for sample in samples if sample.greedy]:
        found["greedy"] = _share(is_correct(sample.reward) for sample in greedy if sample.reward is not None)
    found |= {
        "reward": _share(math.fsum(own) / len(own) for own in scores),
        "length": _share(sample.tokens for sample in sampled),
        "truncated": _share(sample.finish == "length" for sample in sampled),
        "unscorable": float(sum(sample.reward is None for sample in samples)),
    }
    if reads:
        found["unparsable"] = _share(sample.verdict == "unparsable" for sample in sampled if sample.reward is not None)
    for k in pass_at if pass_at is not None else (count,) if count > 1 else ():
        enough = [own for own in scores if len(own) >= k]
        found[f"pass@{k}"] = _share(pass_at_k(len(own), sum(map(is_correct, own)), k) for own in enough)
    if reads and count > 1:
        found[f"majority@{count}"] = _share(majority(_classes(own)) for own in by_question(sampled).values())
    return found


def by_category(samples: Sequence[Sample]) -> dict[str, Estimate]:
    """Accuracy (Average@N) of each category, in the order of their names; {} for a task without categories."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.category is not None:
            found[sample.category].append(sample)
    return {name: estimate(list(accuracies(found[name]).values())) for name in sorted(found)}


def accuracies(samples: Sequence[Sample], greedy: bool = False) -> dict[str, float]:
    """Question -> share of its sampled (or greedy) completions that are correct, of those that could be scored."""
    found: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        if sample.greedy == greedy and sample.reward is not None:
            found[sample.id].append(is_correct(sample.reward))
    return {id: _share(own) for id, own in found.items()}


def by_question(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by the question that they answer."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.id].append(sample)
    return found


@contextmanager
def grading_ahead(rollout: RolloutEngine, reward: Reward) -> Iterator[Reward]:
    """Within, texts that `rollout` has finished are graded while it samples others, where both can.

    Gives the reward to grade its completions with.
    """
    early = ahead(reward) if hasattr(rollout, "on_text") else None
    if early is None:
        yield reward
        return
    rollout.on_text = early.begin  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield early
    except BaseException:
        early.close()
        raise
    finally:
        rollout.on_text = None  # pyright: ignore[reportAttributeAccessIssue]


def grade(groups: Sequence[Group], reward: Reward) -> list[list[Graded]]:
    """Set every group's rewards from its completions' texts; returns the verdicts, group by group."""
    examples = [group.example for group in groups for _ in group.completions]
    rows = [completion for group in groups for completion in group.completions]
    graded = iter(reward(examples, [row.text for row in rows], [row.tokens for row in rows]))
    verdicts = [[next(graded) for _ in group.completions] for group in groups]
    for group, own in zip(groups, verdicts, strict=True):
        group.rewards = [verdict.value for verdict in own]
    return verdicts


def errors(verdicts: Sequence[Sequence[Graded]]) -> list[str]:
    """Why rows have no score."""
    return [verdict.error for own in verdicts for verdict in own if verdict.error is not None]


def is_correct(reward: float) -> bool:
    """A reward of 1 is a correct answer; partial credit is not."""
    return reward >= 1.0


def _classes(samples: Sequence[Sample]) -> list[tuple[int, bool]]:
    """(votes, correct) of each set of equal answers of a question; its first sample's reward decides."""
    votes: dict[int, int] = defaultdict(int)
    for sample in samples:
        if sample.vote is not None:
            votes[sample.vote] += 1
    rewards = {sample.index: sample.reward for sample in samples}
    return [(count, is_correct(rewards[first] or 0.0)) for first, count in votes.items()]


def _share(values: Any) -> float:
    listed = [float(value) for value in values]
    return math.fsum(listed) / len(listed) if listed else math.nan
