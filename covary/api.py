"""What `covary train` and `covary.train` share: a checked recipe becomes objects, and the loop runs on them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from covary import checkpoint as checkpoints
from covary.batch import Algorithm, RolloutEngine
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
from covary.doctor import Doctor, Facts, open_turn
from covary.engines.local import LocalEngine
from covary.engines.reader import LocalLogProbs, Reader
from covary.engines.remote import need_log_probs, server_log_probs
from covary.evaluate import Evaluator
from covary.http import read_key
from covary.jsonlines import read_jsonl
from covary.lock import LOCK_FILE, run_lock
from covary.log import Screen, disk
from covary.models.loading import (
    SHIPPED,
    context_length,
    fingerprint,
    generation_defaults,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    model_path,
    pick_device,
)
from covary.models.lora import add_lora, initial_policy, merged_weights, need_peft
from covary.models.rewards import WithModel, build_model_reward
from covary.models.teacher import LocalTeacher, check_prompts, describe, load_teacher, read_teacher
from covary.models.teacher_rollout import teacher_rollout
from covary.prompts import (
    Room,
    Template,
    TurnEnd,
    load_template,
    open_turn_end,
    prompt_group,
    shipped_templates,
)
from covary.quantities import QUANTITIES
from covary.rewards import EXTRACTORS, GRADERS, Grader, Reward, build_reward
from covary.rewards.reward import PooledReward
from covary.rollout.dataset import DatasetRollout
from covary.rollout.given import GivenRollout
from covary.rollout.mixture import MixtureRollout
from covary.rollout.replay import ReplayRollout
from covary.rollout.sources import SourcesRollout
from covary.rollout.transformers import TransformersRollout, end_ids
from covary.rollout.vllm import PROBE_TOKENS, Vllm, VllmRollout
from covary.rollout.vllm_local import LocalVllm, need_vllm
from covary.rollout.vllm_server import VllmServer
from covary.scoring.reading import Reading
from covary.seeding import derive_seed
from covary.settings import Eval, JudgeReward, LikelihoodReward, RewardModel, Teacher, TeacherServer
from covary.stop import Stop
from covary.tasks import BENCHMARKS, Benchmark
from covary.tasks.task import Task
from covary.trackers import Tracker
from covary.train import LIKELIHOOD, Run, Schedule, planned_steps
from covary.train import train as run_loop
from covary.types import Example, RunError, Sampling, UserError

CHECKED_PROMPTS = 1000
"""Training prompts, at most, whose lengths are checked before a run, evenly spread; the others when they are drawn."""
PYTHON_REWARD = " (a Python function)"
RewardSpec = str | RewardModel | JudgeReward | LikelihoodReward | Callable[..., object]


@dataclass(frozen=True)
class Trained:
    """What a run gives back: its folder, its last row of metrics, and the model as it is in memory."""

    folder: Path
    metrics: dict[str, float]
    model: nn.Module
    tokenizer: Any


def train(
    recipe: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    quiet: bool = False,
    reward: str | Mapping[str, Any] | Callable[..., object] | None = None,
    **sections: Any,
) -> Trained:
    """Train as `covary train` does.

    Args:
        recipe: a recipe file to start from.
        resume: a run folder to continue. `sections` may then hold `steps`, `eval`, `checkpoint` and `log` only.
        quiet: plain lines, no progress bars.
        reward: as the recipe's `reward` (a name, or a mapping for a reward model or a judge), or a function in either
            convention of `covary.rewards`.
        **sections: a recipe's top-level keys: mappings or plain values; `algorithm` and `task` may be objects
            (`algorithm=covary.GVPO(beta=0.1)`), `model` and `algorithm` a name.

    Raises:
        UserError: a mistake in what was asked for.
        RunError: the run could not go on.
    """
    function = reward if callable(reward) else None
    if reward is not None:
        name = getattr(reward, "__name__", type(reward).__name__)
        sections["reward"] = name + PYTHON_REWARD if function else reward
    sections = plain(sections)
    if isinstance(sections.get("task"), Task):
        raise UserError(
            "task: covary.train takes a task that it can load again on a resume: a mapping, or a dataclass with load(); "
            "put the loaded rows behind such a load()"
        )
    for key in ("model", "task", "algorithm"):
        if isinstance(sections.get(key), str):
            sections[key] = {"name": sections[key]}
    screen = Screen(quiet)
    if resume is not None:
        return resume_run(Path(resume), sections=sections, function=function, screen=screen)
    data = merge(load_recipe(recipe) if recipe is not None else {}, sections)
    config = validate(data, where=str(recipe) if recipe is not None else "covary.train")
    return start_run(config, function, screen)


def start_run(config: RunConfig, function: Callable[..., object] | None, screen: Screen) -> Trained:
    """A new run in a new folder.

    Raises:
        UserError: the folder exists or cannot be made.
    """
    folder = Path(config.out or f"runs/{to_dict(config)['algorithm']['name'].rpartition(':')[2]}")
    _refuse_existing(folder)
    config = from_anywhere(replace(config, out=str(folder)))
    recipe = to_yaml(config)
    check_writable("out", folder)
    if config.teacher is not None and config.teacher.cache is not None:
        check_writable("teacher.cache", Path(config.teacher.cache))
    if config.rollout.server is not None and config.rollout.server.weights is not None:
        check_writable("rollout.server.weights", Path(config.rollout.server.weights, "weights"))
    run = build(resolve(config, function), screen)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: {folder} cannot be made ({error})") from error
    with run_lock(folder, screen.say):
        _refuse_existing(folder)  # once more: another process may have been quicker
        replace_file(folder / "config.yaml", recipe)
        return run_and_close(run, None)


def _refuse_existing(folder: Path) -> None:
    """A folder that a kill left before its recipe was written is as good as none."""
    if not folder.exists():
        return
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK_FILE, "config.yaml" + checkpoints.PARTIAL}:
        return
    raise UserError(f"out: {folder} exists; continue it with --resume {folder}, or name another folder (out=...)")


def from_anywhere(config: RunConfig) -> RunConfig:
    """Files of the task, rewards and model by absolute path, so that a resume works from another folder."""

    def absolute(text: Any) -> Any:
        # A grader, template or shipped model keeps its meaning beside a file of its name.
        if not isinstance(text, str) or text in {*GRADERS, *SHIPPED, *shipped_templates()}:
            return text
        file, colon, name = text.rpartition(":") if ".py:" in text else (text, "", "")
        return f"{Path(file).absolute()}{colon}{name}" if Path(file).exists() else text

    def reward(spec: Any) -> Any:
        if isinstance(spec, RewardModel):
            return replace(spec, model=absolute(spec.model))
        if not isinstance(spec, JudgeReward):
            return absolute(spec)
        judge = spec.judge
        model = absolute(judge.model) if judge.server is None else judge.model
        cache = str(Path(judge.cache).expanduser().absolute()) if judge.cache is not None else None
        return JudgeReward(replace(judge, model=model, prompt_file=absolute(judge.prompt_file), cache=cache))

    teacher = config.teacher
    if isinstance(teacher, Teacher):
        teacher = replace(teacher, model=absolute(teacher.model))
    elif teacher is not None:  # the server knows its model by the name as it was given
        name = teacher.served_model or teacher.tokenizer
        teacher = replace(teacher, tokenizer=absolute(teacher.tokenizer), served_model=name)
    if teacher is not None and teacher.cache is not None:
        teacher = replace(teacher, cache=str(Path(teacher.cache).expanduser().absolute()))
    given = config.rollout.file and replace(config.rollout.file, path=absolute(config.rollout.file.path))
    server = config.rollout.server
    if server is not None and server.weights is not None:
        server = replace(server, weights=str(Path(server.weights).expanduser().absolute()))
    task = config.task
    files = [name for name in ("path", "test_path", "template") if isinstance(getattr(task, name, None), str)]
    return replace(
        config,
        task=replace(task, **{name: absolute(getattr(task, name)) for name in files}) if files else task,
        reward=reward(config.reward),
        eval=replace(config.eval, reward=reward(config.eval.reward), data_dir=absolute(config.eval.data_dir)),
        model=replace(config.model, name=absolute(config.model.name)),
        teacher=teacher,
        rollout=replace(config.rollout, file=given, server=server),
    )


def check_writable(what: str, path: Path) -> None:
    """Refuse a path that cannot be made, before hours of work want to be written there.

    Raises:
        UserError: naming the folder in the way.
    """
    try:
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(f"{what}: {path} cannot be made: {parent} is not a folder that can be written to")
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: {path} cannot be made ({error})") from error


def resume_run(
    folder: Path,
    *,
    sections: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    function: Callable[..., object] | None = None,
    screen: Screen,
) -> Trained:
    """Continue a run from its newest complete checkpoint.

    Args:
        folder: the run folder.
        sections: changes as a recipe's top-level keys.
        overrides: changes as key.key=value.
        function: the reward, where it was a Python function.
        screen: where to report.

    Raises:
        UserError: no run, no usable checkpoint where there are damaged ones, a change of something that a resume may not
            change, or another process on this folder.
    """
    if not (folder / "config.yaml").is_file():
        raise UserError(f"--resume: {folder} is no run folder (it has no config.yaml)")
    with run_lock(folder, screen.say):
        return _continue(folder, sections or {}, overrides, function, screen)


def _continue(
    folder: Path,
    sections: Mapping[str, Any],
    overrides: Sequence[str],
    function: Callable[..., object] | None,
    screen: Screen,
) -> Trained:
    path = folder / "config.yaml"
    checkpoints.drop_partial(folder)
    last, complaints = checkpoints.newest_sound(folder)
    if complaints and last is None:
        raise UserError(
            f"--resume: {complaints[-1]}, and {folder} has no other checkpoint; remove it to start from step 0"
        )
    for complaint in complaints:
        screen.say(f"note: {complaint}, and left aside")
    written = load_recipe(path)
    data = apply_overrides(merge(written, sections), list(overrides))
    config = validate(data, where=str(path))
    before = validate(last.state()["recipe"] if last else written, where=str(last.folder if last else path))
    # The folder may have been moved; only a change that was asked for is one.
    before = replace(before, out=written.get("out"))
    refused = [key for key in changed_keys(before, config) if key.split(".")[0] not in RESUMABLE]
    if refused:
        raise UserError(
            f"--resume: the recipe of {folder} changed: {', '.join(refused)}; "
            f"a resume may change {', '.join(sorted(RESUMABLE))} only"
        )
    if last is not None and config.steps is not None and config.steps < last.step:
        raise UserError(f"steps: {folder} has already done {last.step} steps, asked for {config.steps}")
    if last is not None and config.steps == last.step:
        screen.say(f"note: {folder} has done its {last.step} steps; to go on, add steps=N with a larger number")
    if config.steps != before.steps and (config.optimizer.schedule != "constant" or 0 < config.optimizer.warmup < 1):
        screen.say("note: the learning rate follows the new number of steps from here on, so it may jump")
    config = replace(config, out=str(folder))
    resolved = resolve(config, function)
    stored = last.state()["fingerprints"] if last is not None else {}
    _refuse_changed(folder, stored, resolved.fingerprints)  # what can be told without the model first
    run = build(resolved, screen)
    _refuse_changed(folder, stored, run.fingerprints)
    with _way_on(folder):
        replace_file(path, to_yaml(config))
    return run_and_close(run, last)


def _refuse_changed(folder: Path, stored: Mapping[str, str], found: Mapping[str, str]) -> None:
    changed = [what for what, digest in found.items() if what in stored and stored[what] != digest]
    if changed:
        raise UserError(
            f"--resume: {' and '.join(changed)} changed since the last checkpoint of {folder}; a resume needs what the "
            "run had"
        )


@contextmanager
def _way_on(folder: Path) -> Iterator[None]:
    """A failure of the run also names the newest checkpoint."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{error}; {checkpoints.way_on(folder)}") from error


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        RunError: the disk refused.
    """
    temporary = path.with_name(path.name + checkpoints.PARTIAL)
    with disk(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Resolved:
    """A recipe's parts that need no model. What is wrong with them is said when they are made."""

    config: RunConfig
    task: Task
    template: Template
    reward: Reward | None
    eval_reward: Reward | None
    sampling: Sampling
    eval_sampling: Sampling
    given: dict[str, list[str]]
    benchmarks: list[Task]
    fingerprints: dict[str, str]
    """Of what a resume must find again, by what a person calls it."""

    @property
    def models(self) -> set[str]:
        """The frozen models that scores read: `old` or `initial`."""
        algorithm = self.config.algorithm
        names = {name for score in (*algorithm.frozen, *algorithm.trained) for name in score.models}
        return {reference_model(self.config) if name == "reference" else name for name in names} - {"policy"}

    def room(self, architecture: Any) -> Room:
        """What the model can read of a training prompt."""
        room, template = _room(architecture, self.sampling.max_tokens), self.template
        if template.answer is None:
            return room
        # A token has a byte at least; encoding the stop apart makes a trace longer by its bytes at most.
        return replace(room, glue=len(f"{template.stop}{template.glue}".encode()))

    def open_turn_end(self, tokenizer: Any, end_ids: frozenset[int]) -> TurnEnd | None:
        """The end of an answer's turn in the chat template, where training samples completions that go on behind it."""
        chats = self.config.rollout.engine != "dataset" and "chat" in self.template.contexts.values()
        if not chats or isinstance(self.task.train[0].prompt, str):
            return None
        return open_turn_end(tokenizer, end_ids, self.sampling.stop)

    def end_warning(self, tokenizer: Any, end_ids: frozenset[int]) -> str | None:
        """That the template's own end token ends no completion. Of a template that ends turns with text nothing is known."""
        turn_end = self.open_turn_end(tokenizer, end_ids)
        if turn_end is None or turn_end.token is None:
            return None
        return open_turn(turn_end.text, _written(tokenizer, end_ids))

    def reading(self, tokenizer: Any, architecture: Any, *, offline: bool = False) -> Reading | None:
        """How the teacher reads the student, without any weights; None where the recipe has no teacher.

        Raises:
            UserError: its tokenizer cannot be loaded, or the method needs a teacher with the student's tokens.
        """
        config = self.config
        if config.teacher is None:
            return None
        generation = load_generation_config(config.model.name, offline=offline)
        ends = end_ids(tokenizer, generation, architecture.get_text_config(decoder=True))
        reading = read_teacher(config.teacher, tokenizer, ends, self.template, offline=offline)
        _check_tokens(config, reading)
        return reading

    def teacher_lines(self, reading: Reading, tokenizer: Any) -> list[str]:
        """What a person should see of a teacher before a run.

        Raises:
            UserError: it can read no prompt.
        """
        some = self.task.train[:: math.ceil(len(self.task.train) / CHECKED_PROMPTS)]
        samples = "teacher" in self.config.algorithm.sources
        note = check_prompts(reading, some, self.sampling.max_tokens, samples=samples)
        tilt = self.config.algorithm.teacher_note(reading.same_tokens)
        notes = [f"note: {line}" for line in (note, tilt) if line is not None]
        return [*describe(reading, prompt_group(self.task.train[0], self.template, tokenizer)), *notes]

    def check_lengths(self, tokenizer: Any, architecture: Any) -> list[str]:
        """Refuse prompts that leave no room for a completion in the model's context.

        Every test prompt has to, and of some training prompts at least one: those that do not are skipped when they
        are drawn. Returns notes about them.

        Raises:
            UserError: naming the example and the lengths.
        """
        for task in (self.task, *self.benchmarks):
            check_lengths(task.test, self.template, tokenizer, architecture, self.eval_sampling.max_tokens)
        some = self.task.train[:: math.ceil(len(self.task.train) / CHECKED_PROMPTS)]
        room = self.room(architecture)
        complaints = [
            c
            for e in some
            if (c := self.template.complaint(e) or room.complaint(prompt_group(e, self.template, tokenizer)))
        ]
        if len(complaints) == len(some):
            raise UserError(complaints[0])
        if complaints:
            return [
                f"{len(complaints)} of {len(some)} training prompts that were looked at leave no room for a completion "
                f"or hold a tag and are skipped when drawn; {complaints[0]}"
            ]
        return []


@dataclass(frozen=True)
class Survey:
    """What one pass over the training rows tells."""

    fingerprint: str
    rewarded: bool
    without_completions: str | None
    unanswered: int
    without_answer: str | None

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Survey:
        """One pass over the rows; the first of a kind by its id."""
        digest = hashlib.blake2b(digest_size=16)
        rewarded, without, unanswered, empty = False, None, 0, None
        for example in examples:
            digest.update(_CANONICAL.encode(vars(example)).encode())
            rewarded = rewarded or example.rewards is not None
            if without is None and not example.completions:
                without = example.id
            unanswered += example.answer is None
            if empty is None and not (example.answer or "").strip():
                empty = example.id
        return cls(digest.hexdigest(), rewarded, without, unanswered, empty)


def resolve(config: RunConfig, function: Callable[..., object] | None = None) -> Resolved:
    """Load the task, template and rewards that the recipe names, and check that they fit the algorithm.

    Raises:
        UserError: the first thing that does not.
    """
    if config.model.lora is not None:
        need_peft("model.lora")
    rollout, eval_ = config.rollout, config.eval
    if rollout.engine == "vllm" and rollout.server is None:
        need_vllm("rollout.engine")
    task: Task = load_task(config.task)
    if not task.train:
        raise UserError(f"task: {task.name} has no training rows")
    algorithm = config.algorithm
    template = load_template(getattr(config.task, "template", None) or algorithm.template)
    _check_needs(config, template)
    survey = Survey.of(task.train)
    if template.reads_answer and survey.without_answer is not None:
        raise UserError(
            f"task: example {survey.without_answer!r} has no answer or an empty one, and the template {template.name} "
            "shows or appends it; leave such rows out (task.filter, or the file)"
        )
    given = read_given(rollout.file.path, task.train) if rollout.file else {}
    fingerprints = {"the task's training rows": survey.fingerprint, "the prompt template": _digest(vars(template))}
    if given:
        fingerprints["rollout.file"] = _digest(given)
    reward, eval_reward = _rewards(config, task, survey, function)
    if survey.unanswered and isinstance(reward, PooledReward) and isinstance(reward.task, Grader):
        note = (
            f"{survey.unanswered} of {len(task.train)} training rows have no answer to grade by: their completions teach "
            "nothing"
        )
        task = replace(task, notes=[*task.notes, note])
    benchmarks = _benchmarks(eval_, task)
    task = replace(task, notes=[*task.notes, *_seen_in_training(task.train, benchmarks)])
    if rollout.stop and template.answer is not None:
        raise UserError(
            f"rollout.stop: the template {template.name} ends a completion at {template.stop!r}, behind which the answer "
            "is scored; leave it out"
        )
    stop = (*rollout.stop, *([template.stop] if template.stop else []))
    return Resolved(
        config,
        task,
        template,
        reward,
        eval_reward,
        Sampling(rollout.max_tokens, rollout.temperature, stop),
        # A trace's stop string is no end of an answer.
        Sampling(eval_.max_tokens or rollout.max_tokens, eval_.temperature, rollout.stop),
        given,
        benchmarks,
        fingerprints,
    )


def _benchmarks(eval_: Eval, task: Task) -> list[Task]:
    """What `eval.tasks` names, loaded.

    Raises:
        UserError: no benchmark, one named twice or like the run's task, or an option of benchmarks without any.
    """
    for option in ("data_dir", "limit"):
        if getattr(eval_, option) is not None and not eval_.tasks:
            raise UserError(f"eval.{option}: would be ignored, eval.tasks names no benchmark")
    names = [task.name]
    for name in eval_.tasks:
        if name not in BENCHMARKS:
            near = get_close_matches(name, BENCHMARKS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"eval.tasks: {name!r} is no benchmark ({', '.join(BENCHMARKS)}){hint}")
        if name in names:
            raise UserError(f"eval.tasks: two tasks would report eval/{name}")
        names.append(name)
    tasks: list[Task] = []
    for name in eval_.tasks:
        try:
            tasks.append(load_task(Benchmark(name, data_dir=eval_.data_dir, test=eval_.limit)))
        except UserError as error:
            raise UserError(f"eval.tasks, {name}: {error}") from error
    return tasks


def _seen_in_training(train: Sequence[Example], benchmarks: Sequence[Task]) -> Iterator[str]:
    if not benchmarks:
        return
    asked = {" ".join(text.split()) for example in train for text in _question_texts(example)}
    for task in benchmarks:
        seen = sum(any(" ".join(text.split()) in asked for text in _question_texts(example)) for example in task.test)
        if seen:
            yield f"{seen} of {len(task.test)} questions of {task.name} are training rows: its accuracy will flatter"


# Equal text for equal values of JSON's kinds; of another object its kind alone, whose text may hold an address.
_CANONICAL = json.JSONEncoder(skipkeys=True, default=lambda other: type(other).__name__)


def _digest(value: Any) -> str:
    return hashlib.blake2b(_CANONICAL.encode(value).encode(), digest_size=16).hexdigest()


def read_given(path: str, examples: Sequence[Example]) -> dict[str, list[str]]:
    """Completions of a JSONL file by example id; a row names its example by `id` or by the question's text (`prompt`).

    Rows of other questions are left out: of a whole data set's file, some questions are held out or cut off.

    Raises:
        UserError: no row names a training example, or one holds no text, with file and line.
    """
    ids = {example.id for example in examples}
    texts = {text: example.id for example in examples for text in _question_texts(example)}
    given: dict[str, list[str]] = {}
    others: list[int] = []
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        named = str(row.get("id"))
        id = named if named in ids else texts.get(_last_text(row.get("prompt")))
        if id is None:
            others.append(number)
            continue
        completions = row.get("completion")
        completions = [completions] if isinstance(completions, str) else completions
        if not isinstance(completions, list) or not completions or not all(isinstance(c, str) for c in completions):
            raise UserError(f"{where}: needs a column completion, a text or a list of texts")
        given.setdefault(id, []).extend(completions)
    if others and not given:
        raise UserError(
            f"{path}, line {others[0]}: neither its id nor its prompt is a training example's, and so in every line"
        )
    if not given:
        raise UserError(f"{path}: holds no completion")
    return given


def _question_texts(example: Example) -> set[str]:
    """The question as the data have it, and as the prompt asks it."""
    texts = (_last_text(prompt) for prompt in (example.given_prompt, example.prompt))
    return {text for text in texts if text is not None}


def _last_text(prompt: Any) -> str | None:
    """A text, or that of a conversation's last message; None of anything else."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else None


def _rollout(
    resolved: Resolved,
    sampler: TransformersRollout | VllmRollout,
    reading: Reading | None,
    teacher: LocalTeacher | None,
    screen: Screen,
) -> RolloutEngine:
    """What answers the algorithm's plans, from every source that they name."""
    config, tokenizer, sources = resolved.config, sampler.tokenizer, resolved.config.algorithm.sources
    if config.rollout.engine == "dataset":
        return DatasetRollout(tokenizer)
    if config.rollout.replay is not None:
        return ReplayRollout(sampler, config.rollout.replay.history, config.rollout.replay.size)
    if config.rollout.file is not None:
        return GivenRollout(sampler, resolved.given, config.rollout.file.count, tokenizer)
    if sources == ("policy",):
        return sampler
    engines: dict[str, RolloutEngine] = {"policy": sampler}
    if "dataset" in sources:
        engines["dataset"] = DatasetRollout(tokenizer)
    if "mixed" in sources:
        assert teacher is not None  # _check_needs
        mixture = MixtureRollout(
            sampler.model,
            tokenizer,
            teacher.model,  # pyright: ignore[reportArgumentType]
            teacher_context="teacher",
            autocast=sampler.autocast,
        )
        mixture.on_progress = screen.completions
        engines["mixed"] = mixture
    if "teacher" in sources:
        assert config.teacher is not None  # config.py
        assert reading is not None
        engines["teacher"] = teacher_rollout(
            config.teacher,
            reading,
            teacher,
            student_ends=sampler.end_ids,
            student_vocabulary=sampler.model.get_input_embeddings().weight.shape[0],  # pyright: ignore[reportArgumentType]
            folder=Path(config.out or "."),
            seed=derive_seed(config.seed, "teacher"),
            say=screen.say,
            on_progress=screen.completions,
        )
    return SourcesRollout(engines)


def _vllm(config: RunConfig, architecture: Any, tokenizer: Any, device: str) -> Vllm:
    """Who samples for `rollout.engine: vllm`.

    Raises:
        UserError: the environment variable that should hold the server's key is not set.
        RunError: vLLM does not start.
    """
    server = config.rollout.server
    if server is None:
        return LocalVllm(
            architecture,
            tokenizer,
            dtype="bfloat16" if config.engine.autocast == "bfloat16" else config.model.dtype,
            memory_share=config.rollout.memory_share,
            eager=device == "cpu",  # compiling for the CPU takes minutes
            trust_remote_code=config.model.trust_remote_code,
        )
    key = read_key(server.api_key, "rollout.server.api_key") if server.api_key is not None else None
    folder = Path(server.weights or config.out or ".")
    return VllmServer(server.url, folder, key, server.concurrency, server.timeout, server.attempts)


def _probe(resolved: Resolved, tokenizer: Any) -> list[int]:
    """The beginning of the training prompts, one behind the other."""
    ids: list[int] = []
    for example in resolved.task.train:
        if len(ids) >= PROBE_TOKENS:
            break
        if resolved.template.complaint(example) is None:
            ids += prompt_group(example, resolved.template, tokenizer).contexts["prompt"]
    return ids[:PROBE_TOKENS]


def build(resolved: Resolved, screen: Screen) -> Run:
    """Load the model and put the run together. What can fail for a user's mistake fails here at the latest."""
    config, task, algorithm = resolved.config, resolved.task, resolved.config.algorithm
    kind = to_dict(config)["algorithm"]["name"].rpartition(":")[2]
    screen.say(
        f"{kind} on {task.name}: {len(task.train)} training and {len(task.test)} test rows, model {config.model.name}, "
        f"run folder {config.out}"
    )
    for line in [*warnings_for(config), *task.notes]:
        screen.say(f"note: {line}")
    if resolved.given:
        screen.say(f"note: rollout.file has completions for {len(resolved.given)} of {len(task.train)} training rows")
    device = pick_device(config.engine.device)
    for reward in (resolved.reward, resolved.eval_reward):
        if isinstance(reward, WithModel):
            reward.load()  # before the run's own seed: what loading draws at random changes no number of the run
    tokenizer = load_tokenizer(config.model.name, config.model.trust_remote_code)
    architecture = load_config(config.model.name, config.model.trust_remote_code)
    for line in resolved.check_lengths(tokenizer, architecture):
        screen.say(f"note: {line}")

    reading = resolved.reading(tokenizer, architecture)
    teacher = None
    if reading is not None:
        for line in resolved.teacher_lines(reading, tokenizer):
            screen.say(line)
        if isinstance(config.teacher, Teacher):  # before the run's own seed, as the rewards' models
            vocabulary = architecture.get_text_config().vocab_size
            teacher = load_teacher(config.teacher, reading, device=device, student_vocabulary=vocabulary)

    vllm = _vllm(config, architecture, tokenizer, device) if config.rollout.engine == "vllm" else None

    _seed_everything(config.seed)
    model = load_model(config.model.name, device=device, trust_remote_code=config.model.trust_remote_code)
    if defaults := generation_defaults(model):
        listed = ", ".join(f"{key} {value}" for key, value in defaults.items())
        screen.say(f"note: the model's generation defaults ({listed}) are ignored: samples come from the policy itself")
    fingerprints = dict(resolved.fingerprints)
    if config.model.lora is not None or "initial" in resolved.models:  # else a checkpoint replaces all of it
        fingerprints["the model of model.name"] = fingerprint(model)
    if teacher is not None:
        fingerprints["the teacher"] = fingerprint(teacher.model)
    if config.model.lora is not None:
        add_lora(model, config.model.lora, model_path(config.model.name))
    autocast = torch.bfloat16 if config.engine.autocast == "bfloat16" else None
    frozen = {"initial": initial_policy(model)} if "initial" in resolved.models else {}
    template, room = resolved.template, resolved.room(architecture)
    if teacher is not None and teacher.same_tokens:  # a module beside the policy, with a prompt of its own
        frozen["teacher"] = teacher.model
        template = replace(template, others={"teacher": teacher.reading.prompt})
        limits = Room(teacher.reading.context, teacher.reading.vocabulary, room.max_tokens)
        room = replace(room, others={"teacher": limits})
    engine = LocalEngine(
        model,
        frozen=frozen,
        reader=_reader(config, reading, teacher, task.train[0]),
        reference=reference_model(config),
        micro_batch_tokens=config.engine.micro_batch_tokens,
        autocast=autocast,
        logprob_temperature=config.engine.logprob_temperature,
        gradient_checkpointing=config.engine.gradient_checkpointing,
        betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
    )
    if engine.not_packed:
        screen.say(
            f"note: prompts are not shared among their completions in scoring, so it is slower ({engine.not_packed})"
        )
    sampler: TransformersRollout | VllmRollout
    if vllm is None:
        sampler = TransformersRollout(model, tokenizer, autocast=autocast)
        if sampler.not_shared:
            screen.say(
                f"note: completions do not share their prompt's cache, so sampling is slower ({sampler.not_shared})"
            )
    else:
        sampler = VllmRollout(
            vllm,
            model,
            tokenizer,
            partial(merged_weights, model),
            probe=_probe(resolved, tokenizer),
            temperature=config.rollout.temperature,
            autocast=autocast,
        )
    sampler.on_progress = screen.completions
    if warning := resolved.end_warning(tokenizer, sampler.end_ids):
        screen.say(f"note: {warning}")
    evaluators = [
        Evaluator(
            name=asked.name,
            examples=asked.test,
            rollout=sampler,
            reward=grader,
            template=resolved.template,
            tokenizer=tokenizer,
            sampling=resolved.eval_sampling,
            samples=config.eval.samples,
            seed=derive_seed(config.seed, "eval"),
        )
        for asked, grader in _graded(resolved)
    ]
    steps = planned_steps(config.steps, config.epochs, len(task.train), config.rollout.prompts)
    return Run(
        folder=Path(config.out or "."),
        algorithm=algorithm,
        model=model,
        tokenizer=tokenizer,
        template=template,
        room=room,
        examples=task.train,
        reward=resolved.reward,
        rollout=_rollout(resolved, sampler, reading, teacher, screen),
        engine=engine,
        evaluators=evaluators,
        sampling=resolved.sampling,
        schedule=Schedule(config.optimizer.lr, steps, config.optimizer.warmup, config.optimizer.schedule),
        steps=steps,
        prompts=config.rollout.prompts,
        completions=config.rollout.completions,
        updates=updates_per_rollout(config) // config.optimizer.passes,
        passes=config.optimizer.passes,
        reference=reference_model(config),
        same_temperature=config.rollout.temperature == config.engine.logprob_temperature,
        likelihood=config.reward.likelihood if isinstance(config.reward, LikelihoodReward) else None,
        max_regenerations=config.rollout.max_regenerations,
        eval_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        keep_last=config.checkpoint.keep_last,
        shown_samples=config.log.samples,
        seed=config.seed,
        recipe=to_dict(config),
        fingerprints=fingerprints,
        screen=screen,
        doctor=_doctor(resolved, tokenizer, sampler.end_ids),
        tracker=_tracker(config, screen),
    )


def _graded(resolved: Resolved) -> Iterator[tuple[Task, Reward]]:
    """Every task that is evaluated, with its reward. Benchmarks of one grader share its processes."""
    if resolved.eval_reward is not None and resolved.task.test:
        yield resolved.task, resolved.eval_reward
    graders: dict[Grader, Reward] = {}
    for task in resolved.benchmarks:
        assert task.grader is not None  # every benchmark has one
        if task.grader not in graders:
            graders[task.grader] = build_reward(task.grader)
        yield task, graders[task.grader]


def _reader(
    config: RunConfig, reading: Reading | None, teacher: LocalTeacher | None, example: Example
) -> Reader | None:
    """The teacher as something that reads text, where it is no module beside the policy."""
    scores = (*config.algorithm.frozen, *config.algorithm.trained)
    if reading is None or not any("teacher" in score.models for score in scores):
        return None
    if teacher is not None and teacher.same_tokens:
        return None
    if teacher is not None:
        return Reader(reading, LocalLogProbs(teacher.model, config.engine.micro_batch_tokens))
    assert isinstance(config.teacher, TeacherServer)
    server = server_log_probs(config.teacher)
    need_log_probs(server, reading.prompt(example), reading.end)
    return Reader(reading, server)


def _doctor(resolved: Resolved, tokenizer: Any, end_ids: frozenset[int]) -> Doctor | None:
    config, reward = resolved.config, resolved.reward
    if config.doctor == "off":
        return None
    turn_end = resolved.open_turn_end(tokenizer, end_ids)
    built_in = reward.task if isinstance(reward, PooledReward) and isinstance(reward.task, Grader) else None
    extractor = built_in.extract if built_in else "none"
    facts = Facts(
        max_tokens=resolved.sampling.max_tokens,
        end_tokens=_written(tokenizer, end_ids),
        turn_end=turn_end.text if turn_end else None,
        extractor=extractor,
        extract=EXTRACTORS[extractor] if extractor != "none" else None,
        grader=built_in.name if built_in else "",
        needs_reward=config.algorithm.needs_reward,
    )
    return Doctor(facts, stop=config.doctor == "stop")


def _written(tokenizer: Any, ids: frozenset[int]) -> tuple[str, ...]:
    return tuple(tokenizer.decode([id]) for id in sorted(ids))


def _tracker(config: RunConfig, screen: Screen) -> Tracker | None:
    if config.log.tracker == "none":
        return None
    project = config.log.project or "covary"
    return Tracker(config.log.tracker, project, Path(config.out or "."), to_dict(config), screen.say)


def check_lengths(
    examples: Sequence[Example], template: Template, tokenizer: Any, architecture: Any, max_tokens: int
) -> None:
    """Refuse prompts that leave no room for a completion in the model's context.

    Raises:
        UserError: naming the example and the lengths.
    """
    room = _room(architecture, max_tokens)
    for example in examples:
        complaint = room.complaint(prompt_group(example, template, tokenizer))
        if complaint is not None:
            raise UserError(complaint)


def _room(architecture: Any, max_tokens: int) -> Room:
    return Room(context_length(architecture), getattr(architecture.get_text_config(), "vocab_size", None), max_tokens)


def model_of_run(name: str) -> str:
    """The newest checkpoint where `name` is a run folder; else the name itself."""
    folder = Path(name)
    if (folder / "config.yaml").is_file() and (folder / "rollouts").is_dir():
        last = checkpoints.latest(folder)
        if last is None:
            raise UserError(f"{folder} has no complete checkpoint under checkpoints/")
        last.refuse_changed()
        return str(last.folder)
    return name


def plain(value: Any) -> Any:
    """Paths as text, wherever they stand in mappings."""
    if isinstance(value, os.PathLike):
        return str(value)
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def merge(data: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with changes: a mapping changes the keys it names; a reward, and one with a `name`, replaces the section."""
    merged = dict(data)
    for key, value in sections.items():
        old = data.get(key)
        replaced = key == "reward" or (isinstance(value, Mapping) and "name" in value)
        keeps = isinstance(value, Mapping) and isinstance(old, Mapping) and not replaced
        merged[key] = {**old, **value} if keeps else value  # pyright: ignore[reportGeneralTypeIssues]
    return merged


def load_task(family: Any) -> Task:
    """What a task family's `load()` gives.

    Raises:
        UserError: that is no `Task`, or the family's own complaint.
    """
    task = family.load()
    if not isinstance(task, Task):
        raise UserError(f"task: load() of {type(family).__name__} gave {type(task).__name__}, not a covary.tasks.Task")
    return task


def _check_needs(config: RunConfig, template: Template) -> None:
    """Every stream's model and context must exist, and answers must be appended where they are scored."""
    algorithm = config.algorithm
    names = [score.name for score in (*algorithm.frozen, *algorithm.trained)]
    if len(set(names)) < len(names):
        raise UserError(f"algorithm: two scores have one name: {', '.join(names)}")
    own = (*algorithm.frozen, *algorithm.trained)
    for score in (*own, LIKELIHOOD) if isinstance(config.reward, LikelihoodReward) else own:
        quantity = score.quantity if isinstance(score.quantity, str) else score.quantity[0]
        if quantity not in QUANTITIES:
            raise UserError(
                f"algorithm: the score {score.name!r} asks for {quantity!r}; quantities are {', '.join(QUANTITIES)}"
            )
        for stream in score.stream_pair:
            if stream.model != "teacher" and stream.context not in template.contexts:
                raise UserError(
                    f"task.template: {template.name} has no context {stream.context!r}, which the score {score.name!r} "
                    f"reads; it has {', '.join(template.contexts)}"
                )
        if isinstance(config.teacher, TeacherServer) and len(score.stream_pair) > 1 and "teacher" in score.models:
            raise UserError(
                f"teacher.url: the score {score.name!r} compares whole distributions, and a server gives log-probs of "
                "tokens only; use teacher.model"
            )
        if (score.tokens != "sampled" or score.per == "example") and template.answer is None:
            raise UserError(
                f"task.template: {template.name} appends no answer, which the score {score.name!r} reads; think does, "
                "or a template of your own with the key answer"
            )
    if isinstance(config.teacher, TeacherServer) and "mixed" in algorithm.sources:
        raise UserError(
            "teacher.url: the algorithm samples single tokens from teacher and policy together, which a server does not "
            "do; use teacher.model"
        )


def _check_tokens(config: RunConfig, reading: Reading) -> None:
    """With another tokenizer a teacher has one number for each text, and nothing else."""
    if reading.same_tokens:
        return
    if "mixed" in config.algorithm.sources:
        raise UserError(
            "teacher: its tokenizer is not the student's, and the algorithm samples single tokens from both; "
            "algorithm.name: gvpo_opd learns from a teacher with any tokenizer"
        )
    for score in (*config.algorithm.frozen, *config.algorithm.trained):
        if "teacher" in score.models and (score.level == "token" or len(score.stream_pair) > 1):
            raise UserError(
                f"teacher: its tokenizer is not the student's, and the score {score.name!r} compares them token by token; "
                "algorithm.name: gvpo_opd learns from a teacher with any tokenizer"
            )


def _rewards(
    config: RunConfig, task: Task, survey: Survey, function: Callable[..., object] | None
) -> tuple[Reward | None, Reward | None]:
    """The rewards of training and of evaluation, one object where they are the same."""
    algorithm = config.algorithm
    own = type(algorithm).reward is not Algorithm.reward
    offline, mixes = config.rollout.engine == "dataset", "dataset" in algorithm.sources
    given = offline and survey.rewarded
    if (offline or mixes) and survey.without_completions is not None:
        who = "rollout.engine: dataset" if offline else "the algorithm"
        raise UserError(
            f"example {survey.without_completions!r} has no completions, which {who} learns from; "
            "name their column with task.completion"
        )
    if given and not (algorithm.needs_reward or own):
        raise UserError(
            f"task: the rewards of its completions (chosen: 1, rejected: 0) would be ignored, {type(algorithm).__name__} "
            "learns from every completion alike; name the column to learn from with task.completion"
        )
    if not offline:
        for name in ("rewards", "chosen") if mixes else ("rewards", "completion", "chosen"):
            if getattr(config.task, name, None) is not None:
                raise UserError(
                    f"task.{name}: would be ignored, only rollout.engine: dataset learns from given completions"
                )
    if config.reward is not None and (own or given):
        source = "the algorithm makes its own rewards" if own else "the data bring rewards (task.rewards)"
        raise UserError(f"reward: would be ignored, {source}; leave it out")
    grader = build_reward(task.grader) if task.grader is not None else None
    reward = None
    if isinstance(config.reward, LikelihoodReward):
        own = True
    if algorithm.needs_reward and not own and not given:
        spec, device = function or config.reward, config.engine.device
        reward = task_reward(spec, task, "reward", device) if config.reward is not None else grader
        if reward is None:
            raise UserError(f"reward: {type(algorithm).__name__} learns from rewards, and {_way_to_rewards(task)}")
    if config.eval.reward is not None and config.eval.reward != config.reward:
        return reward, task_reward(config.eval.reward, task, "eval.reward", config.engine.device)
    return reward, (reward if config.eval.reward is not None else grader or reward)


def _way_to_rewards(task: Task) -> str:
    """What is missing where a task has no grader, and what mends it."""
    columns = task.train[0].columns
    if task.train[0].completions:
        return (
            f"task {task.name} has none: only rollout.engine: dataset learns from the completions of its rows; set it, or "
            "name a reward"
        )
    others = f" (other columns: {', '.join(columns)})" if columns else ""
    return (
        f"no row of task {task.name} has an answer to grade by; name the column of answers with task.answer{others}, or "
        "name a reward (a grader, path/to/file.py:name, a reward model or a judge)"
    )


def task_reward(spec: RewardSpec | None, task: Task, key: str, device: str) -> Reward | None:
    """A reward as a recipe's `key` names it, or a function; the task's own grader where there is none, None where it has none either."""
    if isinstance(spec, RewardModel | JudgeReward):
        return build_model_reward(spec, key, device)
    if isinstance(spec, str) and spec.endswith(PYTHON_REWARD):
        raise UserError(
            f"reward: this run's reward was {spec}; continue it from Python: covary.train(resume=..., reward=...)"
        )
    if spec is not None:
        return build_reward(spec, default_extract=task.grader.extract if task.grader else "none")
    return build_reward(task.grader) if task.grader else None


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(derive_seed(seed) % 2**32)
    torch.manual_seed(seed)


def run_and_close(run: Run, resume: checkpoints.Checkpoint | None) -> Trained:
    """The loop, and the end of the graders' processes whatever happens.

    Raises:
        RunError: the run could not go on; the newest checkpoint is named.
        KeyboardInterrupt, SystemExit: the run was stopped by a signal, after a checkpoint of its last step.
    """
    stop = Stop()
    rewards = {id(r): r for r in (run.reward, *(e.reward for e in run.evaluators)) if r is not None}
    try:
        with stop.listening(), _way_on(run.folder):
            metrics = run_loop(run, resume, stop)
    except KeyboardInterrupt:
        run.screen.say(f"stopped at once; {checkpoints.way_on(run.folder)}")
        raise
    finally:
        for reward in rewards.values():
            reward.close()
        if run.tracker is not None:
            run.tracker.close()
    if stop.asked:
        run.screen.say(f"stopped; {checkpoints.way_on(run.folder)}")
        stop.leave()
    return Trained(run.folder, metrics, run.model, run.tokenizer)
