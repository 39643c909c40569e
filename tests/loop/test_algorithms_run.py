"""Every algorithm through the whole loop on a tiny random model, and what only the loop can show of one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from covary.algorithms import ALGORITHMS
from covary.api import build, resolve
from covary.config import validate
from covary.log import Screen
from covary.types import UserError
from tests.loop.mini import (
    Sums,
    comparable,
    metrics,
    needs,
    on_traces,
    pairs,
    rewards_itself,
    rollouts,
    run,
    vowels,
)
from tests.models import random_llama, save_random_model

DEFAULTS = [{"name": name} for name in ALGORITHMS]
VARIANTS = [
    {"name": "gvpo", "terms": ["covariance"], "entropy_coef": 0.01},
    {"name": "rloo", "kl_coef": 0.0},
    {"name": "reinforce_pp", "kl_coef": 0.0},
    {"name": "reinforce_pp_baseline", "kl_coef": 0.0},
    {"name": "grpo", "kl_coef": 0.0},
    {"name": "gvpo_opd", "alpha": 0.75, "length_ref": 6.0},
    {"name": "supervised_kd", "data": "teacher", "temperature": 2.0},
    {"name": "gkd", "on_policy": 0.0, "off_policy": "teacher", "beta": 0.0},
    {"name": "gkd", "on_policy": 1.0, "beta": 1.0},
    {"name": "minillm", "teacher_mix": 0.0, "length_norm": False, "whitening": False},
    {"name": "pg_opd_sequence", "baseline": "none"},
    {"name": "covrl", "kl_denominator": "full", "nll_select": "is_weighted", "ratio": "hybrid_exact", "preset": "elbo"},
    {"name": "covrl", "source_draw": "question", "per_source": True, "advantage_std": True, "prior_share": 0.7},
]


def identity(algorithm: dict[str, Any]) -> str:
    return "-".join([algorithm["name"], *(f"{k}={v}" for k, v in algorithm.items() if k != "name")])


def moved(model: torch.nn.Module) -> bool:
    start = random_llama().state_dict()
    return any(not torch.equal(value, start[name]) for name, value in model.state_dict().items())


def of_prompts(rows: list[dict], k: int) -> list[list[dict]]:
    return [rows[i : i + k] for i in range(0, len(rows), k)]


@pytest.mark.parametrize("algorithm", DEFAULTS + VARIANTS, ids=identity)
def test_three_steps(tmp_path, algorithm):
    trained = run(tmp_path, algorithm=algorithm, **{"steps": 3, **needs(algorithm, tmp_path)})
    rows = metrics(tmp_path / "run")[1:]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["rows/invalid"] == row["updates/skipped"] == 0
    learned = [row.get("grad_norm", 0) > 0 for row in rows]
    # Traces of a random model may hold nothing to learn from in a later step.
    assert learned[0] if rewards_itself(algorithm) else all(learned)
    assert moved(trained.model)


BETWEEN_PROMPTS = ("covrl", "ravr")  # whose KL is one of the policy to itself


@pytest.mark.parametrize(
    "name", [n for n, a in ALGORITHMS.items() if "kl_coef" in a.__dataclass_fields__ and n not in BETWEEN_PROMPTS]
)
def test_no_kl_loads_no_initial_model(tmp_path, name):
    model = save_random_model(tmp_path / "model")

    def models(kl_coef: float) -> set[str]:
        template = on_traces(tmp_path)["task"].template if rewards_itself({"name": name}) else None
        recipe = {
            "model": {"name": str(model)}, "task": Sums(template=template), "algorithm": {"name": name, "kl_coef": kl_coef}, "steps": 1,
            "rollout": {"prompts": 2, "completions": 2, "max_tokens": 4},
        }  # fmt: skip
        reward = None if template else vowels
        built = build(resolve(validate(recipe, where="test"), reward), Screen(quiet=True))
        return set(built.engine.models)  # pyright: ignore[reportAttributeAccessIssue]

    assert "initial" not in models(0.0)
    assert "initial" in models(0.1)


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "dpo"}, {"name": "gvpo", "terms": ["covariance"], "entropy_coef": 0.01}, {"name": "reinforce_pp"}],
    ids=identity,
)
def test_the_size_of_micro_batches_changes_nothing(tmp_path, algorithm):
    """Coupled groups in two passes, an entropy with gradient, advantages per token."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    run(a, algorithm=algorithm)
    run(b, algorithm=algorithm, engine={"micro_batch_tokens": 64})
    for left, right in zip(metrics(a / "run"), metrics(b / "run"), strict=True):
        assert comparable(left) == pytest.approx(comparable(right), rel=1e-3, abs=1e-5)


def first_byte(completion: str, answer: str | None) -> float:
    return float(completion[:1] > "a")


def test_dapo_draws_new_prompts_for_groups_without_differences(tmp_path):
    run(
        tmp_path, algorithm={"name": "dapo"}, reward=first_byte,
        rollout={"prompts": 4, "completions": 2, "max_tokens": 6, "max_regenerations": 40},
    )  # fmt: skip
    for step, row in enumerate(metrics(tmp_path / "run")[1:], start=1):
        groups = of_prompts(rollouts(tmp_path / "run", step), 2)
        learned = [group for group in groups if all(r["weight"] is not None for r in group)]
        assert len(learned) == 4
        assert all(len({r["reward"] for r in group}) == 2 for group in learned)
        dropped = [group for group in groups if group not in learned]
        assert row["groups/deselected"] == len(dropped) > 0
        assert all(r["weight"] is None for group in dropped for r in group)


def test_remax_learns_from_samples_against_their_greedy_row(tmp_path):
    """Weights are R - R(greedy); a group whose greedy row could not be scored leaves, and is counted."""

    def no_verdict_on_the_first_baseline(completions, **columns):
        rewards: list[float | None] = [vowels(messages[-1]["content"], None) for messages in completions]
        rewards[3] = None
        return rewards

    run(
        tmp_path, algorithm={"name": "remax"}, reward=no_verdict_on_the_first_baseline,
        rollout={"prompts": 4, "completions": 4, "max_tokens": 6}, optimizer={"lr": 1e-3},
    )  # fmt: skip
    for step, row in enumerate(metrics(tmp_path / "run")[1:], start=1):
        without, *groups = of_prompts(rollouts(tmp_path / "run", step), 4)
        assert all(r["weight"] is None for r in without)
        assert row["rows/unscorable"] == 1
        assert row["rows/invalid"] == 3
        assert row["groups/singleton"] == 1
        for *samples, greedy in groups:
            assert greedy["weight"] is None
            for sample in samples:
                assert sample["weight"] == pytest.approx(sample["reward"] - greedy["reward"], abs=1e-6)


def test_remax_of_one_completion_has_nothing_to_learn_from(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.completions"):
        run(tmp_path, algorithm={"name": "remax"}, rollout={"prompts": 4, "completions": 1, "max_tokens": 6})


def test_dpo_from_the_best_and_the_worst_of_a_group(tmp_path):
    run(
        tmp_path, algorithm={"name": "dpo"}, steps=3,
        rollout={"prompts": 4, "completions": 4, "max_tokens": 6}, optimizer={"lr": 1e-3},
    )  # fmt: skip
    first = metrics(tmp_path / "run")[1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the policy is still the initial one
    assert first["dpo/margin"] == 0
    for group in of_prompts(rollouts(tmp_path / "run", 1), 4):
        rewards = [r["reward"] for r in group]
        best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
        signs = [(r["weight"] > 0) - (r["weight"] < 0) for r in group]
        expected = [0] * 4 if best == worst else [(i == best) - (i == worst) for i in range(4)]
        assert signs == expected


def test_dpo_from_preferences_in_a_file(tmp_path):
    run(
        tmp_path, algorithm={"name": "dpo"}, reward=None, steps=10,
        task={**pairs(tmp_path / "data.jsonl"), "rewards": "rewards"},
        rollout={"engine": "dataset", "prompts": 4, "completions": 2, "max_tokens": 8}, optimizer={"lr": 3e-3},
    )  # fmt: skip
    rows = metrics(tmp_path / "run")
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["loss"] < 0.6
    assert rows[-1]["dpo/accuracy"] == 1.0
    assert rows[-1]["dpo/margin"] > rows[2]["dpo/margin"] > 0
    assert rows[-1]["reward/mean"] == 0.5


def test_raft_with_nothing_correct_stays_where_it_is(tmp_path):
    trained = run(tmp_path, algorithm={"name": "raft", "keep": "correct"}, reward=lambda completion, answer: 0.0)
    assert [row["loss"] for row in metrics(tmp_path / "run")[1:]] == [0.0, 0.0]
    assert not moved(trained.model)


def test_raft_learns_from_correct_rows_alone(tmp_path):
    trained = run(tmp_path, algorithm={"name": "raft", "keep": "correct"}, reward=first_byte)
    rows = rollouts(tmp_path / "run", 1) + rollouts(tmp_path / "run", 2)
    assert {r["reward"] for r in rows} == {0.0, 1.0}
    assert all((r["weight"] > 0) == (r["reward"] == 1) for r in rows)
    assert all(r["weight"] >= 0 for r in rows)
    assert moved(trained.model)
