"""Runs with a teacher: what is refused before a run, what is told at its start, and that the policy approaches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import covary
from covary.cli import app
from covary.models.loading import load_model, load_tokenizer
from covary.types import RunError, UserError
from tests.loop.mini import Sums, comparable, metrics, rollouts, run
from tests.models import byte_tokenizer, random_llama, save_random_model, save_with_another_end
from tests.servers import serving

OPD: dict[str, Any] = {"algorithm": {"name": "gvpo_opd", "alpha": 0.0}, "reward": None}


def test_a_teacher_is_asked_for_and_never_ignored(tmp_path: Path) -> None:
    for changes, message in (
        (OPD, "teacher: is required, gvpo_opd learns from one; takes a mapping of model, .* or a mapping of url, "),
        ({"teacher": {"model": "tiny"}}, "teacher: would be ignored, gvpo reads no teacher"),
        (OPD | {"teacher": {"model": "none/such/folder"}}, r"teacher\.model: no folder none/such/folder"),
        (OPD | {"teacher": {"url": "x", "tokenizer": "tiny"}}, r"teacher\.url: takes an address"),
        (
            OPD | {"teacher": {"model": "tiny"}, "engine": {"logprob_temperature": 0.7}},
            r"engine\.logprob_temperature: takes 1 with a teacher",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path, **changes)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "more"), [("gkd", {"on_policy": 1.0}), ("minillm", {}), ("pg_opd_token", {})])
def test_token_by_token_methods_refuse_other_tokens_and_name_the_one_that_takes_them(
    tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    with pytest.raises(
        UserError, match=r"its tokenizer is not the student's.* gvpo_opd learns from a teacher with any"
    ):
        run(tmp_path, algorithm={"name": name} | more, reward=None, teacher={"model": "tiny"})
    assert not (tmp_path / "run").exists()


def test_a_file_of_completions_that_cannot_be_made_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = str(tmp_path / "file" / "teacher.jsonl")
    with pytest.raises(UserError, match=r"teacher\.cache: .*file/teacher.jsonl cannot be made"):
        run(tmp_path, algorithm={"name": "seqkd"}, reward=None, teacher={"model": "tiny", "cache": cache})
    assert not (tmp_path / "run").exists()


def test_whole_distributions_are_nothing_that_a_server_gives(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"teacher\.url: the score 'jsd' compares whole distributions"):
        run(
            tmp_path,
            algorithm={"name": "gkd"},
            reward=None,
            teacher={"url": "http://localhost:1/v1", "tokenizer": "tiny"},
        )


def test_a_server_without_log_probs_is_found_out_before_the_run(tmp_path: Path) -> None:
    def silent(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [{"text": "x"}]}

    with serving(silent) as (url, seen), pytest.raises(RunError, match="no log-probs of prompts"):
        run(tmp_path, **OPD, teacher={"url": url, "tokenizer": "tiny"})
    assert len(seen) == 1
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_other_tokens_teaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log-ratio's variance within groups falls; the teacher's length is counted in its own tokens."""
    teacher = tmp_path / "teacher"
    random_llama(vocabulary=512, seed=5).save_pretrained(teacher)
    load_tokenizer("tiny").save_pretrained(teacher)
    run(
        tmp_path,
        **OPD,
        teacher={"model": str(teacher)},
        steps=20,
        rollout={"prompts": 8, "completions": 8, "max_tokens": 6},
        optimizer={"lr": 2e-2},
    )
    rows = metrics(tmp_path / "run")[1:]
    first, last = (sum(row["gvpo_opd/log_ratio_variance"] for row in part) for part in (rows[:4], rows[-4:]))
    assert last < 0.7 * first
    assert all(row["rows/invalid"] == 0 for row in rows)
    assert all(0 < row["gvpo_opd/teacher_length"] != row["gvpo_opd/student_length"] for row in rows)
    said = capsys.readouterr().out
    assert said.count("another tokenizer, so each completion's text is encoded anew") == 1
    assert "student reads sum/" in said
    assert "teacher reads sum/" in said


def test_a_teacher_with_the_same_tokens_is_scored_under_its_own_prompt_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = save_with_another_end(tmp_path / "teacher")
    tokenizer = byte_tokenizer().__class__.from_pretrained(teacher)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}<pad>{% endif %}{% endfor %}"
    tokenizer.save_pretrained(teacher)
    run(tmp_path, **OPD, teacher={"model": str(teacher)})
    said = capsys.readouterr().out
    assert "the same tokens, so the student's ids are scored as they are" in said
    assert "stands for '<pad>' (258)" in said
    (row, _) = metrics(tmp_path / "run")[1:]
    # Student and teacher have the same weights: all that tells them apart is the prompt and the end.
    assert row["gvpo_opd/log_ratio_variance"] > 0
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["teacher"] == {
        "model": str(teacher),
        "dtype": "float32",
        "device": "auto",
        "trust_remote_code": False,
        "cache": None,
    }


def test_a_teacher_that_is_the_policy_has_nothing_to_teach(tmp_path: Path) -> None:
    teacher = save_random_model(tmp_path / "teacher")
    run(tmp_path, **OPD, teacher={"model": str(teacher)}, steps=1)
    (row,) = metrics(tmp_path / "run")[1:]
    assert abs(row["gvpo_opd/log_ratio"]) < 1e-4
    assert row["gvpo_opd/log_ratio_variance"] < 1e-8


def test_a_resume_goes_on_as_if_the_run_had_never_stopped(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**OPD, "teacher": {"model": "tiny"}}
    run(tmp_path, **changes, steps=1)
    covary.train(resume=tmp_path / "run", steps=2, quiet=True)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "model").symlink_to(tmp_path / "model")
    run(whole, **changes, steps=2)
    last = [comparable(metrics(folder / "run")[-1]) for folder in (tmp_path, whole)]
    assert last[0] == last[1]


def test_rows_that_the_teacher_cannot_read_leave_and_are_counted(tmp_path: Path) -> None:
    """A context so short that only the shortest texts fit behind the teacher's prompt."""
    short = tmp_path / "short"
    tiny, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    prompt = tokenizer.apply_chat_template(Sums().load().train[0].prompt, add_generation_prompt=True, return_dict=False)
    tiny.config.max_position_embeddings = len(prompt) + 6
    tiny.save_pretrained(short)
    tokenizer.save_pretrained(short)
    run(tmp_path, **OPD, teacher={"model": str(short)}, rollout={"prompts": 4, "completions": 6, "max_tokens": 6})
    rows = metrics(tmp_path / "run")[1:]
    assert all(0 < row["rows/invalid"] < 24 for row in rows)
    assert all("loss" in row for row in rows)
    assert len(rollouts(tmp_path / "run", 1)) == 24


def test_a_step_that_the_teacher_cannot_read_is_not_taken_for_a_broken_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    tiny, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    prompt = tokenizer.apply_chat_template(Sums().load().train[0].prompt, add_generation_prompt=True, return_dict=False)
    tiny.config.max_position_embeddings = len(prompt) + 1
    tiny.save_pretrained(short)
    tokenizer.save_pretrained(short)
    with pytest.raises(RunError, match="the run ended without one update"):
        run(tmp_path, **OPD, teacher={"model": str(short)}, rollout={"prompts": 2, "completions": 2, "max_tokens": 60})
    assert "the teacher can read no completion" in capsys.readouterr().out
    assert metrics(tmp_path / "run")[1]["rows/invalid"] == 4


def test_check_shows_what_the_teacher_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i} + 2 =", "answer": str(i + 2)} for i in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, Any] = {
        "steps": 1,
        "model": {"name": str(save_random_model(tmp_path / "model"))},
        "teacher": {"model": "tiny"},
        "task": {"name": "jsonl", "path": str(tmp_path / "data.jsonl"), "test": 2, "grader": "exact"},
        "algorithm": {"name": "gvpo_opd"},
        "rollout": {"prompts": 2, "completions": 4, "max_tokens": 6},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.dump(recipe))
    app(["check", str(path)], standalone_mode=False)
    said = capsys.readouterr().out
    assert "teacher reads data/" in said or "teacher reads" in said
    assert "'<|im_end|>' (2) ends the teacher's turn" in said
    assert "one tiny step ran" in said
    recipe["teacher"] = {"model": "some-org/some-teacher"}
    path.write_text(yaml.dump(recipe))
    app(["check", str(path), "--no-model"], standalone_mode=False)
    assert "the teacher some-org/some-teacher is not on this machine" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_teacher_on_a_gpu_beside_a_student_on_the_cpu(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    teacher = save_random_model(tmp_path / "teacher", seed=3)
    for algorithm in ({"name": "gvpo_opd"}, {"name": "gkd"}):
        folder = tmp_path / algorithm["name"]
        folder.mkdir()
        run(
            folder,
            algorithm=algorithm,
            reward=None,
            teacher={"model": str(teacher), "device": "cuda", "dtype": "bfloat16"},
            engine={"device": "cpu"},
        )
        assert metrics(folder / "run")[-1]["grad_norm"] > 0
