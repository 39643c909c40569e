"""The loop, read top to bottom: no branch on an algorithm's name.

prompts -> plan -> generate -> rewards (or early scores and algorithm.reward) -> select
-> the other frozen scores -> prepare -> for each optimizer batch: forward_backward, step
-> metrics, samples -> evaluate, checkpoint
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary import checkpoint as checkpoints
from covary.batch import Algorithm, Batch, Reduce, RolloutEngine, Scores, TrainEngine, one_process
from covary.collate import attach, attach_features, collate, rows_of, take_rows
from covary.evaluate import Evaluator, grade
from covary.log import RunLog, Screen, step_line, summary
from covary.metrics import Clock, is_policy_logp, rollout_metrics, sampling_kl, score_watched, update_metrics
from covary.prompts import Room, Template, prompt_group
from covary.rewards import Reward
from covary.rollout.pieces import append_answers
from covary.seeding import derive_seed
from covary.trackers import Tracker
from covary.types import Completion, Example, Group, RunError, Sampling, Score, Stream


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step."""

    lr: float
    steps: int
    warmup: float = 0.0
    shape: str = "constant"

    def __call__(self, step: int) -> float:
        """Learning rate of the step after `step` completed ones: linear warm-up, then constant, linear or cosine to 0."""
        warmup = math.floor(self.warmup * self.steps if self.warmup < 1 else self.warmup)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        shapes = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return self.lr * shapes[self.shape]


def planned_steps(steps: int | None, epochs: float | None, rows: int, prompts: int) -> int:
    """Steps of a run: as set, or as many as go through `rows` training rows `epochs` times."""
    return steps if steps is not None else max(1, math.ceil((epochs or 0) * rows / prompts))


@dataclass
class Sampler:
    """Training examples in a new order each epoch, without repeating or skipping one; its position is its state."""

    examples: Sequence[Example]
    seed: int
    position: int = 0
    _epoch: int = -1

    def draw(self, count: int) -> list[Example]:
        """The next `count` examples."""
        drawn = []
        for index in range(self.position, self.position + count):
            epoch, place = divmod(index, len(self.examples))
            drawn.append(self.examples[int(self._order(epoch)[place])])
        self.position += count
        return drawn

    def _order(self, epoch: int) -> np.ndarray:
        if self._epoch != epoch:
            self._epoch = epoch
            rng = np.random.default_rng(derive_seed(self.seed, "epoch", epoch))
            self._permutation = rng.permutation(len(self.examples))
        return self._permutation


@dataclass
class Run:
    """A run as objects. `api.py` makes it from a recipe.

    Attributes:
        room: what the model can read; prompts that leave no room for a completion are skipped.
        prompts: prompts a rollout.
        completions: k.
        updates: optimizer batches per pass over a rollout.
        passes: passes over a rollout.
        reference: what the stream `reference` means, `old` or `initial`.
        same_temperature: rollouts and scores use one temperature, so live scores watch the sampler.
        reduce: sum over ranks.
        recipe: stored in every checkpoint; a resume compares it.
        data: fingerprint of the training rows, likewise.
        warned: what the user was told once.
    """

    folder: Path
    algorithm: Algorithm
    model: nn.Module
    tokenizer: Any
    template: Template
    room: Room
    examples: Sequence[Example]
    reward: Reward | None
    rollout: RolloutEngine
    engine: TrainEngine
    evaluator: Evaluator | None
    sampling: Sampling
    schedule: Schedule
    steps: int
    prompts: int
    completions: int
    updates: int
    passes: int = 1
    reference: str = "old"
    same_temperature: bool = True
    reduce: Reduce = one_process
    max_regenerations: int = 4
    eval_every: int | None = None
    checkpoint_every: int | None = None
    keep_last: int = 2
    shown_samples: int = 2
    seed: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    screen: Screen = field(default_factory=Screen)
    tracker: Tracker | None = None
    warned: set[str] = field(default_factory=set)


@dataclass
class Progress:
    """What the loop itself carries from step to step; saved with every checkpoint."""

    step: int = 0
    updates: int = 0
    position: int = 0
    algorithm: dict[str, float] = field(default_factory=dict)


def train(run: Run, resume: checkpoints.Checkpoint | None = None) -> dict[str, float]:
    """Train to `run.steps`; returns the last row of metrics.

    Raises:
        RunError: the run cannot go on (every row of a step failed, or the disk refused a checkpoint).
    """
    log = RunLog(run.folder, run.tracker)
    progress = Progress()
    row: dict[str, float] = {}
    if resume is not None:
        progress, row = _restore(run, log, resume)
    else:
        log.rewind(0, 0)  # a folder whose run ended before its first checkpoint
        row = {"step": 0, **_evaluate(run)}
        log.metrics(row)
        if run.evaluator is not None:
            run.screen.say(step_line(row, run.steps))
    sampler = Sampler(run.examples, run.seed, progress.position)

    with run.screen.bar("training", run.steps) as bar:
        while progress.step < run.steps:
            bar(progress.step)
            position = log.position()
            row = train_step(run, sampler, progress, log)
            progress.position = sampler.position
            scheduled = run.eval_every is not None and progress.step % run.eval_every == 0
            if scheduled:
                row |= _evaluate(run)
            last = progress.step == run.steps
            if last or (run.checkpoint_every is not None and progress.step % run.checkpoint_every == 0):
                # Before the final evaluation: that one is no part of a longer run's metrics.
                _save(run, progress, {"metrics_position": position, "row": row})
            if last and not scheduled:
                row = row | _evaluate(run)
            log.metrics(row)
            run.screen.say(step_line(row, run.steps))
    if progress.updates == 0:
        raise RunError("the run ended without one update: no step had a row to learn from (see the warnings above)")
    for line in summary(log.first(), row):
        run.screen.say(line)
    return row


def train_step(run: Run, sampler: Sampler, progress: Progress, log: RunLog) -> dict[str, float]:
    """One rollout and its updates; returns its metrics and moves `progress`."""
    clock = Clock()
    names = (
        "prompts/too_long",
        "rows/invalid",
        "rows/unscorable",
        "groups/singleton",
        "groups/deselected",
        "updates/skipped",
    )
    count = dict.fromkeys(names, 0.0)
    step = progress.step + 1

    everything, groups = collect(run, sampler, progress, clock, count)
    with clock("score"):
        metrics = {} if run.same_temperature else score_watched(run.engine, groups, run.sampling.temperature)
        current = _score_frozen(run, groups)
    batch = collate(groups, run.sampling.max_tokens)
    keep = _finite(batch.numbers, len(batch))
    if run.algorithm.needs_reward:
        keep &= batch.rewards.isfinite()  # a reward may be too large for float32
    batch = _drop(run, groups, batch, keep, count)
    with clock("score"):
        batch = batch.with_numbers(_prepare(run, batch)) if len(batch) else batch
    keep = _finite(batch.numbers, len(batch)) & batch.learn
    batch = _drop(run, groups, batch, keep, count, counted=batch.learn)
    lr = run.schedule(progress.step)
    with clock("train"):
        metrics |= update(run, groups, batch, current, lr, progress, count)
    run.rollout.load_weights(None, progress.updates)

    _warn_idle(run, step, metrics, count)
    log.rollouts(step, everything)
    for text in _shown(run, everything):
        run.screen.say(text)
    progress.step = step
    return {"step": step, **rollout_metrics(everything, count), **metrics, "lr": lr, **clock.metrics(everything)}


def collect(
    run: Run, sampler: Sampler, progress: Progress, clock: Clock, count: dict[str, float]
) -> tuple[list[Group], list[Group]]:
    """Completions with rewards: everything that was sampled, and the groups to learn from.

    Groups that `select` drops are replaced by new prompts, at most `max_regenerations` times.
    """
    everything: list[Group] = []
    kept: list[Group] = []
    errors: list[str] = []
    missing = run.prompts
    for draw in range(1 + run.max_regenerations):
        with clock("rollout"):
            prompts = draw_prompts(run, sampler, missing, count)
            groups = generate(run, prompts, progress, draw)
        everything += groups
        early = [score for score in run.algorithm.frozen if score.early]
        with clock("score"):
            attach(groups, run.engine.score(groups, early) if early and groups else {})
        with clock("reward"):
            errors += _reward(run, groups)
        run.rollout.observe(groups)
        groups = _usable(run, groups, count)
        if not groups or not _overrides(run.algorithm, "select"):
            kept += groups
            break
        batch = collate(groups, run.sampling.max_tokens)
        selected, progress.algorithm = run.algorithm.select(batch, progress.algorithm)
        if selected is None:
            kept += groups
            break
        chosen = [group for group, keep in zip(groups, selected.tolist(), strict=True) if keep]
        count["groups/deselected"] += len(groups) - len(chosen)
        kept += chosen
        missing = len(groups) - len(chosen)
        if missing == 0:
            break
    _warn_unscorable(run, errors, count, rows=len(rows_of(everything)))
    return everything, kept


def draw_prompts(run: Run, sampler: Sampler, wanted: int, count: dict[str, float]) -> list[Group]:
    """The next `wanted` prompts, encoded. Those that leave no room for a completion are skipped and counted.

    `api.py` has found one that does, so this ends.
    """
    prompts: list[Group] = []
    while len(prompts) < wanted:
        for example in sampler.draw(wanted - len(prompts)):
            group = prompt_group(example, run.template, run.tokenizer)
            complaint = run.room.complaint(group)
            if complaint is None:
                prompts.append(group)
                continue
            count["prompts/too_long"] += 1
            _warn_once(run, "too long", f"prompts that leave no room for a completion are skipped; {complaint}")
    return prompts


def generate(run: Run, prompts: list[Group], progress: Progress, draw: int) -> list[Group]:
    """Completions of `prompts` as the algorithm plans them, encoded as they will be scored."""
    seed = derive_seed(run.seed, "rollout", progress.step, draw)
    examples = [group.example for group in prompts]
    plans = run.algorithm.plan(examples, run.completions, np.random.default_rng(seed))
    groups = run.rollout.generate(plans, prompts, run.sampling, seed)
    groups = append_answers(groups, run.template, run.tokenizer)
    attach_features(groups, run.algorithm)
    return groups


def update(
    run: Run,
    groups: list[Group],
    batch: Batch,
    current: dict[str, str],
    lr: float,
    progress: Progress,
    count: dict[str, float],
) -> dict[str, float]:
    """Every optimizer update of one rollout; returns their metrics, averaged over updates."""
    sums: dict[str, list[float]] = defaultdict(list)
    first_of_group = _group_starts(batch)
    for number in range(run.passes):
        for part in np.array_split(np.arange(batch.num_groups), run.updates):
            rows = [row for g in part for row in range(first_of_group[g], first_of_group[g + 1])]
            chosen = [groups[g] for g in part]
            part_batch = batch.take(rows).with_totals(run.algorithm.normalisers, run.reduce)
            part_batch = replace(part_batch, current=current)
            if part_batch.total("rows") == 0:
                continue  # nobody has rows: the step is skipped
            scores = run.engine.forward_backward(chosen, part_batch, run.algorithm)
            grad_norm = run.engine.step(lr)
            progress.updates += 1
            count["updates/skipped"] += not math.isfinite(grad_norm)
            finite = _finite(scores, len(rows))
            count["rows/invalid"] += int((~finite).sum())
            if not finite.any():
                raise RunError(
                    f"step {progress.step + 1}: every log-prob of an update is non-finite; the model is broken"
                )
            if not sums and run.same_temperature:  # the first update: parameters are still the sampler's
                for name, value in _live_sampling_kl(run, rows_of(chosen), scores).items():
                    sums[name].append(value)
            index = finite.nonzero().squeeze(1)
            scores = {name: value[index] for name, value in scores.items()}
            seen = _fill(part_batch.take(index), scores)
            metrics, weights = update_metrics(run.algorithm, run.reference, scores, seen)
            if number == 0:
                for i, weight in zip(index.tolist(), weights, strict=True):
                    rows_of(chosen)[i].weight = weight
            for name, value in metrics.items():
                sums[name].append(value)
            sums["grad_norm"].append(grad_norm)
            current = {}  # the parameters moved
    return {name: float(np.mean(values)) for name, values in sums.items()}


def _live_sampling_kl(run: Run, rows: Sequence[Completion], scores: Scores) -> dict[str, float]:
    """`kl/sampling` from the first update's own scores, which cost nothing more."""
    watched, values = [], []
    for score in run.algorithm.trained:
        if is_policy_logp(score) and score.level == "token":
            of_context = [i for i, row in enumerate(rows) if row.context == score.stream_pair[0].context]
            watched += [rows[i] for i in of_context]
            values += [scores[score.name][i] for i in of_context]
    return sampling_kl(watched, values)


def _prepare(run: Run, batch: Batch) -> dict[str, Tensor]:
    """`prepare` sees early scores only: with one update a step the others are not there yet, so never."""
    late = {score.name for score in run.algorithm.frozen if not score.early}
    early = replace(batch, numbers={name: value for name, value in batch.numbers.items() if name not in late})
    return run.algorithm.prepare(early, run.reduce)


# -- rows that leave -------------------------------------------------------------------------------------


def _usable(run: Run, groups: list[Group], count: dict[str, float]) -> list[Group]:
    """Rows without tokens (they have no log-prob) or without a needed reward leave, and groups that become too small."""
    rows = rows_of(groups)
    rewards = [reward for group in groups for reward in group.rewards or [None] * len(group.completions)]
    empty = {i for i, row in enumerate(rows) if not row.tokens}
    unscorable = {i for i, reward in enumerate(rewards) if reward is None and run.algorithm.needs_reward}
    count["rows/invalid"] += len(empty)
    count["rows/unscorable"] += len(unscorable)
    kept = take_rows(groups, [i for i in range(len(rows)) if i not in empty | unscorable])
    large = [g for g in kept if sum(c.learn for c in g.completions) >= run.algorithm.min_group]
    count["groups/singleton"] += len(groups) - len(large)
    return large


def _drop(
    run: Run, groups: list[Group], batch: Batch, keep: Tensor, count: dict[str, float], counted: Tensor | None = None
) -> Batch:
    """Leave out rows (in `groups` and `batch` alike) and groups that become too small."""
    if not len(batch):
        return batch
    count["rows/invalid"] += int((~keep & (counted if counted is not None else True)).sum())
    learning = torch.bincount(batch.group[keep & batch.learn], minlength=batch.num_groups)
    enough = learning >= max(1, run.algorithm.min_group)
    count["groups/singleton"] += int((~enough).sum())
    rows = (keep & enough[batch.group]).nonzero().squeeze(1)
    groups[:] = take_rows(groups, rows.tolist())
    return batch.take(rows)


def _finite(numbers: Any, rows: int) -> Tensor:
    """Rows whose every number is finite."""
    finite = torch.ones(rows, dtype=torch.bool)
    for value in numbers.values():
        finite &= value.isfinite() if value.ndim == 1 else value.isfinite().all(-1)
    return finite


def _warn_unscorable(run: Run, errors: list[str], count: dict[str, float], rows: int) -> None:
    unscorable = int(count["rows/unscorable"])
    reason = errors[0] if errors else "the reward gave None or NaN"
    if errors and unscorable == rows:
        raise RunError(f"no completion of this step could be scored; the first reason: {reason}")
    if unscorable:
        _warn_once(
            run, "unscorable", f"{unscorable} of {rows} completions could not be scored and left; the first: {reason}"
        )


def _warn_idle(run: Run, step: int, metrics: dict[str, float], count: dict[str, float]) -> None:
    """A step that taught nothing must not pass in silence."""
    if "loss" not in metrics:
        left = (
            ", ".join(f"{name} {value:g}" for name, value in count.items() if value)
            or "nothing was sampled to learn from"
        )
        _warn_once(run, "idle", f"step {step} had no row to learn from ({left})")
    elif count["updates/skipped"]:
        _warn_once(
            run, "skipped",
            f"step {step} skipped {count['updates/skipped']:g} updates, whose gradient was not finite; "
            "look at the learning rate, the size of rewards and the loss",
        )  # fmt: skip


def _warn_once(run: Run, what: str, text: str) -> None:
    if what not in run.warned:
        run.warned.add(what)
        run.screen.say(f"warning: {text}")


# -- scores and rewards ----------------------------------------------------------------------------------


def _reward(run: Run, groups: list[Group]) -> list[str]:
    """Rewards from the data, from the algorithm's own early scores, or from the grader, in this order."""
    if not groups or all(group.rewards is not None for group in groups):
        return []
    own = None
    if _overrides(run.algorithm, "reward"):
        own = run.algorithm.reward(collate(groups, run.sampling.max_tokens))
    if own is None:
        return grade(groups, run.reward) if run.reward is not None else []
    if own.shape != (len(rows_of(groups)),):
        raise ValueError(f"{type(run.algorithm).__name__}.reward gave shape {tuple(own.shape)}, not one number per row")
    values = iter(own.tolist())
    for group in groups:
        group.rewards = [value if math.isfinite(value) else None for value in (next(values) for _ in group.completions)]
    return []


def _overrides(algorithm: Algorithm, hook: str) -> bool:
    """Whether the method has a hook of its own: batches are collated only for those that do."""
    return getattr(type(algorithm), hook) is not getattr(Algorithm, hook)


def _score_frozen(run: Run, groups: list[Group]) -> dict[str, str]:
    """Score what is frozen and not early. Returns frozen name -> trained name, equal until the first update.

    With one update per rollout such a score is not computed here: the engine fills it from its live twin.
    """
    twins = {f.name: t.name for f in run.algorithm.frozen for t in run.algorithm.trained if _same_now(run, f, t)}
    single = run.updates * run.passes == 1
    wanted = [s for s in run.algorithm.frozen if not s.early and not (single and s.name in twins)]
    if wanted and groups:
        attach(groups, run.engine.score(groups, wanted))
    return twins


def _same_now(run: Run, frozen: Score, trained: Score) -> bool:
    """Whether a frozen score is what the trained one gives before the first update."""

    def current(stream: Stream) -> Stream:
        model = run.reference if stream.model == "reference" else stream.model
        return replace(stream, model="policy" if model == "old" else model)

    def key(score: Score) -> tuple:
        return (tuple(map(current, score.stream_pair)), score.quantity, score.tokens, score.level, score.per)

    return key(frozen) == key(trained)


def _fill(batch: Batch, scores: Scores) -> Batch:
    """The batch as the loss saw it: frozen numbers that were not scored equal their live twins."""
    return batch.with_numbers({f: scores[t] for f, t in batch.current.items() if f not in batch})


# -- what a person sees, evaluation, checkpoints --------------------------------------------------------------------------


def _shown(run: Run, groups: list[Group]) -> Iterator[str]:
    for group in groups[: run.shown_samples]:
        completion, reward = group.completions[0], (group.rewards or [None])[0]
        prompt = group.example.prompt
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        yield f"    {question[-80:]!r} -> {completion.text[:120]!r}  reward {'none' if reward is None else f'{reward:g}'}"


def _evaluate(run: Run) -> dict[str, float]:
    if run.evaluator is None:
        return {}
    metrics, errors = run.evaluator()
    if errors:
        _warn_once(
            run,
            "evaluation",
            f"{len(errors)} completions of the evaluation could not be scored; the first: {errors[0]}",
        )
    return metrics


def _save(run: Run, progress: Progress, log_state: dict[str, Any]) -> None:
    checkpoints.save(
        run.folder,
        progress.step,
        model=run.model,
        tokenizer=run.tokenizer,
        engine_state=run.engine.state_dict(),
        state={
            "progress": asdict(progress),
            "recipe": run.recipe,
            "data": run.data,
            "rollout": run.rollout.state(),
            **log_state,
        },
        keep_last=run.keep_last,
    )


def _restore(run: Run, log: RunLog, resume: checkpoints.Checkpoint) -> tuple[Progress, dict[str, float]]:
    """Model, optimizer, random states, position; metrics and rollouts behind the checkpoint are forgotten."""
    state = resume.state()
    weights = {f"model.{name}": value for name, value in resume.weights(run.model).items()}
    training = resume.training()
    run.engine.load_state_dict({**training, **weights})
    checkpoints.restore_random(training, state["random"])
    progress, row = Progress(**state["progress"]), state["row"]
    run.rollout.load_weights(None, progress.updates)
    run.rollout.load_state(state["rollout"])
    log.rewind(state["metrics_position"], progress.step)
    if progress.step == run.steps and not (run.eval_every and progress.step % run.eval_every == 0):
        row = row | _evaluate(run)  # the run had ended: its final evaluation belongs to its last row
    log.metrics(row)
    run.screen.say(f"resumed after step {progress.step} from {resume.folder}")
    return progress, row


def _group_starts(batch: Batch) -> list[int]:
    sizes = torch.bincount(batch.group) if len(batch) else torch.zeros(0, dtype=torch.long)
    return [0, *sizes.cumsum(0).tolist()]
