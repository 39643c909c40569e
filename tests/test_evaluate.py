"""Average@N, pass@k, majority and greedy accuracy, with rows that cannot be scored left out and counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covary.evaluate import Evaluator, Sample, accuracies, by_category, figures
from covary.prompts import load_template
from covary.rewards import Graded, Grader, build_reward
from covary.types import Completion, Example, Group, Sampling
from tests.models import byte_tokenizer


class Scripted:
    """A rollout engine whose completions are given, as text."""

    def __init__(self, texts: list[list[str]]) -> None:
        self.texts = texts

    def generate(self, plans, groups, sampling, seed):
        assert [sum(r.count for r in plan) for plan in plans] == [len(t) for t in self.texts]
        kinds = [[r.decoding == "greedy" for r in plan for _ in range(r.count)] for plan in plans]
        return [
            Group(
                group.example,
                group.contexts,
                [
                    Completion([1] * len(text), text, "length" if text == "0" else "eos", greedy=greedy)
                    for text, greedy in zip(texts, own, strict=True)
                ],
            )
            for group, texts, own in zip(groups, self.texts, kinds, strict=True)
        ]


class Reads:
    """A Python function's reward: the text is the score."""

    name = "reads"

    def __call__(self, examples, completions, token_ids):
        return [Graded(None, "no verdict") if text == "?" else Graded(float(text)) for text in completions]

    def close(self) -> None:
        """Nothing to end."""


def evaluator(texts: list[list[str]], reward: Any = None, answer: str | None = None, **changes: Any) -> Evaluator:
    examples = [Example(str(i), "q", answer) for i in range(len(texts))]
    engine: Any = Scripted(texts)
    made = Evaluator(
        "t", examples, engine, reward or Reads(), load_template("chat"), byte_tokenizer(), Sampling(4), 2, 7
    )
    return replace(made, **changes)


def evaluate(texts: list[list[str]], **changes: Any) -> dict[str, float]:
    metrics, _ = evaluator(texts, **changes)()
    assert all(name.startswith("eval/t/") for name in metrics)
    return {name.removeprefix("eval/t/"): value for name, value in metrics.items()}


def test_metrics() -> None:
    found = evaluate([["1", "0", "1"], ["0", "0.5", "0"], ["1", "1", "0"]])
    assert found["accuracy"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["interval"] == pytest.approx(1.959964 * math.sqrt(0.25 / 3))
    assert found["pass@2"] == pytest.approx(2 / 3)
    assert found["greedy"] == pytest.approx(1 / 3)
    assert found["reward"] == pytest.approx((0.5 + 0.25 + 1) / 3)
    assert found["length"] == pytest.approx((5 + 3) / 6)
    assert found["truncated"] == pytest.approx(2 / 6)
    assert found["unscorable"] == 0
    assert not {"unparsable", "majority@2"} & found.keys()  # a function does not say which answer it read


def test_rows_without_a_score_are_left_out_of_means_and_counted() -> None:
    found = evaluate([["1", "?", "1"], ["?", "?", "?"], ["0", "0", "0"]])
    assert found["accuracy"] == pytest.approx((1 + 0) / 2)  # the mean of problem means, over problems with a score
    assert found["pass@2"] == 0  # of problems with enough scored samples
    assert found["greedy"] == 0.5
    assert found["unscorable"] == 4
    assert evaluator([["?", "1", "1"]])()[1] == ["no verdict"]


def test_without_a_greedy_completion() -> None:
    found = evaluate([["1", "0"], ["0", "0"]], greedy=False)
    assert found["accuracy"] == 0.25
    assert "greedy" not in found


def test_pass_at_several_k() -> None:
    found = evaluate([["1", "1", "0", "0"], ["0", "0", "0", "0"]], samples=4, greedy=False, pass_at=(1, 2, 4))
    assert [found[f"pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, 0.8333333 / 2, 0.5])
    assert found["accuracy"] == found["pass@1"]


def test_problem_means_are_not_pooled() -> None:
    """Case E01 c: one problem with one sample, one with three."""
    rows = [Sample("a", 0, False, "", "eos", 1, 1.0)] + [Sample("b", i, False, "", "eos", 1, 0.0) for i in range(3)]
    assert figures(rows, 3, (), reads=False)["accuracy"] == 0.5


@pytest.fixture(scope="module")
def mathematics():
    reward = build_reward(Grader("math"))
    yield reward
    reward.close()


def boxed(*answers: str) -> list[str]:
    return [rf"So it is \boxed{{{answer}}}." for answer in answers]


def test_equal_answers_vote_together(shared: Path, mathematics) -> None:
    """Case E03: by strings 1/3 would win with two votes."""
    rows = (json.loads(line) for line in (shared / "cases" / "cases.jsonl").read_text().splitlines())
    found = next(row for row in rows if row["id"] == "E03")
    texts = boxed(*found["input"]["answers"])
    made = evaluator([texts], mathematics, found["input"]["gold"], samples=5, greedy=False)
    samples = made.ask(made.examples)
    assert [sample.reward for sample in samples] == found["expected"]["correct_per_sample"]
    assert [sample.vote for sample in samples] == [0, 0, 2, 2, 0]
    metrics = made.metrics(samples)
    assert metrics["eval/t/accuracy"] == pytest.approx(found["expected"]["average@5"])
    assert metrics["eval/t/majority@5"] == 1


def test_answers_of_several_questions_are_told_apart_in_rounds(mathematics) -> None:
    texts = [boxed("2", "3", "4/2", "1"), boxed("7", "7.0", "14/2", "5"), boxed("5", "6", "8", "9")]
    made = evaluator(texts, mathematics, "1", samples=4, greedy=False)
    samples = made.ask(made.examples)
    assert [sample.vote for sample in samples] == [0, 1, 0, 3, 0, 0, 0, 3, 0, 1, 2, 3]
    assert made.metrics(samples)["eval/t/majority@4"] == 0


def test_only_completions_are_graded(mathematics) -> None:
    """Case E04: the prompt names a box and even the answer."""
    prompt = r"Put the result in \boxed{}. Example: \boxed{7}. What is 3+4?"
    made = evaluator([["I think it is seven."]], mathematics, samples=1, greedy=False)
    made = replace(made, examples=[Example("a", prompt, "7")])
    (sample,) = made.ask(made.examples)
    assert sample.reward == 0


def test_categories() -> None:
    rows = [
        Sample("a", 0, False, "", "eos", 1, 1.0, category="x"),
        Sample("a", 1, False, "", "eos", 1, 0.0, category="x"),
        Sample("b", 0, False, "", "eos", 1, 1.0, category="y"),
        Sample("b", 1, True, "", "eos", 1, 0.0, category="y"),
    ]
    assert {name: found.mean for name, found in by_category(rows).items()} == {"x": 0.5, "y": 1.0}
    assert accuracies(rows) == {"a": 0.5, "b": 1.0}
    assert accuracies(rows, greedy=True) == {"b": 0.0}
