"""The doctor says why a run cannot learn, once, and nothing of a run that can."""

from __future__ import annotations

import re
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import covary
from covary.algorithms import GVPO
from covary.checkpoint import checkpoints
from covary.config import load_recipe
from covary.doctor import HARMLESS, SYMPTOMS
from covary.prompts import open_turn_end
from covary.rewards import Grader
from covary.rollout import transformers as rollout
from covary.types import RunError
from tests.loop.mini import Sums, comparable, metrics, run
from tests.models import byte_tokenizer, save_with_another_end

ROOT = Path(__file__).parents[2]
SIZE = {"prompts": 4, "completions": 4, "max_tokens": 6}
SHORT = {"rollout": {**SIZE, "max_tokens": 2}, "optimizer": {"lr": 1e-3}, "seed": 3}


def findings(folder: Path) -> dict[str, int]:
    """The step of each finding."""
    named = [
        (name.removeprefix("doctor/"), row["step"]) for row in metrics(folder) for name in row if "doctor/" in name
    ]
    assert len(dict(named)) == len(named), "said twice"
    return dict(named)


def half(completion: str, answer: str | None) -> float:
    return 0.5


@dataclass(frozen=True)
class Boxed(Sums):
    def load(self):
        return replace(super().load(), grader=Grader("exact", "boxed"))


@dataclass(frozen=True)
class Detached(GVPO):
    def loss(self, scores, batch):
        return 0.0 * super().loss(scores, batch)


@dataclass(frozen=True)
class NotANumber(GVPO):
    def features(self, example, completion):
        return {"z": float("nan")}


PROVOKED: list[tuple[str, int, dict[str, Any], str]] = [
    ("truncated", 3, SHORT, r"100% of the completions were cut at rollout.max_tokens = 2,"),
    ("no_end", 5, SHORT, r"not one of 16 completions .* no end token \('<\|im_end\|>'\)"),
    ("unparsed", 3, {"task": Boxed(), "reward": None}, "extractor 'boxed' found an answer in none of 16 completions"),
    ("unparsed", 3, {"reward": "answer_tags"}, "the grader 'answer_tags' could read an answer in none of 16"),
    ("unscorable", 3, {"reward": lambda completion, answer: None}, "none of 16 completions got a reward"),
    ("no_update", 3, {"optimizer": {"lr": 0.0}}, "the learning rate is 0"),
    ("no_update", 3, {"algorithm": Detached()}, "the gradient is exactly 0: the method keeps none"),
    ("no_update", 3, {"algorithm": NotANumber()}, r"no row was left to learn from \(rows/invalid 16, groups/singleton 4\)"),
    ("collapsed", 5, {"rollout": {**SIZE, "temperature": 0.01}}, "the same text, for each of 4 prompts"),
    ("no_reward", 5, {"reward": None}, "every one of 16 completions got reward 0,"),
    ("equal_rewards", 5, {"reward": half}, "every one of 16 completions got reward 0.5,"),
    ("equal_rewards", 5, {"reward": lambda completion, answer: 1.0}, "got reward 1 from the first step on"),
    ("equal_rewards", 5, {"reward": lambda completion, answer: float(answer)}, "the same reward, for each of 4 prompts"),
    ("old_kl", 3, {"optimizer": {"lr": 0.15, "prompts": 1, "passes": 2}}, r"kl/old is \d+\.\d+ nats"),
    (
        "initial_kl", 3, {"algorithm": {"name": "grpo"}, "optimizer": {"lr": 0.3, "prompts": 1}},
        r"kl/initial is \d.* nats per token",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "step", "changes", "text"), PROVOKED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_run_that_cannot_learn_says_why_once(tmp_path, capsys, name, step, changes, text):
    with suppress(RunError):  # some of these runs end without one update
        run(tmp_path, steps=step + 1, **changes)
    assert findings(tmp_path / "run")[name] == step
    said = [line for line in capsys.readouterr().out.splitlines() if re.search(text, line)]
    assert len(said) == 1
    assert said[0].startswith(f"doctor: step {step}, {SYMPTOMS[name][0]} steps in a row: ")


def test_few_completions_are_no_evidence(tmp_path):
    """12 steps of one prompt with 4 completions; 5 steps of equal rewards come by chance."""
    run(
        tmp_path, steps=13, reward=half, optimizer={"lr": 1e-3},
        rollout={"prompts": 1, "completions": 4, "max_tokens": 6},
    )  # fmt: skip
    assert findings(tmp_path / "run")["equal_rewards"] == 12


def test_a_policy_that_stops_to_end_its_answers_is_not_short_of_tokens(tmp_path, capsys, monkeypatch):
    original = rollout.TransformersRollout.generate

    def ends(self, plans, groups, sampling, seed):
        groups = original(self, plans, groups, sampling, seed)
        if self.weights_version < 2 * 5:
            for completion in (c for group in groups for c in group.completions):
                completion.finish = "eos"
        return groups

    monkeypatch.setattr(rollout.TransformersRollout, "generate", ends)
    run(tmp_path, steps=11)
    found = findings(tmp_path / "run")
    assert found["truncated"] == 8
    assert "no_end" not in found
    assert "the policy no longer ends its answers; go back" in capsys.readouterr().out


def test_every_finding_is_provoked_somewhere():
    elsewhere = {"past_end", "solved", "sampling_drift", "shorter", "longer"}
    assert {name for name, *_ in PROVOKED} | elsewhere == set(SYMPTOMS)


def test_a_sampler_with_other_log_probs(tmp_path, capsys, monkeypatch):
    """As of a rollout engine with stale weights or another temperature."""
    original = rollout.sample_tokens

    def other(logits, temperature, greedy, uniforms):
        tokens, logps = original(logits, temperature, greedy, uniforms)
        return tokens, logps - 0.3

    monkeypatch.setattr(rollout, "sample_tokens", other)
    run(tmp_path, steps=4)
    assert findings(tmp_path / "run")["sampling_drift"] == 3
    assert "kl/sampling is 0.05 nats per token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "limits", "reward", "changes_at"),
    [
        ("shorter", (8, 1), lambda completion, answer: len(completion) / 8, 8),
        ("longer", (2, 8), lambda completion, answer: 1 / (1 + len(completion)), 8),
        ("", (8, 1), lambda completion, answer: 1 / (1 + len(completion)), None),
        ("", (2, 8), lambda completion, answer: len(completion) / 8, None),
    ],
)
def test_lengths_against_the_runs_own_first_steps(tmp_path, monkeypatch, name, limits, reward, changes_at):
    """Collapse and explosion; what the reward asked for is neither."""
    original = rollout.TransformersRollout.generate

    def cut(self, plans, groups, sampling, seed):
        early = self.weights_version < 2 * 5  # two updates a step
        return original(self, plans, groups, replace(sampling, max_tokens=limits[not early]), seed)

    monkeypatch.setattr(rollout.TransformersRollout, "generate", cut)
    run(tmp_path, steps=9, reward=reward, rollout={**SIZE, "max_tokens": 8})
    found = findings(tmp_path / "run")
    assert {key: found[key] for key in ("shorter", "longer") if key in found} == ({name: changes_at} if name else {})


# -- the end of a turn ----------------------------------------------------------------------------------------


def test_completions_that_go_on_behind_their_turn(tmp_path, capsys):
    save_with_another_end(tmp_path / "model")
    run(tmp_path, steps=4, rollout={**SIZE, "max_tokens": 128}, eval={"max_tokens": 2})
    assert findings(tmp_path / "run")["past_end"] == 3
    said = capsys.readouterr().out
    advice = "ends no completion here (end tokens: '<pad>'): set rollout.stop: [\"<|im_end|>\"]"
    assert f"note: the chat template ends an answer with '<|im_end|>', which {advice}" in said
    assert (
        f"go on behind the end of their turn: the chat template ends an answer with '<|im_end|>', which {advice}"
        in said
    )


def test_the_advice_about_the_end_of_a_turn_helps(tmp_path, capsys):
    save_with_another_end(tmp_path / "model")
    run(tmp_path, steps=4, rollout={**SIZE, "max_tokens": 128, "stop": ["<|im_end|>"]}, eval={"max_tokens": 2})
    assert "past_end" not in findings(tmp_path / "run")
    assert "behind the end of their turn" not in capsys.readouterr().out


def test_where_a_chat_template_ends_a_turn():
    end, pad = 257, 258
    tokenizer = deepcopy(byte_tokenizer())
    assert open_turn_end(tokenizer, frozenset({end}), ()) is None
    assert open_turn_end(tokenizer, frozenset({pad}), ("<|im_end|>",)) is None
    found = open_turn_end(tokenizer, frozenset({pad}), ())
    assert found is not None
    assert (found.text, found.token) == ("<|im_end|>", end)
    # Turns that end with text: completions can be watched, but nothing is wrong yet.
    tokenizer.chat_template = "{% for m in messages %}{{ '\\n' + m['role'] + ': ' + m['content'] }}{% endfor %}"
    found = open_turn_end(tokenizer, frozenset({pad}), ())
    assert found is not None
    assert (found.text, found.token) == ("\nuser:", None)
    assert open_turn_end(tokenizer, frozenset({pad}), ("\nuser",)) is None
    # The end token stands behind the last answer only.
    tokenizer.chat_template += "{% if messages[-1].role == 'assistant' %}<pad>{% endif %}"
    assert open_turn_end(tokenizer, frozenset({pad}), ()) is None
    tokenizer.chat_template = "{{ raise_exception('one turn only') }}"
    assert open_turn_end(tokenizer, frozenset({pad}), ()) is None
    tokenizer.chat_template = None
    assert open_turn_end(tokenizer, frozenset({pad}), ()) is None


# -- stop, off, resume ----------------------------------------------------------------------------------------


def test_doctor_stop_ends_the_run_with_a_checkpoint(tmp_path):
    with pytest.raises(RunError, match=r"doctor: step 5.*got reward 0\.5.*the newest checkpoint is \S+step-000005"):
        run(tmp_path, steps=7, reward=half, doctor="stop", checkpoint={"every": 4})
    assert [c.step for c in checkpoints(tmp_path / "run")] == [4, 5]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]
    # A resume is a decision to go on; the run is then the one that was only warned.
    covary.train(resume=tmp_path / "run", quiet=True, reward=half)
    other = tmp_path / "other"
    other.mkdir()
    run(other, steps=7, reward=half)
    a, b = metrics(tmp_path / "run"), metrics(other / "run")
    assert [comparable(row) for row in a] == [comparable(row) for row in b]
    assert findings(other / "run")["equal_rewards"] == 5


def test_a_resumed_run_says_nothing_twice_and_forgets_nothing(tmp_path, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    run(whole, steps=8, reward=half)
    for steps in (2, 6):  # within the patience of what is found, and after it was said
        if steps == 2:
            run(halves, steps=steps, reward=half)
        else:
            covary.train(resume=halves / "run", steps=steps, quiet=True, reward=half)
    capsys.readouterr()
    covary.train(resume=halves / "run", steps=8, quiet=True, reward=half)
    assert "doctor:" not in capsys.readouterr().out
    a, b = metrics(whole / "run"), metrics(halves / "run")
    assert [comparable(row) for row in a] == [comparable(row) for row in b]
    assert findings(whole / "run")["equal_rewards"] == 5


def test_doctor_off_says_nothing_and_changes_no_number(tmp_path, capsys):
    run(tmp_path, steps=6, reward=half, doctor="off")
    assert findings(tmp_path / "run") == {}
    assert "doctor:" not in capsys.readouterr().out
    other = tmp_path / "other"
    other.mkdir()
    run(other, steps=6, reward=half)
    watched = [{k: v for k, v in row.items() if not k.startswith("doctor/")} for row in metrics(other / "run")]
    assert [comparable(row) for row in watched] == [comparable(row) for row in metrics(tmp_path / "run")]


# -- healthy runs ---------------------------------------------------------------------------------------------


def shipped(folder: Path, recipe: str = "quickstart", **changes: Any) -> Path:
    """A shipped recipe with fewer prompts; few enough to be noisy."""
    sections = load_recipe(ROOT / "recipes" / f"{recipe}.yaml")
    sections |= {
        "out": str(folder / recipe), "steps": 7, "log": {"samples": 0},
        "task": {**sections["task"], "train": 200, "test": 1}, "eval": {},
        "rollout": {**sections["rollout"], "prompts": 8}, "optimizer": {"lr": 1e-4, "prompts": 4},
    }  # fmt: skip
    return covary.train(quiet=True, **{**sections, **changes}).folder


@pytest.mark.parametrize("recipe", ["quickstart", "dapo", "sft"])
def test_silence_on_a_healthy_run(tmp_path, capsys, recipe):
    assert findings(shipped(tmp_path, recipe)) == {}
    assert "doctor:" not in capsys.readouterr().out


def test_a_solved_task_is_no_illness(tmp_path, capsys):
    """From some rewards to all of them; `stop` does not stop for it."""

    def short(completion: str, answer: str | None) -> float:
        return float(len(completion) <= 2)

    folder = shipped(
        tmp_path, steps=18, doctor="stop", reward=short, optimizer={"lr": 1e-3, "prompts": 2},
        rollout={"prompts": 4, "completions": 4, "max_tokens": 8},
    )  # fmt: skip
    rows = metrics(folder)
    assert any(0 < row["reward/mean"] < 1 for row in rows[1:])
    assert rows[-1]["step"] == 18
    assert set(findings(folder)) == {"solved"} == HARMLESS
    assert "solved: every one of 16 completions got reward 1" in capsys.readouterr().out
