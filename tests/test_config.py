"""Recipes: reading, overriding, strict checking with friendly messages, and the resolved form."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from covary.algorithms import ALGORITHMS, GVPO
from covary.config import (
    RESUMABLE,
    RunConfig,
    apply_overrides,
    changed_keys,
    load_recipe,
    reference_model,
    to_dict,
    to_yaml,
    updates_per_rollout,
    validate,
    warnings_for,
)
from covary.settings import Judge, JudgeReward, JudgeServer, Optimizer, RewardModel
from covary.tasks import ReasoningGym
from covary.types import UserError

RECIPE = """\
seed: 3
steps: 10
task: {name: reasoning_gym, tasks: {chain_sum: {max_digits: 2}}, train: 20, test: 10}
algorithm: {name: gvpo, beta: 0.2}
rollout: {prompts: 8, completions: 4, stop: ["</answer>"]}
optimizer: {lr: 1e-4, prompts: 2, warmup: 0.05}
"""


def recipe(*overrides: str) -> dict[str, Any]:
    return apply_overrides(yaml.safe_load(RECIPE.replace("1e-4", "0.0001")), list(overrides))


def config(*overrides: str) -> RunConfig:
    return validate(recipe(*overrides), where="test.yaml")


def message(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config(*overrides)
    text = str(caught.value)
    assert all(line.startswith("test.yaml: ") for line in text.splitlines())
    return text.replace("test.yaml: ", "")


def load(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_recipe(path)


def load_error(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(tmp_path))


# ---- reading -------------------------------------------------------------------------------------


def test_a_recipe_becomes_a_configuration(tmp_path: Path):
    built = validate(load(tmp_path, RECIPE), where="x")
    assert (built.seed, built.steps, built.epochs) == (3, 10, None)
    assert built.algorithm == GVPO(beta=0.2)
    assert built.task == ReasoningGym(tasks={"chain_sum": {"max_digits": 2}}, train=20, test=10)
    assert built.rollout.stop == ("</answer>",)
    assert built.optimizer == Optimizer(lr=1e-4, prompts=2, warmup=0.05)
    assert (built.model.name, built.reference, built.doctor) == ("tiny", None, "warn")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-1", 0.1),
        ("5e2", 500.0),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("7", 7),
        ("-0", 0),
        ("'7'", "7"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("true", True),
        ("'false'", "false"),
        ("yes", "yes"),
        ("no", "no"),
        ("", None),
        ("~", None),
        (".nan", ".nan"),
        ("e5", "e5"),
    ],
)
def test_scalars_are_those_of_json(tmp_path: Path, text: str, value: object):
    read = load(tmp_path, f"key: {text}")["key"]
    assert read == value
    assert type(read) is type(value)


def test_floats_without_a_dot_are_numbers_of_their_fields(tmp_path: Path):
    text = RECIPE.replace("warmup: 0.05", "warmup: 5e2").replace("beta: 0.2", "beta: 1E-1")
    built = validate(load(tmp_path, text.replace("lr: 1e-4", "lr: 1e-5")), where="x")
    assert built.optimizer.lr == 1e-5
    assert built.optimizer.warmup == 500
    assert built.algorithm == GVPO(beta=0.1)


def test_a_key_given_twice_is_an_error_with_its_line(tmp_path: Path):
    assert load_error(tmp_path, "seed: 1\noptimizer:\n  lr: 1\n  lr: 2\n") == (
        "/recipe.yaml:4: the key 'lr' is given twice"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\nb: 2\n", "/recipe.yaml:2: "),
        ("a: 1\n\tb: 2\n", "/recipe.yaml:2: "),
        ("1: 2\n", "/recipe.yaml:1: a key must be text, got 1"),
        ("? [a]\n: 2\n", "/recipe.yaml:1: a key must be text, got the list ['a']"),
        ("lr: 1e999\n", "/recipe.yaml:1: 1e999 is too large"),
        ("a: &x [*x]\n", "/recipe.yaml:1: found unconstructable recursive node"),
        ("a: !!python/object:os.system {}\n", "/recipe.yaml:1: could not determine a constructor"),
        ("a: 1\n---\nb: 1\n", "/recipe.yaml:2: but found another document"),
        ("", "/recipe.yaml: a recipe is a mapping of out, seed, steps"),
        ("- a\n", "got the list ['a']"),
        ("a: \x07\n", "/recipe.yaml: "),
        (b"a: \xff\n", "/recipe.yaml: not UTF-8 text (byte 3)"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str | bytes, expected: str):
    assert expected in load_error(tmp_path, text)


def test_a_byte_order_mark_is_accepted(tmp_path: Path):
    assert load(tmp_path, b"\xef\xbb\xbfseed: 1\n") == {"seed": 1}


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"none\.yaml: cannot read the recipe: no such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot read the recipe: is a directory"):
        load_recipe(tmp_path)


def test_importing_config_loads_no_torch():
    code = "import sys, covary.config, covary.settings; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# ---- overrides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "model.lora={rank: 0, alpha: x}",
            r"model.lora.rank: takes an integer above 0, got 0\ntest.yaml: model.lora.alpha: takes",
        ),
        ("model.lora={targets: q_proj}", "model.lora.targets: takes all-linear or a list .*, got the text 'q_proj'"),
        ("model.lora={targets: []}", "model.lora.targets: names no layer"),
        ("model.lora={lora_alpha: 4}", r"model.lora.lora_alpha: unknown key; did you mean model.lora.alpha\?"),
        ("model.lora=3", "model.lora: takes a mapping of rank, alpha, targets or null, got 3"),
        ("rollout.replay={size: 2}", "rollout.replay.history: is required; takes an integer above 0"),
    ],
)
def test_a_mistake_in_a_section_of_a_section_is_named(override, problem):
    with pytest.raises(UserError, match=problem):
        config(override)


def test_overrides_set_nested_keys_and_make_sections():
    before = {"algorithm": {"name": "gvpo"}, "log": None}
    after = apply_overrides(
        before,
        [
            "algorithm.beta=2e-1",
            "steps=12",
            "checkpoint.every=3",
            "log.samples=0",
            "out=runs/a=b",
            "rollout.stop=['\\n', x]",
            "task.tasks.chain_sum.max_digits=3",
            "eval.every=",
            "steps=13",
        ],
    )
    assert after == {
        "algorithm": {"name": "gvpo", "beta": 0.2},
        "log": {"samples": 0},
        "steps": 13,
        "checkpoint": {"every": 3},
        "out": "runs/a=b",
        "rollout": {"stop": ["\\n", "x"]},
        "task": {"tasks": {"chain_sum": {"max_digits": 3}}},
        "eval": {"every": None},
    }
    assert before == {"algorithm": {"name": "gvpo"}, "log": None}


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=1", ".a=1", "a.=1", "", "--steps 3"])
def test_an_override_is_key_equals_value(override: str):
    with pytest.raises(UserError, match="an override is key=value, such as "):
        apply_overrides({}, [override])


def test_bad_override_values_and_paths():
    with pytest.raises(UserError, match=r"'a=\[1': the value is not YAML: "):
        apply_overrides({}, ["a=[1"])
    with pytest.raises(UserError, match="the key 'x' is given twice"):
        apply_overrides({}, ["a={x: 1, x: 2}"])
    with pytest.raises(UserError, match="seed is not a section, it is 3"):
        apply_overrides({"seed": 3}, ["seed.x=1"])


def test_another_algorithm_keeps_the_old_keys_and_reports_them():
    assert message("algorithm.name=grpo") == "algorithm.beta: unknown key; valid keys: name, clip, kl_coef"


# ---- unknown keys --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.learning_rate=1e-5", "optimizer.learning_rate: unknown key; did you mean optimizer.lr? valid keys: lr, prompts, "),
        ("optimizer.lerning_rate=1e-5", "optimizer.lerning_rate: unknown key; did you mean optimizer.lr? valid keys: "),
        ("lr=0.2", "lr: unknown key; belongs under optimizer"),
        ("learning_rate=0.2", "learning_rate: unknown key; did you mean optimizer.lr? valid keys: out, seed, "),
        ("beta=0.2", "beta: unknown key; belongs under algorithm"),
        ("max_tokens=8", "max_tokens: unknown key; belongs under rollout or under eval"),
        ("optimizer.seed=1", "optimizer.seed: unknown key; belongs at the top level or under task"),
        ("rollout.lr=1", "rollout.lr: unknown key; belongs under optimizer"),
        ("rollout.max_new_tokens=8", "did you mean rollout.max_tokens?"),
        ("algoritm.name=grpo", "algoritm: unknown key; did you mean algorithm? valid keys: out, seed, "),
        ("zzz=1", "zzz: unknown key; valid keys: out, seed, "),
        ("algorithm.btea=1", "algorithm.btea: unknown key; did you mean algorithm.beta? valid keys: name, beta"),
        ("task.trian=1", "task.trian: unknown key; did you mean task.train? valid keys: name, tasks, train, "),
    ],
)  # fmt: skip
def test_unknown_keys_name_the_right_one(override: str, expected: str):
    assert expected in message(override)


def test_misspelled_and_misplaced_keys_are_reported_together():
    text = message("optimizer.lerning_rate=0.1", "lr=0.2")
    assert "optimizer.lerning_rate: unknown key; did you mean optimizer.lr?" in text
    assert "lr: unknown key; belongs under optimizer" in text


def test_unknown_names_of_algorithms_and_tasks():
    assert message("algorithm.name=gpvo") == (
        f"algorithm.name: unknown algorithm 'gpvo'; did you mean gvpo? valid names: {', '.join(ALGORITHMS)}, or your own as path/to/file.py:Class"
    )
    assert message("task.name=json") == (
        "task.name: unknown task 'json'; did you mean jsonl? valid names: reasoning_gym, jsonl, parquet, hub, benchmark, or your own as path/to/file.py:Class"
    )
    assert message("algorithm.name=zzz") == (
        f"algorithm.name: unknown algorithm 'zzz'; valid names: {', '.join(ALGORITHMS)}, or your own as path/to/file.py:Class"
    )


def test_a_task_and_an_algorithm_are_required():
    names = ", ".join(ALGORITHMS)
    assert message("algorithm=") == f"algorithm: is required; algorithm.name takes one of {names}"
    assert message("algorithm={beta: 1}") == f"algorithm.name: is required; one of {names}"
    assert message("algorithm=gvpo") == (
        f"algorithm: takes a mapping with a name (one of {names}) and its settings, or an instance of a frozen dataclass, got the text 'gvpo'"
    )
    assert message("algorithm.name=3") == f"algorithm.name: takes one of {names}, got 3"
    assert message("task={name: reasoning_gym}") == (
        "task.tasks: is required; takes a mapping (each: a mapping or null)"
    )


# ---- types and ranges ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed='7'", "seed: takes an integer, got the text '7'"),
        ("seed=3.0", "seed: takes an integer, got 3.0"),
        ("seed=true", "seed: takes an integer, got true"),
        ("seed=[1]", "seed: takes an integer, got the list [1]"),
        ("steps=0", "steps: takes an integer above 0 or null, got 0"),
        ("out=3", "out: takes non-empty text or null, got 3"),
        ("out=''", "out: takes non-empty text or null, got the text ''"),
        ("rollout=3", "rollout: takes a mapping of engine, prompts, completions, "),
        ("rollout.prompts=0", "rollout.prompts: takes an integer above 0, got 0"),
        ("rollout.prompts=1e2", "rollout.prompts: takes an integer above 0, got 100.0"),
        ("rollout.prompts=null", "rollout.prompts: takes an integer above 0, got null"),
        ("rollout.completions=-1", "rollout.completions: takes an integer above 0, got -1"),
        ("rollout.max_tokens=0", "rollout.max_tokens: takes an integer above 0, got 0"),
        ("rollout.temperature=0", "rollout.temperature: takes a number above 0, got 0"),
        ("rollout.stop=x", "rollout.stop: takes a list (each: non-empty text), got the text 'x'"),
        ("rollout.stop=['']", "rollout.stop: takes a list (each: non-empty text), got the list ['']"),
        ("rollout.max_regenerations=-1", "rollout.max_regenerations: takes an integer from 0, got -1"),
        ("optimizer.lr=-1", "optimizer.lr: takes a number from 0, got -1"),
        ("optimizer.lr='1e-5'", "optimizer.lr: takes a number from 0, got the text '1e-5'"),
        ("optimizer.lr=.nan", "optimizer.lr: takes a number from 0, got the text '.nan'"),
        ("optimizer.passes=0", "optimizer.passes: takes an integer above 0, got 0"),
        ("optimizer.warmup=-0.1", "optimizer.warmup: takes a number from 0, got -0.1"),
        ("optimizer.warmup=1.5", "optimizer.warmup: takes a share of the steps (below 1) or a whole number of steps, got 1.5"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas: takes a list of 2 (each: a number from 0 and below 1), got the list [0.9, 1]"),
        ("optimizer.betas=[0.9]", "optimizer.betas: takes a list of 2 (each: a number from 0 and below 1), got the list [0.9]"),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm: takes a number above 0, got 0"),
        ("optimizer.schedule=cos", "optimizer.schedule: takes one of constant, cosine, linear, got the text 'cos'"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay: takes a number from 0, got -1"),
        ("engine.device=tpu", "engine.device: takes one of auto, cpu, cuda, got the text 'tpu'"),
        ("engine.micro_batch_tokens=0", "engine.micro_batch_tokens: takes an integer above 0, got 0"),
        ("engine.gradient_checkpointing='false'", "engine.gradient_checkpointing: takes true or false, got the text 'false'"),
        ("engine.gradient_checkpointing=1", "engine.gradient_checkpointing: takes true or false, got 1"),
        ("engine.gradient_checkpointing=no", "engine.gradient_checkpointing: takes true or false, got the text 'no'"),
        ("engine.logprob_temperature=0", "engine.logprob_temperature: takes a number above 0, got 0"),
        ("eval.every=0", "eval.every: takes an integer above 0 or null, got 0"),
        ("eval.samples=0", "eval.samples: takes an integer above 0, got 0"),
        ("eval.temperature=0", "eval.temperature: takes a number above 0, got 0"),
        ("checkpoint.every=0", "checkpoint.every: takes an integer above 0 or null, got 0"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last: takes an integer above 0 or -1, got 0"),
        ("log.samples=-1", "log.samples: takes an integer from 0, got -1"),
        ("log.tracker=mlflow", "log.tracker: takes one of none, tensorboard, wandb, trackio, got the text 'mlflow'"),
        ("log.project=mine", "log.project: would be ignored, log.tracker: none has no projects"),
        ("rollout.engine=sglang", "rollout.engine: takes one of transformers, vllm, dataset, got the text 'sglang'"),
        ("rollout.server.url=http://127.0.0.1:8000/v1", "rollout.server: would be ignored, only rollout.engine: vllm has one"),
        ("rollout.memory_share=0.5", "rollout.memory_share: would be ignored, only rollout.engine: vllm has one"),
        ("rollout.memory_share=1", "rollout.memory_share: takes a number above 0 and below 1, got 1"),
        ("rollout={engine: vllm, server: {url: 'x:1'}}", "rollout.server.url: takes an address such as http://localhost:8000/v1, "
         "got 'x:1'"),
        ("rollout={engine: vllm, server: {}}", "rollout.server.url: is required; takes non-empty text"),
        ("rollout={engine: vllm, memory_share: 0.5, server: {url: 'http://127.0.0.1:8000/v1'}}", "rollout.memory_share: would be "
         "ignored, rollout.server has a memory of its own (--gpu-memory-utilization)"),
        ("doctor=on", "doctor: takes one of warn, stop, off, got the text 'on'"),
        ("reference=teacher", "reference: takes one of old, initial or null, got the text 'teacher'"),
        ("teacher.model=tiny", "teacher: would be ignored, gvpo reads no teacher"),
        ("teacher={url: a, tokenizer: b}", "teacher.url: takes an address such as http://localhost:8000/v1, got 'a'"),
        ("teacher={model: tiny, device: tpu}", "teacher.device: takes auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("teacher.model=3", "teacher.model: takes non-empty text, got 3"),
        ("task.train='20'", "task.train: takes an integer, got the text '20'"),
        ("task.tasks.chain_sum=3", "task.tasks: takes a mapping (each: a mapping or null), got the mapping {'chain_sum': 3}"),
        ("algorithm.beta='0.1'", "algorithm.beta: takes a number, got the text '0.1'"),
        ("algorithm.beta=0", "algorithm: beta takes a number above 0, got 0.0"),
        ("task.tasks.chain_sum.zzz=1", "task.tasks.chain_sum: unknown parameter 'zzz'; valid: "),
        ("task.train=-1", "task.train: a number of rows is 0 or more, not -1"),
    ],
)  # fmt: skip
def test_wrong_values_name_the_field_and_what_it_takes(override: str, expected: str):
    text = message(override)
    assert text.startswith(expected)
    assert text == expected or override in ("rollout=3", "task.tasks.chain_sum.zzz=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "teacher={model: tiny, url: 'http://a'}",
            "teacher.url: does not go together with teacher.model; teacher takes",
        ),
        ("reward={judge: {model: m}, likelihood: sum}", "reward.likelihood: does not go together with reward.judge;"),
    ],
)
def test_keys_of_two_forms_of_a_section_do_not_go_together(override: str, expected: str):
    assert message(override).startswith(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, {1, 2}, Path("x")])
def test_values_from_python_are_checked_alike(value: object):
    with pytest.raises(UserError, match=r"optimizer\.lr: takes a number from 0, got "):
        validate(recipe() | {"optimizer": {"lr": value}}, where="train")


def test_an_integer_will_do_for_a_number_and_null_for_a_section():
    built = config("optimizer.lr=1", "engine=", "eval=", "optimizer.warmup=3")
    assert built.optimizer.lr == 1.0
    assert type(built.optimizer.lr) is float
    assert built.engine.micro_batch_tokens == 8192


# ---- rules between keys --------------------------------------------------------------------------

SFT = ("algorithm={name: sft}", "rollout.engine=dataset")


def test_exactly_one_of_steps_and_epochs():
    assert message("steps=") == "steps: set steps or epochs"
    assert message("epochs=2") == "steps: set steps or epochs, not both"
    assert config("steps=", "epochs=0.5").epochs == 0.5


def test_an_algorithm_needs_its_smallest_group():
    assert message("rollout.completions=1") == (
        "rollout.completions: gvpo needs at least 2 completions per prompt, got rollout.completions: 1"
    )


def test_optimizer_prompts_divide_rollout_prompts():
    assert message("optimizer.prompts=3") == (
        "optimizer.prompts: must divide rollout.prompts (8), got 3; nearest: 2, 4"
    )
    assert message("optimizer.prompts=20").endswith("must divide rollout.prompts (8), got 20; nearest: 4, 8")


def test_trained_weights_are_float32():
    assert message("model.dtype=bfloat16") == (
        "model.dtype: trained weights are float32 master weights; to compute in bfloat16 set engine.autocast: bfloat16"
    )


def test_reference_is_for_algorithms_that_read_one():
    assert config("reference=initial").reference == "initial"
    assert message("algorithm={name: grpo}", "reference=old") == (
        "reference: would be ignored, grpo reads no reference model"
    )


def test_offline_and_online_algorithms_take_their_engine():
    assert config(*SFT).rollout.engine == "dataset"
    assert config("rollout.engine=dataset").algorithm == GVPO(beta=0.2)
    assert message("algorithm={name: sft}") == (
        "rollout.engine: sft learns from given completions: set rollout.engine: dataset"
    )
    assert message("algorithm={name: grpo}", "rollout.engine=dataset") == (
        "rollout.engine: grpo needs samples of its own policy: set rollout.engine: transformers"
    )


def test_a_reward_is_a_name_a_reward_model_or_a_judge():
    assert config("reward=exact").reward == "exact"
    assert config("reward={model: a/b}").reward == RewardModel("a/b", 8192)
    judge = config("reward={judge: {model: a/b, server: {url: 'http://x/v1'}}}", "reward.judge.max_tokens=64").reward
    assert judge == JudgeReward(Judge("a/b", JudgeServer("http://x/v1"), max_tokens=64))
    changed = config("reward={judge: {model: a/b}}", "eval.reward={model: c}")
    assert validate(to_dict(changed), where="again") == changed
    assert changed_keys(config("reward={model: a}"), config("reward={model: b}")) == ["reward.model"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("reward={model: 3}", "reward.model: takes non-empty text, got 3"),
        ("reward={model: a, batch: 3}", "reward.batch: unknown key; valid keys: model, micro_batch_tokens"),
        ("reward={judge: {modle: a}}", "reward.judge.modle: unknown key; did you mean reward.judge.model? valid keys: model, "
         "server, style, prompt_file, max_tokens, cache\nreward.judge.model: is required; takes non-empty text"),
        ("reward={judge: {model: a, style: xverify}}", "reward.judge.prompt_file: is required with style: xverify; its prompt "
         "is licensed CC BY-NC-ND and not shipped, copy it from https://github.com/IAAR-Shanghai/xVerify into a text file"),
        ("reward={judge: {model: a, server: {url: 'x:1'}}}", "reward.judge.server.url: takes an address such as "
         "http://localhost:8000/v1, got 'x:1'"),
        ("reward=3", "reward: takes non-empty text or a mapping of model, micro_batch_tokens or a mapping of judge or a mapping of likelihood or null, "
         "got 3"),
    ],
)  # fmt: skip
def test_mistakes_in_a_reward_are_named(override: str, expected: str):
    assert message(override) == expected


def test_settings_that_would_be_ignored_are_errors():
    assert message(*SFT, "reward=exact") == (
        "reward: would be ignored, sft trains without a reward; to grade evaluation set eval.reward"
    )
    assert config(*SFT, "eval.reward=exact").eval.reward == "exact"
    assert message("algorithm={name: seqkd}", "teacher.model=tiny", "reward=null", "rollout.engine=vllm") == (
        "rollout.engine: vllm samples the policy, and seqkd learns from no samples of it alone"
    )
    assert message(*SFT, "rollout.engine=vllm") == (
        "rollout.engine: sft learns from given completions: set rollout.engine: dataset"
    )
    assert message(*SFT, "rollout.temperature=0.5") == (
        "rollout.temperature: would be ignored, rollout.engine: dataset samples nothing"
    )


def test_every_problem_has_its_line():
    text = message(
        "seed='7'",
        "optimizer.prompts=3",
        "rollout.completions=1",
        "zzz=1",
        "engine.device=tpu",
        "steps=",
    )
    for part in (
        "seed: ",
        "optimizer.prompts: ",
        "rollout.completions: ",
        "zzz: ",
        "engine.device: ",
        "steps: ",
    ):
        assert any(line.startswith(part) for line in text.splitlines())
    assert len(text.splitlines()) == 6


def test_rules_between_keys_wait_for_right_keys():
    assert message("rollout.prompts='64'", "optimizer.prompts=3") == (
        "rollout.prompts: takes an integer above 0, got the text '64'"
    )


# ---- objects from Python -------------------------------------------------------------------------


@dataclass(frozen=True)
class Mine(GVPO):
    """A caller's own algorithm."""

    min_group = 3


def test_built_objects_are_taken_and_checked():
    task = ReasoningGym(tasks={"chain_sum": None})
    built = validate(recipe() | {"task": task, "algorithm": Mine(beta=0.3)}, where="train")
    assert built.task is task
    assert built.algorithm == Mine(beta=0.3)
    assert to_dict(built)["algorithm"] == {
        "name": f"{__file__}:Mine", "beta": 0.3, "terms": ("covariance", "variance"), "entropy_coef": 0.0,
    }  # fmt: skip
    with pytest.raises(UserError, match="Mine needs at least 3 completions per prompt"):
        validate(recipe("rollout.completions=2") | {"algorithm": Mine()}, where="train")


# ---- the resolved recipe -------------------------------------------------------------------------


def test_the_resolved_recipe_spells_out_every_setting(tmp_path: Path):
    built = config()
    resolved = load(tmp_path, to_yaml(built))
    assert list(resolved) == [
        "out", "seed", "steps", "epochs", "model", "task", "reward", "algorithm", "rollout", "optimizer",
        "engine", "reference", "teacher", "eval", "checkpoint", "log", "doctor",
    ]  # fmt: skip
    assert resolved["algorithm"] == {
        "name": "gvpo", "beta": 0.2, "terms": ["covariance", "variance"], "entropy_coef": 0.0,
    }  # fmt: skip
    assert resolved["optimizer"]["max_grad_norm"] == 1.0
    assert resolved["optimizer"]["betas"] == [0.9, 0.999]
    assert validate(resolved, where="x") == built


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.sampled_from(["1e-5", "5e2", "010", "08", "1_000", "yes", "null", "~", "on", "=", "<<", ".nan", "1:30", "-", "#a", "a\x85b", "a\n\n b "]),
)  # fmt: skip
NUMBERS = st.floats(min_value=1e-12, max_value=1e12)


@settings(max_examples=60, deadline=None)
@given(
    name=TEXT,
    out=st.none() | TEXT,
    stop=st.lists(TEXT, max_size=3),
    lr=NUMBERS,
    beta=NUMBERS,
    seed=st.integers(0, 2**63 - 1),
    counts=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(2, 9)),
    betas=st.tuples(*[st.just(0.0) | st.floats(1e-12, 1, exclude_max=True)] * 2),
    reference=st.sampled_from([None, "old", "initial"]),
    flag=st.booleans(),
    instruction=st.none() | TEXT,
)
def test_the_resolved_recipe_reloads_equal(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    out: str | None,
    stop: list[str],
    lr: float,
    beta: float,
    seed: int,
    counts: tuple[int, int, int],
    betas: tuple[float, float],
    reference: str | None,
    flag: bool,
    instruction: str | None,
):
    built = validate(
        {
            "out": out,
            "seed": seed,
            "steps": counts[0],
            "model": {"name": name, "trust_remote_code": flag},
            "task": {
                "name": "reasoning_gym",
                "tasks": {"chain_sum": {"max_digits": 2}},
                "instruction": instruction,
            },
            "algorithm": {"name": "gvpo", "beta": beta},
            "rollout": {"prompts": counts[0] * counts[1], "completions": counts[2], "stop": stop},
            "optimizer": {"lr": lr, "prompts": counts[0], "betas": betas},
            "reference": reference,
        },
        where="x",
    )
    folder = tmp_path_factory.getbasetemp()
    assert validate(load(folder, to_yaml(built)), where="x") == built
    assert changed_keys(built, built) == []


# ---- read off a configuration --------------------------------------------------------------------


def test_changed_keys_are_dotted():
    a = config()
    b = config("steps=20", "eval.every=5", "optimizer.lr=1", "task.tasks.chain_sum.max_digits=3")
    assert changed_keys(a, b) == [
        "steps",
        "task.tasks.chain_sum.max_digits",
        "optimizer.lr",
        "eval.every",
    ]
    c = config("algorithm={name: grpo}")
    assert changed_keys(a, c) == [
        "algorithm.name",
        "algorithm.beta",
        "algorithm.terms",
        "algorithm.entropy_coef",
        "algorithm.clip",
        "algorithm.kl_coef",
    ]
    assert {key.split(".")[0] for key in changed_keys(a, b)} - RESUMABLE == {"task", "optimizer"}


def test_a_resume_may_change_only_what_leaves_the_steps_done_as_they_are():
    assert {"steps", "eval", "checkpoint", "log"} == RESUMABLE


def test_updates_per_rollout():
    assert updates_per_rollout(config()) == 4
    assert updates_per_rollout(config("optimizer.prompts=", "optimizer.passes=3")) == 3
    assert updates_per_rollout(config("optimizer.prompts=8")) == 1


def test_the_reference_is_old_by_default():
    assert reference_model(config()) == "old"
    assert reference_model(config("reference=initial")) == "initial"


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["optimizer.prompts=8"], True),
        (["optimizer.prompts="], True),
        (["optimizer.prompts=8", "reference=old"], True),
        (["optimizer.prompts=8", "reference=initial"], False),
        (["optimizer.prompts=8", "optimizer.passes=2"], False),
        (["optimizer.prompts=4"], False),
        (["optimizer.prompts=8", "algorithm={name: grpo}"], False),
    ],
)
def test_one_update_per_rollout_from_the_old_policy_is_warned_of(overrides: list[str], warned: bool):
    warnings = warnings_for(config(*overrides))
    assert len(warnings) == warned
    assert all("nothing holds the policy back" in warning for warning in warnings)


def test_a_warmup_that_outlasts_the_run_is_warned_of():
    assert warnings_for(config("optimizer.warmup=10")) == [
        "optimizer.warmup: 10 steps of warm-up in a run of 10 never reach the learning rate"
    ]
    assert warnings_for(config("optimizer.warmup=9")) == []
    assert warnings_for(replace(config("optimizer.warmup=10"), steps=None, epochs=1.0)) == []
