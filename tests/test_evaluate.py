"""Average@N, pass@N and greedy accuracy, with rows that cannot be scored left out and counted."""

from __future__ import annotations

import pytest

from covary.evaluate import Evaluator, pass_at_k
from covary.prompts import load_template
from covary.rewards import Graded
from covary.types import Completion, Example, Group, Sampling
from tests.models import byte_tokenizer


def test_pass_at_k():
    assert [pass_at_k(4, 2, k) for k in (1, 2, 4)] == pytest.approx([0.5, 0.833333, 1.0], abs=1e-6)
    assert pass_at_k(3, 0, 2) == 0
    per_problem = [pass_at_k(1, int(i < 50), 1) for i in range(164)]
    assert sum(per_problem) / 164 == pytest.approx(0.304878, abs=1e-6)
    with pytest.raises(ValueError, match="at least 10 samples per problem, got 1"):
        pass_at_k(1, 1, 10)


class Scripted:
    """A rollout engine whose completions are the rewards to come, as text."""

    def __init__(self, texts: list[list[str]]) -> None:
        self.texts = texts
        self.seeds: list[int] = []

    def generate(self, plans, groups, sampling, seed):
        self.seeds.append(seed)
        assert [sum(r.count for r in plan) for plan in plans] == [len(t) for t in self.texts]
        return [
            Group(g.example, g.contexts, [Completion([1] * len(t), t, "length" if t == "0" else "eos") for t in texts])
            for g, texts in zip(groups, self.texts, strict=True)
        ]

    def load_weights(self, state, version):
        raise AssertionError("evaluation loads no weights")


class Reads:
    name = "reads"

    def __call__(self, examples, completions, token_ids):
        return [Graded(None, "no verdict") if text == "?" else Graded(float(text)) for text in completions]

    def close(self) -> None:
        """Nothing to end."""


def evaluate(texts: list[list[str]]) -> dict[str, float]:
    examples = [Example(str(i), "q") for i in range(len(texts))]
    evaluator = Evaluator(
        "t", examples, Scripted(texts), Reads(), load_template("chat"), byte_tokenizer(), Sampling(4), 2, 7
    )
    return {name.removeprefix("eval/t/"): value for name, value in evaluator()[0].items()}


def test_metrics():
    found = evaluate([["1", "0", "1"], ["0", "0.5", "0"], ["1", "1", "0"]])
    assert found["accuracy"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["pass@2"] == pytest.approx(2 / 3)
    assert found["greedy"] == pytest.approx(1 / 3)
    assert found["reward"] == pytest.approx((0.5 + 0.25 + 1) / 3)
    assert found["truncated"] == pytest.approx(2 / 6)
    assert found["unscorable"] == 0


def test_rows_without_a_score_are_left_out_of_means_and_counted():
    found = evaluate([["1", "?", "1"], ["?", "?", "?"], ["0", "0", "0"]])
    assert found["accuracy"] == pytest.approx((1 + 0) / 2)  # the mean of problem means, over problems with a score
    assert found["pass@2"] == 0  # of problems with all their samples
    assert found["greedy"] == 0.5
    assert found["unscorable"] == 4
