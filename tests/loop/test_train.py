"""The loop on a tiny random model: it learns, counts what leaves, resumes bit for bit."""

from __future__ import annotations

import gc
import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import covary
from covary.api import from_anywhere
from covary.checkpoint import Checkpoint, checkpoints, latest, newest_sound, save
from covary.config import validate
from covary.rewards.ahead import AheadReward
from covary.rollout.transformers import TransformersRollout
from covary.train import Sampler, Schedule, planned_steps
from covary.types import Example, RunError, UserError
from tests.loop.mini import STATE, Sums, comparable, metrics, rollouts, run, vowels
from tests.models import byte_tokenizer, random_llama


@pytest.mark.parametrize("name", ["gvpo", "grpo", "dr_grpo"])
def test_a_random_model_climbs_a_dense_reward(tmp_path, name):
    run(
        tmp_path, algorithm={"name": name}, steps=25,
        rollout={"prompts": 8, "completions": 8, "max_tokens": 6}, optimizer={"lr": 1e-2, "prompts": 4},
    )  # fmt: skip
    rewards = [row["reward/mean"] for row in metrics(tmp_path / "run")[1:]]
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3
    last = metrics(tmp_path / "run")[-1]
    assert last["kl/sampling"] < 1e-6
    assert last["kl/old"] > 0
    assert last["rows/unscorable"] == last["rows/invalid"] == 0
    names = "step loss grad_norm entropy completion/length completion/truncated groups/zero_variance lr time/rollout"
    assert all(isinstance(last[key], int | float) for key in names.split())


def test_what_a_caller_has_loaded_is_collected_again_after_a_run(tmp_path):
    seen = []

    def reward(completion, answer):
        seen.append(gc.get_freeze_count())
        return 1.0 * len(completion)

    before = gc.get_freeze_count()
    run(tmp_path, reward=reward, steps=1)
    assert min(seen) > before + 1000
    assert gc.get_freeze_count() == before


def test_sft_learns_given_completions(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"say {i}", "completion": f"ok {i}!"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(
        tmp_path, algorithm={"name": "sft"}, reward=None, steps=60,
        task={"name": "jsonl", "path": str(path), "completion": "completion"},
        rollout={"engine": "dataset", "prompts": 8, "max_tokens": 16}, optimizer={"lr": 1e-2},
    )  # fmt: skip
    losses = [row["loss"] for row in metrics(tmp_path / "run")[1:]]
    assert losses[0] == pytest.approx(math.log(259), rel=0.05)
    assert losses[-1] < 1.0
    row = rollouts(tmp_path / "run", 1)[0]
    assert row["source"] == "dataset"
    assert row["finish"] == "eos"


def test_gvpo_learns_from_completions_and_rewards_of_a_file(tmp_path):
    """The offline form: no sampling, no grader; better-rewarded texts become likelier than worse ones."""
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"say {i}", "completion": ["good", "bad!"], "rewards": [1.0, 0.0]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = run(
        tmp_path, reward=None, steps=20, reference="initial",
        task={"name": "jsonl", "path": str(path), "completion": "completion", "rewards": "rewards"},
        rollout={"engine": "dataset", "prompts": 4, "max_tokens": 8}, optimizer={"lr": 3e-3},
    )  # fmt: skip
    last = metrics(tmp_path / "run")[-1]
    assert last["reward/mean"] == 0.5
    assert last["loss"] < 0.05 * metrics(tmp_path / "run")[1]["loss"]
    # At the optimum the implicit rewards differ as the rewards do: beta * (Delta_good - Delta_bad) = 1.
    tokenizer, initial = byte_tokenizer(), random_llama()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 0"}], add_generation_prompt=True, return_dict=False
    )

    def logp(model, text: str) -> float:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        with torch.no_grad():
            logps = torch.log_softmax(model(input_ids=torch.tensor([prompt + ids])).logits[0], -1)
        return float(logps[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None]).sum())

    gap = [logp(trained.model, text) - logp(initial, text) for text in ("good", "bad!")]
    assert 0.1 * (gap[0] - gap[1]) == pytest.approx(1.0, abs=0.3)


def test_dpo_learns_from_chosen_and_rejected_columns(tmp_path):
    """The ecosystem's preference format: texts, or conversations that end with the assistant's message."""
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "say a", "chosen": "good", "rejected": "bad"},
        {
            "prompt": [{"role": "user", "content": "say b"}],
            "chosen": [{"role": "assistant", "content": "good"}],
            "rejected": [{"role": "assistant", "content": "bad"}],
        },
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "jsonl", "path": str(path), "chosen": "chosen", "rejected": "rejected"}
    run(
        tmp_path, algorithm={"name": "dpo"}, reward=None, steps=30, task=task,
        rollout={"engine": "dataset", "prompts": 2, "max_tokens": 8}, optimizer={"lr": 3e-3},
    )  # fmt: skip
    first, last = metrics(tmp_path / "run")[1], metrics(tmp_path / "run")[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)  # the policy is still the initial one
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-4)
    assert last["loss"] < 0.3
    assert last["dpo/accuracy"] == 1.0
    for changes in ({"rejected": None}, {"completion": "chosen"}):
        with pytest.raises(UserError, match="goes together with rejected"):
            run(tmp_path, algorithm={"name": "dpo"}, reward=None, task={**task, **changes}, out=str(tmp_path / "x"))


def test_methods_whose_plan_leaves_too_few_rows_are_refused(tmp_path):
    with pytest.raises(UserError, match="remax needs at least 2 completions per prompt"):
        run(tmp_path, algorithm={"name": "remax"}, rollout={"prompts": 4, "completions": 1, "max_tokens": 4})


def test_which_grader_evaluates(tmp_path):
    """The task's own by default, whatever the training reward; `eval.reward` replaces it."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    run(a, steps=1)
    assert metrics(a / "run")[0]["eval/sums/reward"] == 0.0
    (tmp_path / "mine.py").write_text("def one(completion, answer):\n    return 1.0\n")
    run(b, steps=1, eval={"reward": f"{tmp_path}/mine.py:one"})
    assert metrics(b / "run")[0]["eval/sums/accuracy"] == 1.0


def test_a_reward_beside_rewards_in_the_data_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": ["x", "y"], "rewards": [1, 0]}\n')
    with pytest.raises(UserError, match="the data bring rewards"):
        run(
            tmp_path, rollout={"engine": "dataset", "prompts": 1, "max_tokens": 8}, optimizer={},
            task={"name": "jsonl", "path": str(path), "completion": "completion", "rewards": "rewards"},
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_bfloat16_autocast_is_the_same_in_rollout_and_scoring(tmp_path):
    run(tmp_path, engine={"autocast": "bfloat16"}, steps=3)
    rows = metrics(tmp_path / "run")[1:]
    assert all(0 <= row["kl/sampling"] < 1e-3 for row in rows)
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_two_halves_equal_the_whole_bit_for_bit(tmp_path):
    settings = {
        "eval": {"samples": 2}, "checkpoint": {"every": 2},
        "optimizer": {"lr": 1e-3, "prompts": 2, "schedule": "constant", "warmup": 3.0},
    }  # fmt: skip
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    one = run(whole, steps=6, **settings)
    run(halves, steps=3, **settings)
    two = covary.train(resume=halves / "run", steps=6, quiet=True, reward=vowels)
    a, b = metrics(whole / "run"), metrics(halves / "run")
    assert [comparable(row) for row in a] == [comparable(row) for row in b]
    assert [row["step"] for row in a] == list(range(7))
    for step in range(1, 7):
        assert rollouts(whole / "run", step) == rollouts(halves / "run", step)
    for left, right in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert [c.step for c in checkpoints(halves / "run")] == [4, 6]


def test_a_resume_repeats_what_a_crash_lost(tmp_path):
    run(tmp_path, steps=4, checkpoint={"every": 2, "keep_last": -1})
    before = [comparable(row) for row in metrics(tmp_path / "run")]
    # As after a kill during step 4: the checkpoint of step 4 is not there, a partial one is.
    import shutil

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    (tmp_path / "run" / "checkpoints" / "step-000004.partial").mkdir()
    covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert [comparable(row) for row in metrics(tmp_path / "run")] == before


def test_one_update_per_rollout_computes_no_old_scores_and_changes_nothing(tmp_path, monkeypatch):
    """`old` is filled from the live scores: same metrics as with a forward pass of its own."""
    from covary import train as loop
    from covary.engines.local import LocalEngine

    calls = []
    original = LocalEngine.score
    monkeypatch.setattr(
        LocalEngine, "score", lambda self, g, s, **k: calls.extend(x.name for x in s) or original(self, g, s, **k)
    )
    settings = {"algorithm": {"name": "grpo", "kl_coef": 0.0}, "optimizer": {"lr": 1e-3}}
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    run(a, **settings)
    assert "old" not in calls
    import sys

    monkeypatch.setattr(sys.modules["covary.train"], "_same_now", lambda *_: False)
    run(b, **settings)
    assert "old" in calls
    for left, right in zip(metrics(a / "run"), metrics(b / "run"), strict=True):
        for key, value in comparable(left).items():
            assert value == pytest.approx(comparable(right)[key], abs=1e-5), key
    assert callable(loop)


def test_unscorable_rows_leave_their_group_and_are_counted(tmp_path, capsys):
    def sometimes(completion: str, answer: str | None) -> float | None:
        if len(completion) % 3 == 0:
            return None
        if len(completion) % 3 == 1:
            raise ZeroDivisionError("no score here")
        return float(len(completion))

    run(tmp_path, reward=sometimes, rollout={"prompts": 4, "completions": 4, "max_tokens": 12})
    for step, row in enumerate(metrics(tmp_path / "run")[1:], start=1):
        rows = rollouts(tmp_path / "run", step)
        missing = [r for r in rows if r["reward"] is None]
        assert row["rows/unscorable"] == len(missing) > 0
        assert all(r["weight"] is None for r in missing)
        groups = [rows[i : i + 4] for i in range(0, 16, 4)]
        alone = [g for g in groups if sum(r["reward"] is not None for r in g) < 2]
        assert row["groups/singleton"] == len(alone)
        assert all(r["weight"] is None for g in alone for r in g)
    said = capsys.readouterr().out
    assert said.count("could not be scored") == 1
    assert "ZeroDivisionError" in said


def test_a_reward_that_always_fails_stops_the_run_with_its_error(tmp_path):
    def broken(completion: str, answer: str | None) -> float:
        raise KeyError("gold_answer")

    with pytest.raises(RunError, match=r"no completion of this step could be scored.*KeyError.*gold_answer"):
        run(tmp_path, reward=broken)


def test_a_model_that_turned_non_finite_stops_the_run(tmp_path):
    from covary.api import build, resolve
    from covary.config import validate
    from covary.log import Screen
    from tests.models import save_random_model

    model = save_random_model(tmp_path / "model")
    config = validate(
        {"out": str(tmp_path / "run"), "steps": 1, "model": {"name": str(model)}, "task": Sums(),
         "algorithm": {"name": "dr_grpo"}, "rollout": {"prompts": 2, "completions": 2, "max_tokens": 4}},
        where="test",
    )  # fmt: skip
    built = build(resolve(config, vowels), Screen(quiet=True))
    built.evaluators = []
    forward = built.engine.forward_backward

    def breaks(groups, batch, algorithm):
        with torch.no_grad():
            next(built.model.parameters()).fill_(float("nan"))
        return forward(groups, batch, algorithm)

    built.engine.forward_backward = breaks
    sys_train = __import__("sys").modules["covary.train"].train
    with pytest.raises(RunError, match="step 1: every log-prob of an update is non-finite"):
        sys_train(built)


def test_several_updates_passes_and_references(tmp_path):
    run(tmp_path, reference="initial", optimizer={"lr": 1e-3, "prompts": 1, "passes": 2}, steps=2)
    rows = metrics(tmp_path / "run")
    assert latest(tmp_path / "run").state()["progress"]["updates"] == 2 * 4 * 2
    assert rows[-1]["kl/initial"] > 0
    assert "kl/old" not in rows[-1]


def test_schedule():
    linear = Schedule(1e-3, 10, 0.0, "linear")
    assert linear(0) == pytest.approx(1e-3)
    assert linear(4) == pytest.approx(6e-4)  # after 4 of 10 steps
    warm = Schedule(1.0, 100, 0.05, "cosine")
    assert [warm(s) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert warm(5) == 1.0
    assert 0 < warm(99) < 1e-3
    assert [Schedule(1.0, 100, 2.0)(s) for s in range(3)] == [0.5, 1.0, 1.0]
    assert planned_steps(None, 2.0, 100, 32) == 7
    assert planned_steps(5, None, 100, 32) == 5


def test_sampler_neither_repeats_nor_skips_in_an_epoch():
    examples = [Example(str(i), "") for i in range(10)]
    sampler = Sampler(examples, seed=3)
    drawn = [e.id for _ in range(5) for e in sampler.draw(4)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(e.id for e in examples)
    assert drawn[:10] != drawn[10:]
    resumed = Sampler(examples, seed=3, position=8)
    assert [e.id for _ in range(3) for e in resumed.draw(4)] == drawn[8:]
    assert [e.id for e in Sampler(examples, seed=4).draw(10)] != drawn[:10]


def write_checkpoint(folder, step: int, keep_last: int = -1) -> Path:
    model = random_llama()
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    return save(
        folder, step, model=model, tokenizer=byte_tokenizer(), engine_state=state, state=STATE,
        keep_last=keep_last,
    )  # fmt: skip


def test_a_checkpoint_without_a_configuration_is_no_checkpoint(tmp_path):
    """transformers would make up a model of default size in its place."""
    write_checkpoint(tmp_path, 1)
    newest = write_checkpoint(tmp_path, 2)
    (newest / "config.json").unlink()
    assert latest(tmp_path).step == 1


def test_benchmarks_are_evaluated_beside_the_test_split(tmp_path, capsys, monkeypatch):
    """The numbers of `covary.evaluate`; one question of the benchmark is a training row."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {i} + 0?", "answer": f"#### {i}"} for i in range(6)] + [
        {"question": f"{i} + {i % 5} =", "answer": "#### 1"} for i in (9,)
    ]
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"tasks": ["gsm8k"], "data_dir": "data", "samples": 2}
    trained = run(tmp_path, eval=asked)
    own = covary.evaluate(
        trained, covary.tasks.Benchmark("gsm8k", data_dir="data"), samples=2, max_tokens=6
    )  # fmt: skip
    for row in metrics(tmp_path / "run"):
        assert ("eval/gsm8k/length" in row) == ("eval/sums/length" in row) == (row["step"] in (0, 2))
    last = metrics(tmp_path / "run")[-1]
    for name in ("length", "truncated", "accuracy", "reward"):
        assert last[f"eval/gsm8k/{name}"] == own[f"eval/gsm8k/{name}"]
    assert "1 of 7 questions of gsm8k are training rows" in capsys.readouterr().out
    covary.train(resume=tmp_path / "run", steps=3, eval={**asked, "limit": 3}, quiet=True, reward=vowels)
    for wrong, message in (
        ({"tasks": ["gsm9k"]}, "'gsm9k' is no benchmark .*; did you mean gsm8k"),
        ({"tasks": ["gsm8k", "gsm8k"], "data_dir": "data"}, "two tasks would report eval/gsm8k"),
        (
            {"tasks": ["gsm8k"], "data_dir": "/nowhere"},
            "eval.tasks, gsm8k: data_dir: there is no folder /nowhere/gsm8k",
        ),
        ({"limit": 3}, r"eval\.limit: would be ignored"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path, out=str(tmp_path / "other"), eval=wrong)


def test_a_file_named_like_a_shipped_model_changes_no_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "math", "chat"):
        (tmp_path / name).mkdir()
    config = validate(
        {"steps": 1, "algorithm": {"name": "gvpo"}, "reward": "math",
         "task": {"name": "jsonl", "path": "x.jsonl", "template": "chat"}},
        where="test",
    )  # fmt: skip
    fixed = from_anywhere(config)
    assert (fixed.model.name, fixed.reward, fixed.task.template) == ("tiny", "math", "chat")


def test_checkpoints_are_ordered_by_number_and_other_names_ignored(tmp_path):
    for step in (500, 9000, 2500, 10000):
        write_checkpoint(tmp_path, step)
    folder = tmp_path / "checkpoints"
    for name in ("step-final-backup", "100000", "step-30000.partial"):
        (folder / name).mkdir()
    (folder / "step-010000").rename(folder / "step-10000")  # however many digits
    assert latest(tmp_path).step == 10000
    assert [c.step for c in checkpoints(tmp_path)] == [500, 2500, 9000, 10000]
    write_checkpoint(tmp_path, 10001, keep_last=2)
    assert [c.step for c in checkpoints(tmp_path)] == [10000, 10001]
    assert (folder / "step-final-backup").is_dir()


def test_a_damaged_checkpoint_takes_no_place_among_the_newest(tmp_path):
    """A resume passed step 9 over; dropping the one that was just written would leave nothing to go on from."""
    write_checkpoint(tmp_path, 3)
    damaged = write_checkpoint(tmp_path, 9) / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 64
    damaged.write_bytes(content)
    written = write_checkpoint(tmp_path, 4, keep_last=1)
    assert newest_sound(tmp_path)[0].folder == written
    assert [c.step for c in checkpoints(tmp_path)] == [4, 9]
    write_checkpoint(tmp_path, 9, keep_last=1)  # written again
    assert [c.step for c in checkpoints(tmp_path)] == [9]
    assert newest_sound(tmp_path)[1] == []


@pytest.mark.parametrize("damage", ["cut model", "cut training", "empty state", "half state", "no model", "list state"])
def test_a_damaged_checkpoint_is_left_aside(tmp_path, damage, capsys):
    run(tmp_path, steps=4, checkpoint={"every": 2})
    before = [comparable(row) for row in metrics(tmp_path / "run")]
    folder = tmp_path / "run" / "checkpoints" / "step-000004"
    what, name = damage.split()
    path = folder / {"model": "model.safetensors", "training": "training.safetensors", "state": "state.json"}[name]
    content = path.read_bytes()
    if what == "no":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-7], "empty": b"", "half": content[:20], "list": b"[]"}[what])
    assert latest(tmp_path / "run").step == 2
    covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert "step-000004 is damaged or half written" in capsys.readouterr().out
    assert [comparable(row) for row in metrics(tmp_path / "run")] == before


def test_metrics_lost_in_a_power_cut_do_not_break_a_resume(tmp_path):
    run(tmp_path, steps=3, checkpoint={"every": 1, "keep_last": -1})
    path = tmp_path / "run" / "metrics.jsonl"
    before = [comparable(row) for row in metrics(tmp_path / "run")]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]) + '{"step": 2, "lo')
    covary.train(resume=tmp_path / "run", steps=4, quiet=True, reward=vowels)
    after = [comparable(row) for row in metrics(tmp_path / "run")]
    assert after[:2] == before[:2]  # row 2 is lost, what is left is whole
    assert [row["step"] for row in after] == [0, 1, 3, 4]
    path.unlink()
    covary.train(resume=tmp_path / "run", steps=5, quiet=True, reward=vowels)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [4, 5]


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path, monkeypatch):
    import sys

    loop = sys.modules["covary.train"]
    original = loop.train_step

    def stops(run, sampler, progress, log):
        if progress.step == 2:
            raise KeyboardInterrupt
        return original(run, sampler, progress, log)

    monkeypatch.setattr(loop, "train_step", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, steps=3)
    monkeypatch.setattr(loop, "train_step", original)
    covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    other = tmp_path / "other"
    other.mkdir()
    run(other, steps=3)
    a, b = metrics(tmp_path / "run"), metrics(other / "run")
    assert [comparable(row) for row in a] == [comparable(row) for row in b]


def test_a_resume_needs_the_same_data(tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "hint": i} for i in range(8)]
    path, form = tmp_path / "rows.jsonl", tmp_path / "form.yaml"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form.write_text("contexts: {prompt: '{question} Answer:'}")
    task = {"name": "jsonl", "path": str(path), "test": 2, "template": str(form)}
    run(tmp_path, steps=1, task=task)

    def resume(folder=tmp_path / "run", **changes):
        return covary.train(resume=folder, **{"steps": 2, "quiet": True, "reward": vowels, **changes})

    path.write_text("".join(json.dumps(row | {"hint": row["hint"] + (row["hint"] == 5)}) + "\n" for row in rows))
    with pytest.raises(
        UserError, match=r"the task's training rows changed since the last checkpoint of .*run; a resume"
    ):
        resume()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form.write_text("contexts: {prompt: '{question} The answer:'}")
    with pytest.raises(UserError, match="the prompt template changed"):
        resume()
    form.write_text("contexts: {prompt: '{question} Answer:'}")
    with pytest.raises(UserError, match="changed: out"):
        resume(out="elsewhere")
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    resume(moved)
    assert [row["step"] for row in metrics(moved)] == [0, 1, 2]


def test_a_resume_needs_the_same_completions_of_a_file(tmp_path):
    path = tmp_path / "given.jsonl"
    lines = [json.dumps({"id": f"sum/{i}", "completion": f"{i}!"}) for i in range(16)]
    path.write_text("\n".join(lines))
    run(tmp_path, steps=1, rollout={"prompts": 4, "completions": 4, "max_tokens": 6,
                                    "file": {"path": str(path), "count": 1}})  # fmt: skip
    path.write_text("\n".join(lines).replace("9!", "8!"))
    with pytest.raises(UserError, match=r"rollout\.file changed"):
        covary.train(resume=tmp_path / "run", steps=2, quiet=True, reward=vowels)


@pytest.mark.parametrize("changes", [{"reference": "initial"}, {"model": {"lora": {"rank": 2}}}, {}])
def test_a_resume_needs_the_same_model_where_it_is_read_again(tmp_path, changes):
    from tests.models import save_random_model

    model = tmp_path / "model"
    save_random_model(model)
    changes = {**changes, "model": {"name": str(model), **changes.get("model", {})}}
    run(tmp_path, steps=1, **changes)
    shutil.rmtree(model)
    save_random_model(model, seed=5)
    if len(changes) == 1 and len(changes["model"]) == 1:  # every weight comes from the checkpoint
        covary.train(resume=tmp_path / "run", steps=2, quiet=True, reward=vowels)
        return
    with pytest.raises(UserError, match=r"the model of model\.name changed"):
        covary.train(resume=tmp_path / "run", steps=2, quiet=True, reward=vowels)


def test_a_changed_byte_is_damage(tmp_path, capsys):
    """Of the right length, so that only its content tells."""
    from covary.export import export

    run(tmp_path, steps=4, checkpoint={"every": 2})
    before = [comparable(row) for row in metrics(tmp_path / "run")]
    folder = tmp_path / "run" / "checkpoints" / "step-000004"
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 64
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"step-000004 is damaged: model.safetensors changed since it was written"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match=r"step-000004 is damaged"):
        covary.evaluate(tmp_path / "run", Sums())
    export(tmp_path / "run", tmp_path / "out", step=2)
    covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert (
        "step-000004 is damaged (model.safetensors changed since it was written), and left aside"
        in capsys.readouterr().out
    )
    assert [comparable(row) for row in metrics(tmp_path / "run")] == before
    assert latest(tmp_path / "run").changed() == []  # written again


@pytest.mark.parametrize("key", ["progress", "random", "metrics_position"])
def test_a_state_that_lacks_something_or_a_renamed_folder_is_no_checkpoint(tmp_path, key):
    run(tmp_path, steps=1)
    folder = latest(tmp_path / "run").folder
    renamed = folder.with_name("step-000007")
    folder.rename(renamed)
    assert latest(tmp_path / "run") is None
    renamed.rename(folder)
    state = json.loads((folder / "state.json").read_text())
    del state[key]
    (folder / "state.json").write_text(json.dumps(state))
    assert latest(tmp_path / "run") is None


def test_what_sha256sum_says_of_a_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    names = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert names == {p.name for p in folder.iterdir()} - {"SHA256SUMS"}
    checked = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=False)
    assert checked.returncode == 0


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_model_that_is_non_finite_before_the_first_update_stops_the_run(tmp_path, monkeypatch, prompts):
    """With several updates a step its frozen scores leave before a live one is seen."""
    from covary import api

    def broken(*args, **kwargs):
        model = load_model(*args, **kwargs)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        return model

    load_model = api.load_model
    monkeypatch.setattr(api, "load_model", broken)
    with pytest.raises(RunError, match=r"step 1: .* non-finite"):
        run(tmp_path, optimizer={"lr": 1e-3, "prompts": prompts * 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": lambda c, a: 1e308}, "could not be scored|had no row to learn from"),
        ({"optimizer": {"lr": 1e12, "prompts": 1}, "steps": 4}, "skipped .* updates|non-finite"),
        (
            {"rollout": {"prompts": 4, "completions": 4, "max_tokens": 6}, "reward": lambda c, a: 1e20 * len(c)},
            "skipped",
        ),
    ],
)
def test_a_step_that_teaches_nothing_is_not_silent(tmp_path, capsys, changes, message):
    import re

    said = ""
    try:
        run(tmp_path, **changes)
    except RunError as error:
        said = str(error)
    assert re.search(message, said + capsys.readouterr().out)


def test_an_evaluation_that_cannot_grade_says_why(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def broken(completion, answer):\n    raise ValueError('no gold')\n")
    run(tmp_path, steps=1, eval={"reward": f"{tmp_path}/mine.py:broken"})
    said = capsys.readouterr().out
    assert said.count("completions of the evaluation could not be scored") == 1
    assert "no gold" in said


def test_sys_exit_in_a_reward_does_not_end_the_run_silently(tmp_path):
    def leaves(completions, **columns):
        raise SystemExit(0)

    with pytest.raises(RunError, match="SystemExit"):
        run(tmp_path, reward=leaves)


def test_rows_that_all_leave_before_the_update_do_not_crash(tmp_path, capsys):
    from dataclasses import dataclass

    from covary.algorithms import GVPO

    @dataclass(frozen=True)
    class NotANumber(GVPO):
        def features(self, example, completion):
            return {"z": float("nan")}

    with pytest.raises(RunError, match="without one update"):
        run(tmp_path, algorithm=NotANumber())
    assert metrics(tmp_path / "run")[1]["rows/invalid"] == 16
    assert "step 1 had no row to learn from" in capsys.readouterr().out


def test_a_checkpoint_is_an_ordinary_model_folder_without_pickle(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = run(tmp_path)
    folder = latest(tmp_path / "run").folder
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for (name, a), (_, b) in zip(loaded.named_parameters(), trained.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 257
    assert {p.suffix for p in folder.iterdir()} == {".json", ".jinja", ".safetensors", ""}
    assert isinstance(latest(tmp_path / "run"), Checkpoint)


def test_a_checkpoint_holds_buffers_and_frozen_parameters_too(tmp_path):
    from covary.engines.local import LocalEngine

    model = random_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.register_buffer("bias", torch.arange(3.0))
    engine = LocalEngine(model)
    state = engine.state_dict()
    assert torch.equal(state["model.bias"], torch.arange(3.0))
    save(tmp_path, 1, model=model, tokenizer=byte_tokenizer(), engine_state=state, state=STATE, keep_last=1)
    restored = latest(tmp_path).weights(random_llama(seed=9))
    for name, value in model.named_parameters():
        assert torch.equal(restored[name], value), name


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    """The real error of a file that cannot grow, not a made-up one."""
    code = f"""
import resource, signal, sys
from pathlib import Path
from covary.checkpoint import save
from covary.types import RunError
from tests.models import byte_tokenizer, random_llama
model = random_llama()
state = {{f"model.{{k}}": v for k, v in model.state_dict().items()}}
arguments = dict(model=model, tokenizer=byte_tokenizer(), engine_state=state, state={{'progress': {{}}}}, keep_last=1)
save(Path({str(tmp_path)!r}), 1, **arguments)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save(Path({str(tmp_path)!r}), 2, **arguments)
except RunError as error:
    print(error)
"""
    import subprocess
    import sys

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"checkpoint {tmp_path}/checkpoints/step-000002 could not be written" in result.stdout
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_rewards_that_are_none_for_all_are_warned_of_once_and_teach_nothing(tmp_path, capsys):
    with pytest.raises(RunError, match="without one update"):
        run(tmp_path, reward=lambda completion, answer: None)
    said = capsys.readouterr().out
    assert (
        said.count("warning: 16 of 16 completions could not be scored and left; the first: the reward gave None") == 1
    )
    for row in metrics(tmp_path / "run")[1:]:
        assert row["rows/unscorable"] == 16
        assert "loss" not in row


def test_kl_metrics_are_told_by_stream_and_quantity_not_by_name(tmp_path):
    from dataclasses import dataclass

    from covary.batch import Algorithm
    from covary.ops import masked_sum
    from covary.types import Score, Stream

    @dataclass(frozen=True)
    class Named(Algorithm):
        frozen = (
            Score("start", Stream("initial")),
            Score("before", Stream("old")),
            Score("initial", Stream("initial"), "entropy"),
        )

        def loss(self, scores, batch):
            return -masked_sum(scores["policy"], batch.mask).sum() / batch.total("tokens")

    run(tmp_path, algorithm=Named())
    row = metrics(tmp_path / "run")[-1]
    assert 0 < row["kl/initial"] < 1
    assert 0 < row["kl/old"] < 1
    assert row["kl/sampling"] < 1e-6


def test_prepare_sees_early_scores_only_whatever_the_number_of_updates(tmp_path):
    from dataclasses import dataclass

    from covary.algorithms import GRPO

    @dataclass(frozen=True)
    class Reads(GRPO):
        def prepare(self, batch, reduce):
            return {"mine": batch["old"]}

    for updates in (1, 2):
        with pytest.raises(KeyError, match="early=True"):
            run(tmp_path, algorithm=Reads(), optimizer={"prompts": 4 // updates}, out=str(tmp_path / str(updates)))


def test_what_the_algorithm_needs_is_checked_before_the_run_folder_is_made(tmp_path):
    from dataclasses import dataclass

    from covary.algorithms import SFT
    from covary.types import Score, Stream

    @dataclass(frozen=True)
    class Posterior(SFT):
        offline = False
        trained = (Score("policy", Stream("policy", "posterior")),)

    @dataclass(frozen=True)
    class Teacher(SFT):
        offline = False
        frozen = (Score("t", Stream("teacher")),)

    @dataclass(frozen=True)
    class Answers(SFT):
        offline = False
        frozen = (Score("a", tokens="answer"),)

    @dataclass(frozen=True)
    class Own(SFT):
        offline = False
        needs_reward = True

        def reward(self, batch):
            return batch.mask.sum(-1).float()

    for algorithm, message, changes in (
        (Posterior(), "no context 'posterior'", {"reward": None}),
        (Teacher(), "teacher: is required, .*Teacher learns from one", {"reward": None}),
        (Answers(), "appends no answer", {"reward": None}),
        (Own(), "the algorithm makes its own rewards", {}),
        (
            SFT(),
            r"'sum/4' has no completions",
            {"reward": None, "rollout": {"engine": "dataset", "max_tokens": 6}, "optimizer": {}},
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path, algorithm=algorithm, **changes)
        assert not (tmp_path / "run").exists()


def test_python_changes_of_a_section_keep_its_other_keys(tmp_path):
    run(tmp_path, steps=1, eval={"samples": 3, "max_tokens": 5})
    covary.train(resume=tmp_path / "run", steps=2, eval={"every": 1}, quiet=True, reward=vowels)
    import yaml

    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["eval"]["samples"], config["eval"]["max_tokens"], config["eval"]["every"]) == (3, 5, 1)


def test_a_python_reward_run_cannot_be_resumed_without_it(tmp_path):
    run(tmp_path, steps=1)
    with pytest.raises(UserError, match="a Python function"):
        covary.train(resume=tmp_path / "run", steps=2, quiet=True)


def test_grading_begins_while_completions_are_sampled_and_changes_nothing(tmp_path, monkeypatch):
    begun: list[str] = []
    known_at_the_end: list[int] = []
    begin, generate = AheadReward.begin, TransformersRollout.generate

    def noted(self, example, completion):
        begun.append(completion)
        begin(self, example, completion)

    def watched(self, *args):
        assert self.on_text is not None
        groups = generate(self, *args)
        known_at_the_end.append(len(begun))
        return groups

    with monkeypatch.context() as patch:
        patch.setattr(AheadReward, "begin", noted)
        patch.setattr(TransformersRollout, "generate", watched)
        run(tmp_path, reward="exact")
    rows = sorted(row["completion"] for step in (1, 2) for row in rollouts(tmp_path / "run", step))
    assert known_at_the_end[:2] == [8, 24]  # the evaluation's rows, and those of the first step
    assert set(rows) <= set(begun)
    run(tmp_path, reward=exactly, out=str(tmp_path / "in turn"))
    assert rollouts(tmp_path / "run", 2) == rollouts(tmp_path / "in turn", 2)


def exactly(completion: str, answer: str | None) -> float:
    return float(completion.strip() == answer)
