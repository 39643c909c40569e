"""Distillation through the whole loop: sources, caches, resumes, other tokenizers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import covary
from covary.algorithms import GVPOOPD
from covary.api import resolve
from covary.config import validate
from covary.models.loading import load_tokenizer
from covary.types import UserError
from tests.loop.mini import Sums, comparable, metrics, needs, pairs, rollouts, run
from tests.models import random_llama, save_random_model
from tests.servers import choice, serving

METHODS = ("gvpo_opd", "seqkd", "supervised_kd", "gkd", "minillm", "pg_opd_sequence", "pg_opd_token")
ANY_TOKENIZER = ("gvpo_opd", "seqkd", "pg_opd_sequence")


def _slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def distill(folder: Path, algorithm: Any, **changes: Any) -> covary.api.Trained:  # pyright: ignore
    """A run of `mini.run` with what the algorithm needs; `algorithm` is its name, its section, or a GVPO-OPD."""
    algorithm = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    named = {"name": algorithm["name"] if isinstance(algorithm, dict) else "gvpo_opd"}
    fields = algorithm if isinstance(algorithm, dict) and "weighting" not in algorithm else named
    # Without test questions no grader starts.
    return run(folder, algorithm=algorithm, **{"task": Sums(test_rows=0), **needs(fields, folder), **changes})


def sources_of(folder: Path, step: int) -> list[str]:
    return [row["source"] for row in rollouts(folder / "run", step)]


def same(a: Path, b: Path) -> bool:
    left, right = (list(map(comparable, metrics(folder))) for folder in (a, b))
    return left == right


# -- teachers with other tokenizers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ANY_TOKENIZER)
def test_a_teacher_with_another_tokenizer_teaches_by_text(tmp_path: Path, name: str) -> None:
    """The shipped model (merged tokens) teaches a byte-level student."""
    distill(tmp_path, name, teacher={"model": "tiny"}, steps=3)
    for row in metrics(tmp_path / "run")[1:]:
        assert row["grad_norm"] > 0
        assert row["rows/invalid"] == 0
        assert row["loss"] == row["loss"]
    if name == "gvpo_opd":
        row = metrics(tmp_path / "run")[-1]
        assert 0 < row["gvpo_opd/teacher_length"] != row["gvpo_opd/student_length"]
        assert row["gvpo_opd/log_ratio_variance"] > 0


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ANY_TOKENIZER])
def test_methods_that_compare_tokens_refuse_one_and_say_which_does_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"teacher: its tokenizer is not the student's.*gvpo_opd"):
        distill(tmp_path, name, teacher={"model": "tiny"})
    assert not (tmp_path / "run").exists()


def test_the_run_is_told_where_the_optimum_is_tilted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for alpha in (0.0, 1.0):
        changes = {"algorithm": {"name": "gvpo_opd", "alpha": alpha}, "reward": None, "teacher": {"model": "tiny"}}
        run(tmp_path, out=str(tmp_path / f"run{alpha}"), steps=1, **changes)
        assert ("with a tilt" in capsys.readouterr().out) == (alpha > 0)


# -- the student is the teacher -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gvpo_opd", "gkd", "supervised_kd", "pg_opd_token"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path, name: str) -> None:
    model = str(save_random_model(tmp_path / "model"))
    distill(tmp_path, name, teacher={"model": model}, steps=1, optimizer={"lr": 1e-3})
    row = metrics(tmp_path / "run")[1]
    assert row["loss"] == pytest.approx(0, abs=1e-6)
    assert row["grad_norm"] < 1e-5


def test_minillm_of_a_student_that_is_its_teacher(tmp_path: Path) -> None:
    """Whitening makes a unit of rounding: without it nothing is left."""
    model = str(save_random_model(tmp_path / "model"))
    distill(
        tmp_path, {"name": "minillm", "whitening": False}, teacher={"model": model}, steps=1, optimizer={"lr": 1e-3}
    )
    row = metrics(tmp_path / "run")[1]
    assert row["minillm/kl"] == pytest.approx(0, abs=1e-6)
    assert row["grad_norm"] < 1e-4


# -- where completions come from ----------------------------------------------------------------------------------


def test_seqkd_learns_from_the_teachers_completions_alone(tmp_path: Path) -> None:
    distill(tmp_path, "seqkd")
    assert set(sources_of(tmp_path, 1)) == {"teacher"}
    row = metrics(tmp_path / "run")[-1]
    assert row["teacher/rows"] == 16
    assert "entropy" not in row  # nothing was sampled from the policy
    assert len((tmp_path / "run" / "teacher.jsonl").read_text().split()) >= 8


def test_another_run_takes_the_completions_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    teacher = {"model": str(save_random_model(tmp_path / "teacher", seed=1)), "cache": "said.jsonl"}
    distill(tmp_path, "seqkd", teacher=teacher)
    said = (tmp_path / "said.jsonl").read_bytes()
    first = metrics(tmp_path / "run")
    monkeypatch.chdir("/")  # the path was relative to where the run began
    distill(tmp_path, "seqkd", teacher={**teacher, "cache": str(tmp_path / "said.jsonl")}, out=str(tmp_path / "again"))
    assert (tmp_path / "said.jsonl").read_bytes() == said
    assert list(map(comparable, metrics(tmp_path / "again"))) == list(map(comparable, first))
    assert not (tmp_path / "run" / "teacher.jsonl").exists()
    assert str(tmp_path / "said.jsonl") in (tmp_path / "run" / "config.yaml").read_text()


def test_a_teacher_behind_a_server_teaches_by_its_completions(tmp_path: Path) -> None:
    """SeqKD needs no log-probs of a server: it asks for completions, each once."""
    with serving(lambda body: choice(f" {len(body['prompt'])}")) as (url, seen):
        distill(tmp_path, "seqkd", teacher={"url": url, "tokenizer": "tiny", "served_model": "t"}, steps=4)
    rows = rollouts(tmp_path / "run", 4)
    assert {row["source"] for row in rows} == {"teacher"}
    prompt = load_tokenizer("tiny").apply_chat_template(
        Sums(test_rows=0).load().train[0].prompt, add_generation_prompt=True
    )
    assert len(prompt["input_ids"]) in {len(body["prompt"]) for body in seen}
    assert {row["completion"] for row in rows} <= {f" {len(body['prompt'])}" for body in seen}
    assert all(row["finish"] == "eos" for row in rows)
    # 12 prompts, 4 completions each, in 4 steps of 4 prompts: the last step's were known.
    assert len(seen) == 48
    assert seen[0]["model"] == "t"


def test_gkd_draws_one_source_for_all_prompts_of_a_step(tmp_path: Path) -> None:
    distill(tmp_path, {"name": "gkd", "on_policy": 0.5}, steps=8)
    seen = [set(sources_of(tmp_path, step)) for step in range(1, 9)]
    assert all(len(sources) == 1 for sources in seen)
    assert {"policy"} in seen
    assert {"dataset"} in seen
    for row, sources in zip(metrics(tmp_path / "run")[1:], seen, strict=True):
        assert row["gkd/on_policy"] == float(sources == {"policy"})


def test_gkd_without_student_samples_is_supervised_kd(tmp_path: Path) -> None:
    """beta = 0 is the forward KL; the same data in the same order."""
    other = {"name": "supervised_kd"}
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    distill(
        a, {"name": "gkd", "on_policy": 0.0, "beta": 0.0}, rollout={"prompts": 4, "completions": 2, "max_tokens": 8}
    )
    distill(b, other)
    for left, right in zip(metrics(a / "run")[1:], metrics(b / "run")[1:], strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-6)


def test_minillm_samples_a_mixture(tmp_path: Path) -> None:
    distill(tmp_path, "minillm")
    assert set(sources_of(tmp_path, 1)) == {"mixed"}
    distill(tmp_path, {"name": "minillm", "teacher_mix": 0.0}, out=str(tmp_path / "plain"))
    assert {row["source"] for row in rollouts(tmp_path / "plain", 1)} == {"policy"}


# -- the same numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gvpo_opd", *_slow("seqkd", "gkd", "minillm")])
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path, name: str) -> None:
    """More steps than an epoch has: what the teacher said before the stop is drawn again after it."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    small = {"checkpoint": {"every": 2}, "optimizer": {"lr": 1e-3}}
    distill(whole, name, steps=5, **small)
    distill(stopped, name, steps=3, **small)
    covary.train(resume=stopped / "run", steps=5, quiet=True)
    assert same(whole / "run", stopped / "run")


@pytest.mark.parametrize("name", ["gvpo_opd", *_slow("gkd", "minillm", "pg_opd_sequence")])
def test_the_size_of_micro_batches_changes_nothing(tmp_path: Path, name: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    distill(a, name)
    distill(b, name, engine={"micro_batch_tokens": 64})
    for left, right in zip(metrics(a / "run"), metrics(b / "run"), strict=True):
        assert comparable(left) == pytest.approx(comparable(right), rel=1e-3, abs=1e-5)


def test_one_update_of_gvpo_opd_is_one_of_the_sequence_policy_gradient(tmp_path: Path) -> None:
    """f = 1, one update a rollout: (k / (k - 1)) / k of the same centred log-ratios. The whole model moves alike."""
    trained = []
    for name, fields in (("gvpo_opd", {"alpha": 0.0}), ("pg_opd_sequence", {})):
        folder = tmp_path / name
        folder.mkdir()
        once = {"steps": 1, "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9}}
        trained.append(distill(folder, {"name": name, **fields}, **once).model.state_dict())
    first, second = (metrics(tmp_path / name / "run")[1]["grad_norm"] for name in ("gvpo_opd", "pg_opd_sequence"))
    # A mean over prompts of sums divided by k - 1, against a mean over rows of k / (k - 1) times the centred reward.
    assert first == pytest.approx(second * 4 / 4, rel=1e-4)
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], rtol=0, atol=1e-4)


# -- f by a function ------------------------------------------------------------------------------------------------


def by_number(example: covary.Example, completion: covary.Completion) -> float:
    """More for later rows."""
    return 1.0 + float(example.id.split("/")[1])


def test_a_weighting_is_named_by_its_file_and_found_again(tmp_path: Path) -> None:
    distill(tmp_path, GVPOOPD(weighting=by_number), steps=1)
    assert f"weighting: {__file__}:by_number" in (tmp_path / "run" / "config.yaml").read_text()
    covary.train(resume=tmp_path / "run", steps=2, quiet=True)
    function = tmp_path / "mine.py"
    function.write_text("def f(example, completion):\n    return 1.0 + float(example.id.split('/')[1])\n")
    out = str(tmp_path / "other")
    distill(tmp_path, {"name": "gvpo_opd", "weighting": f"{function}:f"}, out=out)
    assert [comparable(row) for row in metrics(Path(out))] == [comparable(row) for row in metrics(tmp_path / "run")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("f", r"algorithm\.weighting: takes a function as path/to/file\.py:name or null, got the text 'f'"),
        (2.0, r"algorithm\.weighting: takes a function as path/to/file\.py:name or null, got 2\.0"),
        ("nowhere.py:f", r"algorithm\.weighting: there is no file"),
        ("{file}:x", r"algorithm\.weighting: .*:x is no function"),
        ("{file}:g", r"algorithm\.weighting: 'g' is not defined"),
    ],
)
def test_a_weighting_that_is_no_function_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    (tmp_path / "mine.py").write_text("x = 3\n")
    value = value.format(file=tmp_path / "mine.py") if isinstance(value, str) else value
    with pytest.raises(UserError, match=message):
        distill(tmp_path, {"name": "gvpo_opd", "weighting": value})


def test_a_weight_that_is_not_positive_ends_the_run_naming_the_row(tmp_path: Path) -> None:
    algorithm = GVPOOPD(weighting=lambda example, completion: -1.0)
    with pytest.raises(UserError, match=r"f takes a finite number above 0.*got -1\.0 for example 'sum/"):
        distill(tmp_path, algorithm)


# -- what is refused -------------------------------------------------------------------------------------------------


def recipe(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    model = str(save_random_model(tmp_path / "model"))
    return {
        "model": {"name": model},
        "task": pairs(tmp_path / "data.jsonl"),
        "teacher": {"model": model},
        "steps": 1,
        "rollout": {"prompts": 4, "completions": 4, "max_tokens": 8},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"name": "gkd"}, "teacher": None}, "teacher: is required, gkd learns from one"),
        ({"algorithm": {"name": "seqkd"}, "teacher": None}, "teacher: is required, seqkd learns from one"),
        ({"algorithm": {"name": "sft"}, "rollout": {"engine": "dataset"}}, "teacher: would be ignored, sft"),
        (
            {"algorithm": {"name": "gkd"}, "rollout": {"engine": "dataset"}},
            "rollout.engine: gkd needs samples of its own policy: set rollout.engine: transformers",
        ),
        (
            {"algorithm": {"name": "seqkd"}, "rollout": {"engine": "dataset"}},
            r"rollout.engine: seqkd needs samples \(teacher\): set rollout.engine: transformers",
        ),
        (
            {"algorithm": {"name": "minillm"}, "rollout": {"engine": "dataset"}},
            r"rollout.engine: minillm needs samples \(mixed\): set rollout.engine: transformers",
        ),
        (
            {"algorithm": {"name": "supervised_kd"}},
            "rollout.engine: supervised_kd learns from given completions: set rollout.engine: dataset",
        ),
        (
            {"algorithm": {"name": "gkd"}, "rollout": {"completions": 4, "replay": {"history": 1}}},
            "rollout.replay: gkd needs samples",
        ),
        (
            {"algorithm": {"name": "gvpo_opd"}, "engine": {"logprob_temperature": 2.0}},
            "engine.logprob_temperature: takes 1 with a teacher",
        ),
        ({"algorithm": {"name": "gvpo_opd"}, "reward": "exact"}, "reward: would be ignored"),
        ({"algorithm": {"name": "gkd", "beta": 1.5}}, "algorithm: beta takes a number from 0 to 1, got 1.5"),
        ({"algorithm": {"name": "gkd", "on_policy": -0.5}}, "algorithm: on_policy takes a number from 0 to 1"),
        ({"algorithm": {"name": "supervised_kd", "temperature": 0.0}}, "temperature takes a number above 0"),
    ],
)
def test_wrong_recipes_of_distillation(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(recipe(tmp_path, **changes), where="test")


def test_a_cache_that_nothing_fills_is_refused(tmp_path: Path) -> None:
    data = recipe(tmp_path, algorithm={"name": "gvpo_opd"})
    data["teacher"]["cache"] = "x.jsonl"
    with pytest.raises(
        UserError, match=r"teacher\.cache: would be ignored, gvpo_opd asks the teacher for no completions"
    ):
        validate(data, where="test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"task": Sums(), "algorithm": {"name": "gkd"}},
            r"'sum/4' has no completions, which the algorithm learns from",
        ),
        ({"algorithm": {"name": "gkd"}, "rewarded": True}, r"task\.rewards: would be ignored"),
        ({"algorithm": {"name": "seqkd"}}, r"task\.completion: would be ignored"),
        (
            {"task": Sums(), "algorithm": {"name": "pg_opd_sequence"}, "reward": "exact"},
            "the algorithm makes its own rewards",
        ),
        (
            {"algorithm": {"name": "minillm"}, "teacher": {"url": "http://localhost:1/v1", "tokenizer": "tiny"}},
            r"teacher\.url: .*use teacher\.model",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_a_model_loads(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = recipe(tmp_path, **changes)
    if data.pop("rewarded", False):
        data["task"]["rewards"] = "rewards"
    with pytest.raises(UserError, match=message):
        resolve(validate(data, where="test"))


# -- learning --------------------------------------------------------------------------------------------------------


def first_tokens(model: torch.nn.Module, tokenizer: Any) -> torch.Tensor:
    """(prompts, V) log-probs of the first token of a completion."""
    rows = []
    for example in Sums(test_rows=0).load().train:
        ids = tokenizer.apply_chat_template(example.prompt, add_generation_prompt=True)["input_ids"]
        with torch.no_grad():
            rows.append(model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["gvpo_opd", "gkd", *_slow(*sorted({*METHODS} - {"gvpo_opd", "gkd"}))])
def test_the_student_nears_its_teacher(tmp_path: Path, name: str) -> None:
    """Reverse KL of the first token, averaged over prompts, after twenty steps against where it started.

    SeqKD has sixteen samples of each prompt and learns them by heart: it is asked for its loss.
    """
    more = {"supervised_kd": {"data": "teacher"}, "gkd": {"off_policy": "teacher"}}.get(name, {})
    teacher = random_llama(seed=1, scale=3.0)
    folder = save_random_model(tmp_path / "peaked")
    teacher.save_pretrained(folder)
    trained = distill(
        tmp_path, {"name": name, **more}, teacher={"model": str(folder)}, steps=20, task=Sums(test_rows=0), reward=None,
        rollout={"prompts": 8, "completions": 16, "max_tokens": 3}, optimizer={"lr": 1e-2},
    )  # fmt: skip
    if name == "seqkd":
        losses = [row["loss"] for row in metrics(tmp_path / "run")[1:]]
        assert losses[-1] < losses[0] - 0.3
        return
    q = first_tokens(teacher, trained.tokenizer)
    start, end = (
        float((p.exp() * (p - q)).sum(-1).mean())
        for p in (first_tokens(model, trained.tokenizer) for model in (random_llama(), trained.model))
    )
    assert end < 0.8 * start, f"{start:.3f} -> {end:.3f}"
