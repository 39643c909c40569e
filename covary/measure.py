"""A model and a task become an evaluation: what `covary eval` and `covary.evaluate` share.

The mathematics is in `evaluate.py`, the folder in `samples.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covary import __version__
from covary.api import RewardSpec, Trained, check_lengths, check_writable, load_task, model_of_run, plain, task_reward
from covary.batch import Algorithm
from covary.config import validate_reward, validate_task
from covary.evaluate import Evaluator, Sample
from covary.http import read_key
from covary.models.loading import load_model, load_tokenizer, pick_device
from covary.prompts import Template, load_template, prompt_group
from covary.rewards.facts import grader_version
from covary.rollout.server import ServerRollout
from covary.rollout.transformers import TransformersRollout
from covary.samples import Shard, answer
from covary.seeding import derive_seed
from covary.settings import check_address
from covary.tasks import Benchmark
from covary.tasks.task import Task
from covary.types import Example, Sampling, UserError


@dataclass(frozen=True)
class Conditions:
    """How a model is asked.

    Attributes:
        samples: sampled completions per question (N).
        temperature: of the sampled ones.
        max_tokens: per completion, at most.
        stop: texts that end a completion.
        seed: of the sampling.
        greedy: also one greedy completion per question.
        pass_at: the k of pass@k, at most N; None: N where that is above 1.
    """

    samples: int = 1
    temperature: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
    greedy: bool = True
    pass_at: tuple[int, ...] | None = None

    def check(self, task: str) -> None:
        """Refuse a k of pass@k above N.

        Raises:
            UserError: naming the task.
        """
        for k in self.pass_at or ():
            if not 1 <= k <= self.samples:
                raise UserError(f"pass@{k}: {task} has {self.samples} samples per question; k goes from 1 to that")


@dataclass(frozen=True)
class Questions:
    """What is asked: a loaded task, the form of its prompts, and what grades the answers (None: the task's grader)."""

    task: Task
    template: Template
    reward: RewardSpec | None = None


@dataclass(frozen=True)
class Policy:
    """Who is asked.

    Attributes:
        rollout: samples from it.
        tokenizer: its own.
        architecture: its configuration, which limits prompts; None where a server alone knows.
        identity: what tells it from other policies: engine and hash of the weights, or the server's name for it.
        name: how the user called it.
    """

    rollout: TransformersRollout | ServerRollout
    tokenizer: Any
    architecture: Any | None
    identity: dict[str, Any]
    name: str


@dataclass(frozen=True)
class Store:
    """Where an evaluation is kept, and in what parts it is made.

    Attributes:
        folder: of the whole evaluation; each task has a folder of its own below it.
        shard: this process's part of the questions.
        batch: completions between two writes.
        say: told where the file system knows no locks.
    """

    folder: Path
    shard: Shard = field(default_factory=Shard)
    batch: int = 256
    say: Callable[[str], None] = lambda line: None


def evaluate(
    model: str | os.PathLike[str] | Trained | Policy,
    task: Any,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    reward: RewardSpec | Mapping[str, Any] | None = None,
    seed: int = 0,
    greedy: bool = True,
    pass_at: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Accuracy of a model on a task's test split; docs/evaluation.md has the metrics.

    Args:
        model: shipped name, folder, hub id, a run folder (its newest checkpoint), what `train` returned, or a `Policy`.
        task: name of a benchmark, a recipe's `task` section, an object with `load()` (an instance of one of
            `covary.tasks.TASKS`), or a loaded `Task`.
        samples: sampled completions per question.
        temperature: of the sampled ones.
        max_tokens: limit per completion.
        stop: texts that end a completion.
        reward: replaces the task's grader; as the recipe's `reward`, or a function.
        seed: of the sampling.
        greedy: also one greedy completion per question.
        pass_at: the k of pass@k, at most `samples`; None: `samples` where that is above 1.
        out: folder that keeps settings, samples and results; started again with it, the evaluation goes on.
        device: auto, cpu or cuda.
        on_progress: called with (completions finished, completions in all).

    Raises:
        UserError: a mistake in what was asked for.
    """
    conditions = Conditions(
        samples, temperature, max_tokens, tuple(stop), seed, greedy, None if pass_at is None else tuple(pass_at)
    )
    asked = questions(task, reward)
    store = None if out is None else Store(Path(out))
    policy = model if isinstance(model, Policy) else load_policy(model, device)
    policy.rollout.on_progress = on_progress
    metrics = measure(policy, asked, conditions, store=store)
    assert metrics is not None  # without shards nothing is left to others
    return metrics


def measure(
    policy: Policy,
    asked: Questions,
    conditions: Conditions,
    *,
    store: Store | None = None,
) -> dict[str, float] | None:
    """The metrics of a task; None while other processes that share the store have questions left.

    Raises:
        UserError: a mistake in what was asked for, or no completion could be scored.
    """
    if store is not None:
        check_writable("out", store.folder)
    conditions.check(asked.task.name)
    evaluator = build_evaluator(policy, asked, conditions)
    try:
        if store is None:
            samples: Sequence[Sample] | None = evaluator.ask(evaluator.examples)
        else:
            settings = settings_of(evaluator, policy, conditions)
            folder = store.folder / evaluator.name
            samples = answer(folder, evaluator, settings, store.shard, store.batch, store.say)
    finally:
        evaluator.reward.close()
    if samples is None:
        return None
    if all(sample.reward is None for sample in samples):
        reason = next((sample.error for sample in samples if sample.error), "the reward abstains")
        raise UserError(f"no completion of {evaluator.name} could be scored; the first reason: {reason}")
    return evaluator.metrics(samples)


def load_policy(model: str | os.PathLike[str] | Trained, device: str = "auto") -> Policy:
    """A model in this process.

    Raises:
        UserError: it is not there or cannot be loaded.
    """
    if not isinstance(model, str | os.PathLike | Trained):
        raise UserError(
            f"covary.evaluate: model takes a name, a folder, a run folder or what covary.train returned, "
            f"got {type(model).__name__}"
        )
    if isinstance(model, Trained):
        network, tokenizer, name = model.model, model.tokenizer, str(model.folder)
    else:
        name = model_of_run(str(model))
        network, tokenizer = load_model(name, device=pick_device(device)), load_tokenizer(name)
    identity = {"engine": "transformers", "weights_sha256": weights_sha256(network)}
    return Policy(TransformersRollout(network, tokenizer), tokenizer, network.config, identity, name)  # pyright: ignore[reportArgumentType]


def server_policy(model: str, url: str, served: str | None = None, concurrency: int = 32) -> Policy:
    """A model behind a server with OpenAI's completions API; the key is taken from OPENAI_API_KEY.

    Args:
        model: as for `load_policy`; only its tokenizer is loaded.
        url: up to `/v1`.
        served: the server's name for the model; None: `model`.
        concurrency: requests at a time.

    Raises:
        UserError: no such tokenizer, or no address of a server.
    """
    try:
        check_address(url)
    except ValueError as error:
        raise UserError(f"--server: {error}") from error
    name = model_of_run(model)
    tokenizer = load_tokenizer(name)
    served = served or model
    key = read_key("OPENAI_API_KEY", "--server") if os.environ.get("OPENAI_API_KEY") else None
    rollout = ServerRollout(url, served, tokenizer, key, concurrency)
    return Policy(rollout, tokenizer, None, {"engine": "server", "model": served}, model)


def questions(task: Any, reward: RewardSpec | Mapping[str, Any] | None = None) -> Questions:
    """Load a task and look at its reward: no model is needed for it.

    Args:
        task: as `evaluate` takes it.
        reward: likewise.

    Raises:
        UserError: it cannot be loaded, has no test rows, or nothing to grade by.
    """
    if isinstance(task, str):
        task = Benchmark(task)
    elif isinstance(task, Mapping):
        task = validate_task(plain(task), where="covary.evaluate")
    loaded = task if isinstance(task, Task) else load_task(task)
    if not loaded.test:
        raise UserError(f"task {loaded.name} has no test rows to evaluate on")
    if isinstance(reward, Mapping):
        reward = validate_reward(plain(reward), where="covary.evaluate")
    grader = task_reward(reward, loaded, "reward", "auto")
    if grader is None:
        raise UserError(f"task {loaded.name} has no answers to grade by; name a reward")
    grader.close()
    return Questions(loaded, load_template(getattr(task, "template", None) or Algorithm.template), reward)


def build_evaluator(policy: Policy, asked: Questions, conditions: Conditions) -> Evaluator:
    """The evaluation of a policy on a task. Whoever asked for it closes its reward.

    Raises:
        UserError: a prompt leaves no room for a completion.
    """
    task = asked.task
    if policy.architecture is not None:
        check_lengths(task.test, asked.template, policy.tokenizer, policy.architecture, conditions.max_tokens)
    grader = task_reward(asked.reward, task, "reward", "auto")
    assert grader is not None  # `questions` has looked
    return Evaluator(
        name=task.name,
        examples=task.test,
        rollout=policy.rollout,
        reward=grader,
        template=asked.template,
        tokenizer=policy.tokenizer,
        sampling=Sampling(conditions.max_tokens, conditions.temperature, conditions.stop),
        samples=conditions.samples,
        seed=derive_seed(conditions.seed, "eval"),  # as in a run of that seed
        greedy=conditions.greedy,
        pass_at=conditions.pass_at,
    )


def settings_of(evaluator: Evaluator, policy: Policy, conditions: Conditions) -> dict[str, Any]:
    """Everything that the samples and their rewards depend on, and under `about` what is good to know beside."""
    return {
        "task": evaluator.name,
        "questions": len(evaluator.examples),
        "rows_sha256": rows_sha256(evaluator.examples),
        "prompts_sha256": prompts_sha256(evaluator.examples, evaluator.template, policy.tokenizer),
        "model": policy.identity,
        "grader": grader_version(evaluator.reward),
        "sampling": {
            "samples": conditions.samples,
            "greedy": conditions.greedy,
            "temperature": conditions.temperature,
            "max_tokens": conditions.max_tokens,
            "stop": list(conditions.stop),
            "seed": conditions.seed,
        },
        "about": {"model": policy.name, "template": evaluator.template.name, "covary": __version__, "torch": torch.__version__},
    }  # fmt: skip


def rows_sha256(examples: Sequence[Example]) -> str:
    """Of ids, prompts as the task has them, and answers."""
    sha = hashlib.sha256()
    for example in examples:
        sha.update(json.dumps([example.id, example.prompt, example.answer]).encode() + b"\n")
    return sha.hexdigest()


def prompts_sha256(examples: Sequence[Example], template: Template, tokenizer: Any) -> str:
    """Of the token ids that the model reads."""
    sha = hashlib.sha256()
    for example in examples:
        sha.update(json.dumps(prompt_group(example, template, tokenizer).contexts["prompt"]).encode() + b"\n")
    return sha.hexdigest()


def weights_sha256(model: nn.Module) -> str:
    """Of the weights in memory, by name, shape, type and bytes: the same whatever file they came from."""
    sha = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().cpu().contiguous().flatten()
        sha.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        if flat.numel():
            sha.update(memoryview(flat.view(torch.uint8).numpy()))
    return sha.hexdigest()
