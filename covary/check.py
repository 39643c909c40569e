"""`covary check`: everything that can be known about a recipe without training it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from covary.api import build, check_lengths, run_and_close
from covary.config import RunConfig, updates_per_rollout, warnings_for
from covary.log import Screen
from covary.models.loading import load_config, load_tokenizer
from covary.prompts import load_template, prompt_group
from covary.rewards import Grader, build_reward
from covary.settings import Checkpoint, Eval, Log
from covary.tasks.task import Task
from covary.train import planned_steps
from covary.types import Example, UserError

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
    task: Task = config.task.load()
    for line in task.notes:
        screen.say(f"note: {line}")
    for line in _schedule(config, task):
        screen.say(line)
    template = load_template(getattr(config.task, "template", None) or config.algorithm.template)
    tokenizer = _tokenizer(config, screen) if not with_model else load_tokenizer(
        config.model.name, config.model.trust_remote_code
    )  # fmt: skip
    if tokenizer is not None:
        architecture = load_config(config.model.name, config.model.trust_remote_code)
        check_lengths([*task.train, *task.test], template, tokenizer, architecture, config.rollout.max_tokens)
    for example in task.train[:RENDERED]:
        if tokenizer is None:
            screen.say(f"prompt {example.id}: {example.prompt!r}")
            continue
        for name, ids in prompt_group(example, template, tokenizer).contexts.items():
            screen.say(f"{name} of {example.id}, {len(ids)} tokens: {tokenizer.decode(ids)!r}")
    for line in _gold(config, task):
        screen.say(line)
    if with_model:
        screen.say(_tiny_step(config, screen))


def _schedule(config: RunConfig, task: Task) -> Iterator[str]:
    rollout, steps = config.rollout, planned_steps(config.steps, config.epochs, len(task.train), config.rollout.prompts)
    updates = updates_per_rollout(config)
    yield (
        f"{steps} steps of {rollout.prompts} prompts x {rollout.completions} completions, "
        f"{updates} updates a step, {steps * updates} in all; {len(task.train)} training and {len(task.test)} test rows"
    )
    most = steps * rollout.prompts * rollout.completions * rollout.max_tokens
    epochs = steps * rollout.prompts / max(1, len(task.train))
    yield f"at most {most:,} completion tokens; {epochs:.2f} epochs of the training rows"


def _tokenizer(config: RunConfig, screen: Screen) -> Any | None:
    """The tokenizer where it can be had: a recipe may name a model that this machine does not hold."""
    try:
        return load_tokenizer(config.model.name, config.model.trust_remote_code, offline=True)
    except UserError:
        if Path(config.model.name).exists() or "/" not in config.model.name:
            raise
        screen.say(
            f"note: {config.model.name} is not on this machine: prompts are shown as messages, their lengths not checked"
        )
        return None


def _gold(config: RunConfig, task: Task) -> Iterator[str]:
    """The grader must accept the reference answers themselves."""
    examples: list[Example] = [e for e in [*task.test, *task.train] if e.answer is not None][:GRADED]
    if not examples:
        yield "no row has a reference answer: nothing to grade"
        return
    if task.grader is None or (config.reward is not None and config.algorithm.needs_reward):
        yield "reward: a custom one is used; what it says of reference answers is shown, not judged"
    spec = config.reward or task.grader
    if spec is None:
        return
    # The extractor looks for the answer's place in a completion; a bare gold answer has no such place.
    reward = build_reward(Grader(spec.name) if isinstance(spec, Grader) else spec)
    try:
        graded = reward(examples, [str(e.answer) for e in examples])
    finally:
        reward.close()
    told = [(e, g.value) for e, g in zip(examples, graded, strict=True) if g.value is not None]
    wrong = [(e, value) for e, value in told if value < 1]
    yield f"reference answers: {len(told) - len(wrong)} of {len(told)} graded rows get reward 1 ({len(examples)} tried)"
    for example, value in wrong[:3]:
        yield f"warning: the gold answer {example.answer!r} of {example.id} gets reward {value:g}"
    if told and len(wrong) == len(told) and isinstance(spec, Grader):
        raise UserError(f"task {task.name}: its grader {spec.name} accepts none of {len(told)} reference answers")


def _tiny_step(config: RunConfig, screen: Screen) -> str:
    """One step on two prompts, in a folder that is thrown away."""
    k = max(config.algorithm.min_group, 2)
    with tempfile.TemporaryDirectory() as folder:
        small = replace(
            config,
            out=str(Path(folder) / "run"),
            steps=1,
            epochs=None,
            rollout=replace(
                config.rollout, prompts=2, completions=min(k, config.rollout.completions),
                max_tokens=min(TINY_TOKENS, config.rollout.max_tokens),
            ),
            optimizer=replace(config.optimizer, prompts=None, passes=1),
            eval=Eval(), checkpoint=Checkpoint(), log=Log(samples=0),
        )  # fmt: skip
        run = build(small, None, Screen(quiet=True, silent=True))
        run.evaluator = None
        row = run_and_close(run, None).metrics
    return f"one tiny step ran: loss {row.get('loss', float('nan')):.4g}, kl/sampling {row.get('kl/sampling', 0):.2g}"
