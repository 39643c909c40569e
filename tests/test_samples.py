"""Evaluation folders: the same numbers for any batch and any number of processes, and after a kill at any place."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covary import measure
from covary.api import Trained
from covary.measure import Conditions, Policy, Questions, Store, evaluate, load_policy, questions
from covary.rewards import Grader
from covary.samples import Shard, answer, whole
from covary.tasks import Task
from covary.types import Example, UserError
from tests.models import byte_tokenizer, random_llama

CONDITIONS = Conditions(samples=3, max_tokens=6, seed=5)


def asked(count: int = 7, answer: str = "a") -> Questions:
    rows = [
        Example(f"q{i}", [{"role": "user", "content": f"{i}?"}], answer, columns={"category": "ab"[i % 2]})
        for i in range(count)
    ]
    return questions(Task("letters", [], rows, Grader("exact")))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(Trained(Path("somewhere"), {}, random_llama(scale=3.0), byte_tokenizer()))


def run(policy: Policy, out: Path, shard: str = "0/1", batch: int = 256, **changes: Any) -> dict[str, float] | None:
    conditions = dataclasses.replace(CONDITIONS, **changes)
    return measure.measure(policy, asked(), conditions, store=Store(out, Shard.parse(shard), batch))


def lines(out: Path) -> list[str]:
    return sorted(line for path in (out / "letters").glob("samples*") for line in path.read_text().splitlines())


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "letters" / "results.json").read_text())


@pytest.fixture(scope="module")
def reference(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "out"
    run(policy, out)
    return out


def same(out: Path, reference: Path) -> None:
    assert lines(out) == lines(reference)
    assert results(out) == results(reference)


def test_a_folder(policy: Policy, reference: Path) -> None:
    folder = reference / "letters"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 7 * 4
    assert [row["index"] for row in rows[:4]] == [0, 1, 2, 3]
    assert [row["greedy"] for row in rows[:4]] == [False, False, False, True]
    assert {row["verdict"] for row in rows} <= {"correct", "incorrect", "unparsable"}
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["sampling"]["seed"] == 5
    assert settings["model"]["weights_sha256"] == measure.weights_sha256(policy.rollout.model)
    assert settings["grader"]["name"] == "exact"
    assert all(len(settings[name]) == 64 for name in ("rows_sha256", "prompts_sha256"))
    assert set(results(reference)["categories"]) == {"a", "b"}
    assert results(reference)["categories"]["a"]["questions"] == 4
    # Without a folder: the same numbers.
    assert measure.measure(policy, asked(), CONDITIONS) == results(reference)["metrics"]


@pytest.mark.parametrize("batch", [1, 5, 12])
def test_any_batch(policy: Policy, reference: Path, tmp_path: Path, batch: int) -> None:
    run(policy, tmp_path, batch=batch)
    same(tmp_path, reference)


def test_any_number_of_processes(policy: Policy, reference: Path, tmp_path: Path) -> None:
    assert run(policy, tmp_path, "2/3") is None
    assert run(policy, tmp_path, "0/3") is None
    assert not (tmp_path / "letters" / "results.json").exists()
    assert run(policy, tmp_path, "1/3") == results(reference)["metrics"]
    same(tmp_path, reference)
    assert {path.name for path in (tmp_path / "letters").glob("samples*")} == {
        f"samples-{i}of3.jsonl" for i in range(3)
    }


def test_what_shards_left_is_done_without_one(policy: Policy, reference: Path, tmp_path: Path) -> None:
    assert run(policy, tmp_path, "1/2") is None
    run(policy, tmp_path)
    same(tmp_path, reference)


@pytest.mark.parametrize("kept", [0, 10, 300, 700, 1500, -1])
def test_after_a_kill(
    policy: Policy, reference: Path, tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(policy, tmp_path)
    path = tmp_path / "letters" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:kept])
    (tmp_path / "letters" / "results.json").unlink()
    there = len(whole(tmp_path / "letters", 4))
    prompts: list[int] = []
    generate = policy.rollout.generate

    def counted(plans: Any, groups: Any, sampling: Any, seed: int) -> Any:
        prompts.append(len(groups))
        return generate(plans, groups, sampling, seed)

    monkeypatch.setattr(policy.rollout, "generate", counted)
    run(policy, tmp_path)
    assert sum(prompts) == 7 - there  # only what was missing
    same(tmp_path, reference)
    run(policy, tmp_path)
    assert sum(prompts) == 7 - there  # and nothing more, once it is whole


def test_a_failure_keeps_what_was_written(
    policy: Policy, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = policy.rollout.generate, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(policy.rollout, "generate", failing)
    with pytest.raises(KeyboardInterrupt):
        run(policy, tmp_path, batch=8)
    assert len(whole(tmp_path / "letters", 4)) == 4
    run(policy, tmp_path, batch=8)
    same(tmp_path, reference)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"samples": 4}, "sampling.samples"),
        ({"temperature": 0.5}, "sampling.temperature"),
        ({"seed": 6, "greedy": False}, "sampling.greedy, sampling.seed"),
    ],
)
def test_other_settings_are_refused(policy: Policy, reference: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=rf"holds an evaluation with other settings \({named}\)"):
        run(policy, reference, **changes)


def test_another_model_or_task_is_refused(policy: Policy, reference: Path) -> None:
    other = load_policy(Trained(Path("x"), {}, random_llama(seed=1), byte_tokenizer()))
    with pytest.raises(UserError, match=r"\(model.weights_sha256\)"):
        run(other, reference)
    with pytest.raises(UserError, match=r"\(questions, rows_sha256, prompts_sha256\)"):
        measure.measure(policy, asked(8), CONDITIONS, store=Store(reference))
    with pytest.raises(UserError, match=r"\(rows_sha256\)"):
        measure.measure(policy, asked(answer="b"), CONDITIONS, store=Store(reference))


def test_weights_are_told_apart() -> None:
    model, copy = random_llama(), random_llama()
    assert measure.weights_sha256(model) == measure.weights_sha256(copy)
    copy.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-6
    assert measure.weights_sha256(model) != measure.weights_sha256(copy)


HOLD = """
import sys
from pathlib import Path
from covary.lock import run_lock

with run_lock(Path(sys.argv[1]), print, sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_a_shard(policy: Policy, tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    command = [sys.executable, "-c", HOLD, str(folder), "lock-0of2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is in use by process"):
            run(policy, tmp_path, "0/2")
        assert run(policy, tmp_path, "1/2") is None
        process.communicate("")


def test_from_python(tmp_path: Path) -> None:
    trained = Trained(Path("x"), {}, random_llama(), byte_tokenizer())
    task = Task("letters", [], [Example("a", "q", "a")], Grader("exact"))
    found = evaluate(trained, task, samples=2, max_tokens=4, greedy=False, pass_at=[1, 2], out=tmp_path / "out")
    assert {"eval/letters/pass@1", "eval/letters/pass@2", "eval/letters/majority@2"} <= found.keys()
    assert "eval/letters/greedy" not in found
    with pytest.raises(UserError, match=r"pass@3: letters has 2 samples per question"):
        evaluate(trained, task, samples=2, max_tokens=4, pass_at=[3])
    with pytest.raises(UserError, match="has no test rows"):
        evaluate(trained, Task("none", [], [], None))


@pytest.mark.parametrize("text", ["1", "2/2", "a/2", "-1/2", "0/0", "1/2/3"])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="takes i/n with i from 0 to n - 1"):
        Shard.parse(text)


def test_a_question_larger_than_the_batch(policy: Policy, tmp_path: Path) -> None:
    evaluator = measure.build_evaluator(policy, asked(2), CONDITIONS)
    samples = answer(tmp_path, evaluator, {"a": 1}, Shard(), 1, lambda line: None)
    evaluator.reward.close()
    assert samples is not None
    assert len(samples) == 8
