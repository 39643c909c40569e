"""The protocol fits what comes later: three test-only algorithms, each at most 30 lines, run for two steps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch

from covary.batch import Algorithm
from covary.ops import all_equal, center, group_sum, masked_sum
from covary.types import Request, RunError, Score, Stream
from tests.loop.mini import Sums, metrics, rollouts, run


@dataclass(frozen=True)
class GreedyBaseline(Algorithm):
    """ReMax in small: k - 1 samples, and a greedy row that is their baseline and is never learned from."""

    def plan(self, prompts, k, rng):
        return [[Request(k - 1), Request(1, decoding="greedy", learn=False)] for _ in prompts]

    def prepare(self, batch, reduce):
        baseline = group_sum(torch.where(batch.learn, 0.0, batch.rewards), batch.group)
        return {"advantage": batch.rewards - baseline[batch.group]}

    def loss(self, scores, batch):
        assert batch.learn.all()
        return -(batch["advantage"] * masked_sum(scores["policy"], batch.mask)).sum() / batch.total("rows")


@dataclass(frozen=True)
class KeepsTheUnsettled(Algorithm):
    """Dynamic sampling in small: groups of one reward are dropped and drawn anew; the state counts draws."""

    min_group = 2

    def select(self, batch, state):
        return ~all_equal(batch.rewards, batch.group), {"draws": state.get("draws", 0) + 1}

    def loss(self, scores, batch):
        advantage = center(batch.rewards, batch.group)
        return -(advantage * masked_sum(scores["policy"], batch.mask)).sum() / batch.total("tokens")


@dataclass(frozen=True)
class TwoContexts(Algorithm):
    """CoVRL in small: traces with and without sight of the answer, rewarded by the likelihood of the answer."""

    normalisers = ("trace_tokens",)
    frozen = (Score("answer", Stream("old"), tokens="answer", level="sequence", early=True),)
    trained = (
        Score("policy"),
        Score("answer_live", tokens="answer", level="sequence"),
        Score("gap", (Stream("policy", "posterior"), Stream("policy", "prompt")), "kl"),
    )

    def plan(self, prompts, k, rng):
        prior = rng.binomial(k, 0.5)
        return [[Request(prior), Request(k - prior, context="posterior")] for _ in prompts]

    def reward(self, batch):
        return torch.where(batch.answer_mask.any(-1), batch["answer"], torch.nan)

    def prepare(self, batch, reduce):
        return {"trace_tokens": batch.mask.sum(-1), "advantage": center(batch.rewards, batch.group)}

    def loss(self, scores, batch):
        trace = masked_sum(batch["advantage"].unsqueeze(-1) * scores["policy"] - scores["gap"], batch.mask)
        return -(trace + scores["answer_live"]).sum() / batch.total("trace_tokens")


@pytest.mark.parametrize("algorithm", [GreedyBaseline, KeepsTheUnsettled, TwoContexts])
def test_each_is_at_most_30_lines(algorithm):
    assert len(inspect.getsource(algorithm).splitlines()) <= 30


def test_a_greedy_row_feeds_prepare_and_is_not_learned_from(tmp_path):
    run(tmp_path, algorithm=GreedyBaseline())
    rows = rollouts(tmp_path / "run", 2)
    greedy = rows[3::4]
    assert len(rows) == 16
    assert all(row["weight"] is None for row in greedy)
    for group in range(4):
        *samples, baseline = rows[4 * group : 4 * group + 4]
        for row in samples:
            # w_i of sum_i w_i grad log pi: the advantage itself (rows cancel, tokens are averaged)
            assert row["weight"] == pytest.approx(row["reward"] - baseline["reward"], abs=1e-6)
    assert metrics(tmp_path / "run")[-1]["rows/invalid"] == 0


def first_byte(completion: str, answer: str | None) -> float:
    return float(completion[:1] > "a")


def fails_once(completion: str, answer: str | None) -> float:
    if completion[:1] == "\\":
        raise ValueError("no verdict")
    return 0.0


def test_select_that_drops_everything_is_no_failure_of_the_reward(tmp_path):
    with pytest.raises(RunError, match="without one update"):
        run(
            tmp_path, algorithm=KeepsTheUnsettled(), reward=fails_once,
            rollout={"prompts": 4, "completions": 2, "max_tokens": 6, "max_regenerations": 40},
        )  # fmt: skip
    for row in metrics(tmp_path / "run")[1:]:
        assert row["groups/deselected"] > 20
        assert "loss" not in row
    assert sum(row["rows/unscorable"] for row in metrics(tmp_path / "run")[1:]) > 0


def test_dropped_groups_are_replaced_boundedly_and_the_state_survives(tmp_path):
    changes = {
        "algorithm": KeepsTheUnsettled(),
        "reward": first_byte,
        "rollout": {"prompts": 4, "completions": 2, "max_tokens": 6, "max_regenerations": 3},
    }
    run(tmp_path, **changes)
    rows = metrics(tmp_path / "run")
    for step in (1, 2):
        samples = rollouts(tmp_path / "run", step)
        groups = [samples[i : i + 2] for i in range(0, len(samples), 2)]
        settled = [g for g in groups if g[0]["reward"] == g[1]["reward"]]
        assert rows[step]["groups/deselected"] == len(settled) > 0
        assert len(groups) > 4
        assert all(row["weight"] is None for group in settled for row in group)
        assert sum(row["weight"] is not None for row in samples) == 2 * (len(groups) - len(settled)) <= 8
    from covary.checkpoint import latest

    draws = latest(tmp_path / "run").state()["progress"]["algorithm"]["draws"]
    assert 2 < draws <= 2 * (1 + 3)
    # Resumed after one of two steps, the same rows come out: the state went on from where it was.
    other = tmp_path / "other"
    other.mkdir()
    run(other, steps=1, **changes)
    import covary

    covary.train(resume=other / "run", steps=2, quiet=True, reward=first_byte)
    assert rollouts(other / "run", 2) == rollouts(tmp_path / "run", 2)


TEMPLATE = """
contexts:
  prompt: "Q: {question}\\nA:"
  posterior: "Q: {question} (it is {answer})\\nA:"
stop: "e"
glue: " so "
answer: "{answer}."
"""


def test_two_contexts_answer_tokens_and_a_two_stream_quantity(tmp_path):
    template = tmp_path / "think.yaml"
    template.write_text(TEMPLATE)
    run(
        tmp_path,
        algorithm=TwoContexts(),
        task=Sums(template=str(template)),
        reward=None,
        rollout={"prompts": 8, "completions": 8, "max_tokens": 48},
        optimizer={"lr": 1e-3, "prompts": 4},
    )
    for step in (1, 2):
        rows = rollouts(tmp_path / "run", step)
        stopped = [row for row in rows if row["finish"] == "stop_string"]
        assert 0 < len(stopped) < len(rows)
        assert all("e" not in row["completion"] for row in stopped)
        # The answer's log-likelihood: about log(1/259) per byte of a random model, two or three bytes.
        assert all(-20 < row["reward"] < -8 for row in stopped)
        assert all(row["reward"] is None and row["weight"] is None for row in rows if row["finish"] != "stop_string")
        assert sum(row["weight"] is not None for row in stopped) == len(stopped)
    row = metrics(tmp_path / "run")[-1]
    assert row["completion/length"] == pytest.approx(sum(r["tokens"] for r in rows) / len(rows))
    assert "entropy" not in row  # re-encoded rows have no log-probs of the sampler
    # Evaluation goes on past the trace's stop string: nothing graded there was cut.
    assert metrics(tmp_path / "run")[0]["eval/sums/length"] > row["completion/length"]
    assert row["rows/unscorable"] == sum(r["finish"] != "stop_string" for r in rows)
    assert row["grad_norm"] > 0
