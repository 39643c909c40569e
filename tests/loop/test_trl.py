"""Data sets and reward functions as users of TRL have them, unchanged, in both reward conventions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covary.types import UserError
from tests.loop.mini import metrics, rollouts, run

# Written as TRL's documentation tells its users to write them.


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.search(r"[a-z]", content) else 0.0 for content in contents]


def accuracy_reward(completions, solution, **kwargs):
    """Of conversations. The digits that a random model happens to write are its answer."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(str(gold)[0] in content) for content, gold in zip(contents, solution, strict=True)]


def text_reward(prompts, completions, solution, level, **kwargs):
    assert all(isinstance(p, str) for p in prompts)
    assert all(isinstance(c, str) for c in completions)
    assert {type(s) for s in solution} == {int}
    return [sum(c.isupper() for c in text) / (1 + len(text)) + n for text, n in zip(completions, level, strict=True)]


async def slow_reward(completions, **kwargs):
    return [1.0 if "a" in completion[0]["content"] else 0.0 for completion in completions]


def abstaining_reward(completions, task, **kwargs):
    return [0.5 + i % 2 if kind == "math" else None for i, kind in enumerate(task)]


# Covary's own convention beside them.


def one_at_a_time(completion, answer, level):
    assert answer.isdigit()
    return sum(c.isupper() for c in completion) / (1 + len(completion)) + level


def rows(conversational: bool) -> list[dict[str, Any]]:
    questions = [f"{i} + {i} =" for i in range(8)]
    return [
        {
            "prompt": [{"role": "user", "content": q}] if conversational else q,
            "solution": 2 * i,
            "level": i % 2,
            "task": "math" if i % 2 else "code",
        }
        for i, q in enumerate(questions)
    ]


def train(folder: Path, conversational: bool, reward: Any, **task: Any) -> list[dict[str, Any]]:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(conversational)))
    run(folder, task={"name": "jsonl", "path": str(data), **task}, algorithm={"name": "grpo"}, reward=reward, steps=2)
    return metrics(folder / "run")[1:]


@pytest.mark.parametrize("reward", [length_reward, format_reward, accuracy_reward, slow_reward])
def test_conversational_prompts(tmp_path: Path, reward: Any) -> None:
    for row in train(tmp_path, True, reward):
        assert row["rows/unscorable"] == 0
        assert row["grad_norm"] >= 0
    for row in rollouts(tmp_path / "run", 1):
        by_hand = {
            length_reward: row["tokens"],
            format_reward: bool(re.search(r"[a-z]", row["completion"])),
            accuracy_reward: (str(2 * (int(row["id"].split("/")[1]) - 1))[0]) in row["completion"],
            slow_reward: "a" in row["completion"],
        }
        assert row["reward"] == float(by_hand[reward])


@pytest.mark.parametrize("raw", [False, True])
def test_text_prompts_in_both_conventions_give_the_same_run(tmp_path: Path, raw: bool) -> None:
    (tmp_path / "own").mkdir()
    theirs = train(tmp_path, False, text_reward, raw=raw)
    ours = train(tmp_path / "own", False, one_at_a_time, raw=raw, answer="solution")
    for a, b in zip(theirs, ours, strict=True):
        assert a["reward/mean"] == pytest.approx(b["reward/mean"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] > 0


def test_none_is_left_out(tmp_path: Path) -> None:
    (first, _) = train(tmp_path, True, abstaining_reward)
    code = sum((int(row["id"].split("/")[1]) - 1) % 2 == 0 for row in rollouts(tmp_path / "run", 1))
    assert first["rows/unscorable"] == code > 0


@pytest.mark.parametrize("form", ["explicit", "implicit", "messages"])
def test_preferences_and_conversations_train_without_settings(tmp_path: Path, form: str) -> None:
    data = tmp_path / "data.jsonl"
    lines = []
    for i in range(8):
        user = {"role": "user", "content": f"say {i}"}
        good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad!"))
        lines.append(
            {
                "explicit": {"prompt": [user], "chosen": [good], "rejected": [bad]},
                "implicit": {"chosen": [user, good], "rejected": [user, bad]},
                "messages": {"messages": [user, good]},
            }[form]
        )
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(
        tmp_path, task={"name": "jsonl", "path": str(data)}, reward=None, steps=12,
        algorithm={"name": "sft" if form == "messages" else "dpo"},
        rollout={"engine": "dataset", "prompts": 4, "completions": 2, "max_tokens": 16}, optimizer={"lr": 1e-2},
    )  # fmt: skip
    losses = [row["loss"] for row in metrics(tmp_path / "run")[1:]]
    assert losses[-1] < 0.8 * losses[0]
    assert {row["completion"] for row in rollouts(tmp_path / "run", 1)} == (
        {"good"} if form == "messages" else {"good", "bad!"}
    )


def test_a_method_without_rewards_does_not_learn_from_rejected_completions(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "say", "chosen": "good", "rejected": "bad!"}\n')
    changes: dict[str, Any] = {
        "reward": None,
        "algorithm": {"name": "sft"},
        "rollout": {"engine": "dataset", "prompts": 1, "max_tokens": 8},
    }
    with pytest.raises(UserError, match="learns from every completion alike; name the column to learn from"):
        run(tmp_path, task={"name": "jsonl", "path": str(data)}, optimizer={}, **changes)
    run(tmp_path, task={"name": "jsonl", "path": str(data), "completion": "chosen"}, optimizer={}, **changes)
    assert {row["completion"] for row in rollouts(tmp_path / "run", 1)} == {"good"}
