"""Shipped recipes are right: `covary check --no-model` passes on every one, on real rows where the data are the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covary.algorithms import ALGORITHMS
from covary.batch import Algorithm
from covary.cli import app
from covary.config import RunConfig, load_recipe, reads_teacher, updates_per_rollout, validate
from covary.rewards import Grader, build_reward
from covary.rewards.reward import PooledReward
from covary.settings import Teacher
from covary.types import UserError

RECIPES = Path(__file__).parent.parent / "recipes"
SMALL = sorted(RECIPES.glob("*.yaml"))
PAPER = sorted((RECIPES / "paper").glob("*.yaml"))
ROWS = 40
WITHOUT_VERIFIER = [
    name
    for name, cls in ALGORITHMS.items()
    if cls.reward is not Algorithm.reward and cls.template != Algorithm.template
]


def load(path: Path) -> RunConfig:
    return validate(load_recipe(path), where=str(path))


REAL_MODELS = {
    "smollm2_reasoning_gym",
    "smollm2_gemma3",
}  # of their own size and budget; the models are fetched by scripts
DISTILLATION = [path for path in SMALL if reads_teacher(load(path).algorithm) and path.stem not in REAL_MODELS]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def data(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a few rows in the place of each file that the papers' recipes name.

    MATH500 stands in for Competition Math, of whose test split it is a part: the same columns, real answers.
    """
    lines = (shared / "data" / "math500" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: 2 * ROWS]]
    write(tmp_path / "data" / "competition_math_train.jsonl", rows[:ROWS])
    write(tmp_path / "data" / "math500_test.jsonl", rows[ROWS:])
    summaries = [
        {"prompt": f"Post {i}", "completions": [f"{i}{c}" for c in "abcde"], "rewards": [i, 0.5, -1.0, 2.0, 0.0]}
        for i in range(ROWS)
    ]
    write(tmp_path / "data" / "tldr_samples.jsonl", summaries)
    lines = (shared / "data" / "webinstruct" / "train_600.jsonl").read_text(encoding="utf-8").splitlines()
    web = [json.loads(line) for line in lines[:ROWS]]
    general = [{"question": row["question"], "answer": row["reference"], "category": "Business"} for row in web]
    mathematics = [{"question": row["problem"], "answer": row["answer"], "category": "Mathematics"} for row in rows[:5]]
    write(tmp_path / "data" / "webinstruct_verified.jsonl", general + mathematics)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[Grader], PooledReward]]:
    """Graders whose worker processes serve every check of this file: starting them takes longer than the rest of it."""
    built: dict[Grader, PooledReward] = {}

    def build(spec: Grader, workers: int) -> PooledReward:
        if spec not in built:
            built[spec] = build_reward(spec, workers=workers)
        return built[spec]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PooledReward, "close", lambda self: None)
        yield build
    for reward in built.values():
        reward.close()


@pytest.fixture(autouse=True)
def kept_workers(pools: Callable[[Grader], PooledReward], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covary.check.build_reward", pools)


def check(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `covary check --no-model` prints; a mistake raises."""
    app(["check", str(path), "--no-model"], standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_a_small_recipe_passes_its_check(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = check(path, capsys)
    config = load(path)
    assert f"{config.steps} steps of {config.rollout.prompts} prompts x {config.rollout.completions} completions" in out
    assert "reference answers: 50 of 50 graded rows get reward 1" in out
    assert "warning" not in out


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_papers_recipe_passes_its_check(path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = check(path, capsys)
    assert "warning" not in out
    assert f"{ROWS} training" in out
    if "math" in load(path).task.path:
        assert f"{ROWS} test rows" in out
        assert "reference answers: 50 of 50 graded rows get reward 1" in out


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_without_its_data_a_papers_recipe_is_a_mistake(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        check(path, capsys)
    assert load(path).task.path in str(caught.value)


def test_every_algorithm_has_a_recipe_of_either_kind() -> None:
    quickstarts = {"gvpo": "quickstart", "gvpo_opd": "distill_quickstart", "covrl": "covrl_quickstart"}
    other = {*quickstarts.values(), *REAL_MODELS}
    of = {path.stem: path for path in SMALL if path.stem not in other}
    of |= {name: RECIPES / f"{stem}.yaml" for name, stem in quickstarts.items()}
    assert set(of) == set(ALGORITHMS)
    assert {path.stem for path in PAPER} == {*ALGORITHMS, "gvpo_tldr", "gvpo_opd_same_tokens"}
    for name, cls in ALGORITHMS.items():
        assert type(load(of[name]).algorithm) is cls
        assert type(load(RECIPES / "paper" / f"{name}.yaml").algorithm) is cls


def test_a_shipped_recipes_name_is_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    app(["list", "recipes"], standalone_mode=False)
    named = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    expected = {path.stem: path for path in SMALL} | {f"paper/{path.stem}": path for path in PAPER}
    assert {name: Path(path) for name, path in named.items()} == expected
    assert "60 steps of 64 prompts" in check(Path("grpo"), capsys)  # not the paper's


def test_small_recipes_without_a_verifier_differ_in_the_method_only() -> None:
    """Task, model, budget and learning rate are those of covrl_quickstart; no recipe names a reward."""
    first = load(RECIPES / "covrl_quickstart.yaml")
    own = [(path, load(path)) for path in SMALL if load(path).model.name == "tiny_think"]
    assert {path.stem for path, _ in own} == {"covrl_quickstart", *WITHOUT_VERIFIER} - {"covrl"}
    for path, config in own:
        same = ("seed", "steps", "model", "engine", "eval", "checkpoint", "rollout", "reward", "reference")
        assert [getattr(config, key) for key in same] == [getattr(first, key) for key in same], path.stem
        assert replace(config.task, template=None) == first.task
        assert config.optimizer.lr == first.optimizer.lr
        assert updates_per_rollout(config) == (1 if path.stem in {"latro", "jlb", "verifree"} else 4)


@pytest.mark.parametrize("name", WITHOUT_VERIFIER)
def test_the_setting_of_covrls_paper(name: str) -> None:
    """Section 3.1, written out."""
    config = load(RECIPES / "paper" / f"{name}.yaml")
    assert config.model.name == "Qwen/Qwen2.5-7B"
    rollout, optimizer = config.rollout, config.optimizer
    assert (rollout.prompts, rollout.completions, rollout.max_tokens, rollout.temperature) == (192, 8, 2048, 1.0)
    assert (optimizer.lr, optimizer.warmup, optimizer.schedule) == (1e-6, 64, "cosine")
    assert config.task.filter == {"category": {"not": "Mathematics"}}
    assert config.algorithm == ALGORITHMS[name]()
    assert config.reward is None


def test_small_recipes_differ_in_the_method_only() -> None:
    """Task, model, budget and learning rate are the quickstart's."""
    first = load(RECIPES / "quickstart.yaml")
    on_policy = {"rloo", "remax", "gpg"}  # no importance ratio: one update a rollout
    for path, config in [(path, load(path)) for path in SMALL]:
        if config.model.name != "tiny":
            continue
        same = ("seed", "steps", "model", "task", "engine", "reference", "eval", "checkpoint")
        assert [getattr(config, key) for key in same] == [getattr(first, key) for key in same], path.stem
        assert config.optimizer.lr == 1e-4
        assert config.rollout.prompts * config.rollout.completions == 64 * 8
        assert updates_per_rollout(config) == (1 if path.stem in on_policy else 4)


def test_small_recipes_of_distillation_differ_in_the_method_and_the_tokenizer_only() -> None:
    """Task, student, budget and learning rate are the distillation quickstart's; the teacher has its tokens or others."""
    first = load(RECIPES / "distill_quickstart.yaml")
    for path in DISTILLATION:
        config = load(path)
        same = ("seed", "steps", "model", "task", "rollout", "optimizer", "engine", "eval", "checkpoint")
        assert [getattr(config, key) for key in same] == [getattr(first, key) for key in same], path.stem
        token_by_token = path.stem in ("supervised_kd", "gkd", "minillm", "pg_opd_token")
        assert config.teacher == Teacher("tiny_teacher_bytes" if token_by_token else "tiny_teacher")


def test_real_models_lie_where_the_scripts_put_them() -> None:
    student, teacher = "models/smollm2-135m-instruct", "models/gemma-3-270m-q4_k_m.gguf"
    assert {load(RECIPES / f"{name}.yaml").model.name for name in REAL_MODELS} == {student}
    assert load(RECIPES / "smollm2_gemma3.yaml").teacher == Teacher(teacher)
    for script, place in (("fetch_smollm2", student), ("fetch_gemma3", teacher)):
        assert place in (RECIPES.parent / "scripts" / f"{script}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "teacher", "algorithm"),
    [
        ("gvpo_opd", "Llama-8B", {"alpha": 1.0, "length_ref": 3072.0}),
        ("gvpo_opd_same_tokens", "Qwen-7B", {"alpha": 0.75, "length_ref": 3072.0}),
        ("seqkd", "Llama-8B", {}),
        ("pg_opd_sequence", "Llama-8B", {}),
        ("supervised_kd", "Qwen-7B", {}),
        ("gkd", "Qwen-7B", {}),
        ("minillm", "Qwen-7B", {}),
        ("pg_opd_token", "Qwen-7B", {}),
    ],
)
def test_the_papers_setting_of_distillation(name: str, teacher: str, algorithm: dict[str, float]) -> None:
    """GVPO++, Table VI: what every method shares, and the two scenarios."""
    config = load(RECIPES / "paper" / f"{name}.yaml")
    assert config.model.name == "Qwen/Qwen2.5-Math-1.5B"
    assert config.teacher is not None
    assert config.teacher.model == f"deepseek-ai/DeepSeek-R1-Distill-{teacher}"  # type: ignore[union-attr]
    assert (config.epochs, config.rollout.prompts, updates_per_rollout(config)) == (2, 256, 1)
    assert config.rollout.completions == (1 if name == "supervised_kd" else 4)
    assert config.optimizer.lr in (1e-6, 3e-6, 1e-5)
    assert config.algorithm == ALGORITHMS[name.removesuffix("_same_tokens")](**algorithm)


@pytest.mark.parametrize(
    "name",
    [
        path.stem
        for path in PAPER
        if path.stem not in ("sft", "dpo", "gvpo_tldr", *WITHOUT_VERIFIER) and not reads_teacher(load(path).algorithm)
    ],
)
def test_the_papers_setting(name: str) -> None:
    """GVPO++, Table I: what every method shares, written out."""
    config = load(RECIPES / "paper" / f"{name}.yaml")
    assert (config.model.name, config.epochs, config.task.template) == ("Qwen/Qwen2.5-Math-7B", 10, "r1")
    assert (config.rollout.prompts, config.rollout.completions) == (1024, 5)
    assert config.rollout.temperature == config.engine.logprob_temperature == 1.0
    optimizer = config.optimizer
    assert (optimizer.prompts, optimizer.lr, optimizer.warmup, optimizer.schedule) == (256, 5e-6, 0.05, "constant")
    # Fields are written out; they are the papers' own, which are the defaults (RAFT keeps right answers: rewards are 0 or 1).
    own = {"keep": "correct"} if name == "raft" else {}
    assert config.algorithm == ALGORITHMS[name](**own)
