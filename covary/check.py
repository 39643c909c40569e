"""`covary check`: everything that can be known about a recipe without training it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from covary.api import Resolved, build, resolve, run_and_close
from covary.config import RunConfig, updates_per_rollout, warnings_for
from covary.log import Screen
from covary.models.loading import SHIPPED, load_config, load_generation_config, load_tokenizer, model_path
from covary.prompts import prompt_group
from covary.rewards import GRADERS, Grader, build_reward
from covary.rollout.transformers import end_ids
from covary.settings import Checkpoint, JudgeReward, LikelihoodReward, Log, RewardModel, Teacher
from covary.tasks.task import Task
from covary.train import planned_steps
from covary.types import Example, RunError, UserError

RENDERED = 2
GRADED = 50
TINY_TOKENS = 8


def check(config: RunConfig, *, with_model: bool, screen: Screen) -> None:
    """Resolve a recipe, show what it would do, and grade its own gold answers.

    Args:
        config: the checked recipe.
        with_model: also load the model and make one tiny step in a temporary folder.
        screen: where the findings go.

    Raises:
        UserError: the first thing that would stop the run.
    """
    for line in warnings_for(config):
        screen.say(f"warning: {line}")
    resolved = resolve(config)
    for line in resolved.task.notes:
        screen.say(f"note: {line}")
    for line in _schedule(config, resolved.task):
        screen.say(line)
    # Graders are processes that take seconds to start, as do tokenizers: both at once.
    with ThreadPoolExecutor(1) as thread:
        gold = thread.submit(lambda: list(_gold(resolved)))
        tokenizer = _tokenizer(config, with_model, screen)
        if tokenizer is not None:
            architecture = load_config(config.model.name, config.model.trust_remote_code, offline=not with_model)
            for line in resolved.check_lengths(tokenizer, architecture):
                screen.say(f"note: {line}")
            generation = load_generation_config(config.model.name, offline=not with_model)
            ends = end_ids(tokenizer, generation, architecture.get_text_config(decoder=True))
            if warning := resolved.end_warning(tokenizer, ends):
                screen.say(f"warning: {warning}")
            for line in _teacher(resolved, tokenizer, architecture, with_model):
                screen.say(line)
    for example in resolved.task.train[:RENDERED]:
        if tokenizer is None:
            screen.say(f"prompt {example.id}: {example.prompt!r}")
            continue
        for name, ids in prompt_group(example, resolved.template, tokenizer).contexts.items():
            screen.say(f"{name} of {example.id}, {len(ids)} tokens: {tokenizer.decode(ids)!r}")
    for line in gold.result():
        screen.say(line)
    if with_model:
        screen.say(_tiny_step(resolved))


def _schedule(config: RunConfig, task: Task) -> Iterator[str]:
    rollout, steps = config.rollout, planned_steps(config.steps, config.epochs, len(task.train), config.rollout.prompts)
    updates = updates_per_rollout(config)
    yield (
        f"{steps} steps of {rollout.prompts} prompts x {rollout.completions} completions, "
        f"{updates} updates a step, {steps * updates} in all; {len(task.train)} training and {len(task.test)} test rows"
    )
    if rollout.engine == "dataset":
        yield f"{steps * rollout.prompts / max(1, len(task.train)):.2f} epochs of the training rows and their completions"
        return
    most = steps * rollout.prompts * rollout.completions * rollout.max_tokens
    epochs = steps * rollout.prompts / max(1, len(task.train))
    yield f"at most {most:,} completion tokens; {epochs:.2f} epochs of the training rows"


def _tokenizer(config: RunConfig, with_model: bool, screen: Screen) -> Any | None:
    """The tokenizer. Without the model none is needed: a recipe may name one that this machine does not hold."""
    try:
        return load_tokenizer(config.model.name, config.model.trust_remote_code, offline=not with_model)
    except UserError:
        if with_model or not _is_absent(config.model.name):
            raise
        screen.say(
            f"note: {config.model.name} is not on this machine: prompts are shown as messages, their lengths not checked"
        )
        return None


def _is_absent(name: str) -> bool:
    """Whether it is not on this machine and need not be: a hub id, or a GGUF file. What is there must be right."""
    try:
        return name not in SHIPPED and not Path(model_path(name)).exists()
    except UserError:  # no such file or folder, or one that holds no model
        path = Path(name).expanduser()
        return path.suffix == ".gguf" and not path.exists()


def _teacher(resolved: Resolved, tokenizer: Any, architecture: Any, with_model: bool) -> list[str]:
    """How the teacher reads the student. Without the model the teacher may be absent too."""
    teacher = resolved.config.teacher
    if teacher is None:
        return []
    key, name = ("model", teacher.model) if isinstance(teacher, Teacher) else ("tokenizer", teacher.tokenizer)
    try:
        load_tokenizer(name, offline=not with_model)
    except UserError as error:
        if with_model or not _is_absent(name):
            raise UserError(str(error).replace("model.name", f"teacher.{key}")) from error
        return [f"note: the teacher {name} is not on this machine: what it reads is not shown"]
    reading = resolved.reading(tokenizer, architecture, offline=not with_model)
    return resolved.teacher_lines(reading, tokenizer) if reading is not None else []


def _gold(resolved: Resolved) -> Iterator[str]:
    """The grader must accept the reference answers themselves."""
    task, config = resolved.task, resolved.config
    answered = (example for example in chain(task.test, task.train) if example.answer is not None)
    examples: list[Example] = list(islice(answered, GRADED))
    custom = config.reward if config.algorithm.needs_reward else config.eval.reward
    if isinstance(custom, LikelihoodReward):
        custom = config.eval.reward  # the reference answer's own likelihood is no verdict on it
    if not examples or (task.grader is None and custom is None):
        yield "reference answers: none, or nothing to grade them with"
        return
    if isinstance(custom, RewardModel | JudgeReward):
        yield "reference answers: not graded, the reward is a model's"
        return
    if custom is not None and custom not in GRADERS:
        yield f"reward: {custom} is your own; what it says of reference answers is shown, not judged"
    # The extractor looks for the answer's place in a completion; a bare gold answer has no such place.
    spec = custom if custom is not None or task.grader is None else Grader(task.grader.name)
    form = "<answer>{}</answer>" if "answer_tags" in (spec, getattr(spec, "name", None)) else "{}"
    reward = build_reward(spec, workers=1)  # pyright: ignore[reportArgumentType]  (a second one takes longer to start)
    try:
        graded = reward(examples, [form.format(example.answer) for example in examples])
    finally:
        reward.close()
    told = [(example, g.value) for example, g in zip(examples, graded, strict=True) if g.value is not None]
    if not told:
        reason = next((g.error for g in graded if g.error), "the grader gives none of them a score")
        yield f"warning: no reference answer could be graded; the first reason: {reason}"
        return
    wrong = [(example, value) for example, value in told if value < 1]
    yield f"reference answers: {len(told) - len(wrong)} of {len(told)} graded rows get reward 1 ({len(examples)} tried)"
    for example, value in wrong[:3]:
        yield f"{'note' if custom else 'warning'}: the gold answer {example.answer!r} of {example.id} gets reward {value:g}"
    if len(wrong) == len(told) and custom is None:
        raise UserError(f"task {task.name}: its grader accepts none of {len(told)} reference answers")


def _tiny_step(resolved: Resolved) -> str:
    """One step on two prompts, in a folder that is thrown away."""
    config = resolved.config
    k = min(max(config.algorithm.min_group, 6), config.rollout.completions)
    tokens = min(TINY_TOKENS, config.rollout.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        small = replace(
            config,
            out=str(Path(folder) / "run"),
            steps=1,
            epochs=None,
            rollout=replace(config.rollout, prompts=2, completions=k, max_tokens=tokens),
            optimizer=replace(config.optimizer, prompts=None, passes=1),
            checkpoint=Checkpoint(),
            log=Log(samples=0),
            teacher=config.teacher and replace(config.teacher, cache=None),
        )
        sampling = replace(resolved.sampling, max_tokens=tokens)
        run = build(replace(resolved, config=small, sampling=sampling), Screen(silent=True))
        run.evaluators = []
        try:
            row = run_and_close(run, None).metrics
        except RunError as error:
            if "without one update" not in str(error):
                raise
            row = {}
    if "loss" not in row:
        return "warning: the tiny step left no row to learn from; two prompts and a few tokens may be too few"
    if not math.isfinite(row["loss"]) or row["updates/skipped"]:
        raise UserError(f"the tiny step's loss is {row['loss']:g} and its gradient norm {row['grad_norm']:g}")
    return f"one tiny step ran: loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g}"
