"""The loop, read top to bottom: no branch on an algorithm's name.

prompts -> plan -> generate -> rewards (or early scores and algorithm.reward) -> select
-> the other frozen scores -> prepare -> for each optimizer batch: forward_backward, step
-> metrics, samples -> evaluate, checkpoint
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary import checkpoint as checkpoints
from covary.batch import Algorithm, Batch, Reduce, RolloutEngine, Scores, TrainEngine, one_process
from covary.collate import attach, attach_features, collate, rows_of, take_rows
from covary.doctor import Doctor
from covary.evaluate import Evaluator, errors, grade, grading_ahead
from covary.log import RunLog, Screen, step_line, summary
from covary.memory import memory_for_training
from covary.metrics import Clock, is_policy_logp, rollout_metrics, sampling_kl, score_watched, update_metrics
from covary.ops import Likelihood, fill_with_least, likelihood
from covary.prompts import Room, Template, prompt_group
from covary.rewards import Reward
from covary.rollout.pieces import FAULTS, append_answers, fault
from covary.seeding import derive_seed
from covary.stop import Stop
from covary.trackers import Tracker
from covary.types import Completion, Example, Group, RunError, Sampling, Score, Stream

LIKELIHOOD = Score("likelihood", Stream("old"), tokens="answer", early=True)
"""What `reward: {likelihood: ...}` reads."""
MAX_SKIPPED = 3
"""Updates in a row without a finite loss and gradient, after which a run stops."""


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
        evaluators: of the task's test split, and of benchmarks.
        prompts: prompts a rollout.
        completions: k.
        updates: optimizer batches per pass over a rollout.
        passes: passes over a rollout.
        reference: what the stream `reference` means, `old` or `initial`.
        same_temperature: rollouts and scores use one temperature, so live scores watch the sampler.
        likelihood: the reward is this of the reference answer behind a completion; None: it is another.
        reduce: sum over ranks.
        recipe: stored in every checkpoint; a resume compares it.
        fingerprints: of what the recipe names and a resume must find again, by what a person calls it; likewise.
        doctor: looks at every step; None: nobody does.
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
    evaluators: Sequence[Evaluator]
    sampling: Sampling
    schedule: Schedule
    steps: int
    prompts: int
    completions: int
    updates: int
    passes: int = 1
    reference: str = "old"
    same_temperature: bool = True
    likelihood: Likelihood | None = None
    reduce: Reduce = one_process
    max_regenerations: int = 4
    eval_every: int | None = None
    checkpoint_every: int | None = None
    keep_last: int = 2
    shown_samples: int = 2
    seed: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    screen: Screen = field(default_factory=Screen)
    doctor: Doctor | None = None
    tracker: Tracker | None = None
    warned: set[str] = field(default_factory=set)


@dataclass
class Progress:
    """What the loop itself carries from step to step; saved with every checkpoint.

    Attributes:
        step: steps done.
        updates: optimizer updates made.
        skipped: updates skipped since the last one made.
        position: of the sampler.
        algorithm: the state of the algorithm's `select`.
    """

    step: int = 0
    updates: int = 0
    skipped: int = 0
    position: int = 0
    algorithm: dict[str, float] = field(default_factory=dict)


def train(run: Run, resume: checkpoints.Checkpoint | None = None, stop: Stop | None = None) -> dict[str, float]:
    """Train to `run.steps`, or to the end of the step in which a stop is asked for; returns the last row of metrics.

    Raises:
        RunError: the run cannot go on (every row of a step failed, or the disk refused a checkpoint).
    """
    stop = stop or Stop()
    log = RunLog(run.folder, run.tracker)
    progress, position = Progress(), 0
    row: dict[str, float] = {"step": 0}
    if resume is not None:
        progress, position, row = _restore(run, resume)
    log.rewind(position, progress.step)  # also where a run ended before its first checkpoint
    saved = resume.step if resume is not None else None
    evaluated = row | _evaluate(run) if _evaluation_is_due(run, progress.step) else row
    log.metrics(evaluated)
    if len(evaluated) > len(row):
        run.screen.say(step_line(evaluated, run.steps))
    sampler = Sampler(run.examples, run.seed, progress.position)

    with run.screen.bar("training", run.steps) as bar, memory_for_training(next(run.model.parameters()).device):
        while progress.step < run.steps and not stop.asked:
            bar(progress.step)
            complete = _Complete(deepcopy(progress), position, row, run.rollout.state())
            position = log.position()
            try:
                row = train_step(run, sampler, progress, log)
            except RunError:
                # A server stayed away, or nothing could be scored: what was done until then is not lost.
                if progress.updates == complete.progress.updates and saved != progress.step > 0:
                    complete.save(run)
                raise
            progress.position = sampler.position
            reason = run.doctor.reason_to_stop(row) if run.doctor else None
            # Saved before the evaluation, which a resume repeats: what ends the run there loses no step, and an
            # evaluation because the run ends is no part of a longer run's metrics.
            if stop.asked or reason or _checkpoint_is_due(run, progress.step):
                _save(run, progress, position, row)
                saved = progress.step
            evaluated = row
            if _evaluation_is_due(run, progress.step):
                if stop.asked:
                    break  # every row in the file is whole: the resume writes this one
                evaluated = row | _evaluate(run)
            log.metrics(evaluated)
            run.screen.say(step_line(evaluated, run.steps))
            if reason:
                raise RunError(f"doctor: {reason}; `doctor: stop` ended the run")
    if stop.asked:
        if saved != progress.step:
            _save(run, progress, position, row)
        return evaluated
    if progress.updates == 0:
        raise RunError("the run ended without one update: no step had a row to learn from (see the warnings above)")
    for line in summary(log.first(), evaluated):
        run.screen.say(line)
    return evaluated


@dataclass(frozen=True)
class _Complete:
    """What the loop carries after a complete step; the model and the optimizer are as they were then until an update."""

    progress: Progress
    position: int
    row: dict[str, float]
    rollout: dict[str, Any]

    def save(self, run: Run) -> None:
        """A checkpoint of that step, whatever a step after it has begun."""
        run.rollout.load_state(self.rollout)
        _save(run, self.progress, self.position, self.row)


def train_step(run: Run, sampler: Sampler, progress: Progress, log: RunLog) -> dict[str, float]:
    """One rollout and its updates; returns its metrics and moves `progress`."""
    clock = Clock()
    names = (
        "prompts/too_long",
        "rows/invalid",
        "rows/unscorable",
        "rows/unparsable",
        "groups/singleton",
        "groups/deselected",
        "updates/skipped",
        *(["prompts/tagged"] if run.template.tags else []),
        *([f"traces/{name}" for name in FAULTS] if run.template.answer is not None else []),
    )
    count = dict.fromkeys(names, 0.0)
    step = progress.step + 1

    everything, groups = collect(run, sampler, progress, clock, count)
    with clock("score"):
        metrics = {} if run.same_temperature else score_watched(run.engine, groups, run.sampling.temperature)
        current = _score_frozen(run, groups)
    batch = collate(groups, run.sampling.max_tokens)
    _refuse_broken(run, batch, step)
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
    row = {"step": step, **rollout_metrics(everything, count), **metrics, "lr": lr, **clock.metrics(everything)}
    return row | _diagnose(run, row, everything)


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
            groups, reward = generate(run, prompts, progress, draw)
        everything += groups
        _count_faults(run, groups, count)
        early = [score for score in run.algorithm.frozen if score.early]
        early += [LIKELIHOOD] if run.likelihood is not None else []
        with clock("score"):
            attach(groups, run.engine.score(groups, early) if early and groups else {})
        with clock("reward"):
            errors += _reward(run, groups, reward, count)
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
    """The next `wanted` prompts, encoded. Those that leave no room for a completion, or hold a tag, are skipped and counted.

    `api.py` has found one that does, so this ends.
    """
    prompts: list[Group] = []
    while len(prompts) < wanted:
        for example in sampler.draw(wanted - len(prompts)):
            if (tagged := run.template.complaint(example)) is not None:
                count["prompts/tagged"] += 1
                _warn_once(run, "tagged", f"rows whose text would be read as markup are skipped; {tagged}")
                continue
            group = prompt_group(example, run.template, run.tokenizer)
            complaint = run.room.complaint(group)
            if complaint is None:
                prompts.append(group)
                continue
            count["prompts/too_long"] += 1
            _warn_once(run, "too long", f"prompts that leave no room for a completion are skipped; {complaint}")
    return prompts


def generate(run: Run, prompts: list[Group], progress: Progress, draw: int) -> tuple[list[Group], Reward | None]:
    """Completions of `prompts` as the algorithm plans them, encoded as they will be scored; and what grades them."""
    seed = derive_seed(run.seed, "rollout", progress.step, draw)
    examples = [group.example for group in prompts]
    plans = run.algorithm.plan(examples, run.completions, np.random.default_rng(seed))
    grades = run.reward is not None and not _rewards_itself(run)
    with grading_ahead(run.rollout, run.reward) if grades else nullcontext(run.reward) as reward:
        groups = run.rollout.generate(plans, prompts, run.sampling, seed)
    groups = append_answers(groups, run.template, run.tokenizer)
    attach_features(groups, run.algorithm)
    return groups, reward


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
            completions = rows_of(chosen)
            part_batch = batch.take(rows).with_totals(run.algorithm.normalisers, run.reduce)
            part_batch = replace(part_batch, current=current)
            if part_batch.total("rows") == 0:
                continue  # nobody has rows: the step is skipped
            scores = run.engine.forward_backward(chosen, part_batch, run.algorithm)
            grad_norm = run.engine.step(lr)
            _count_update(progress, count, made=math.isfinite(grad_norm))
            finite = _finite(scores, len(rows))
            count["rows/invalid"] += int((~finite).sum())
            if not finite.any():
                raise RunError(
                    f"step {progress.step + 1}: every log-prob of an update is non-finite; the model is broken"
                )
            if not sums and run.same_temperature:  # the first update: parameters are still the sampler's
                for name, value in _live_sampling_kl(run, completions, scores).items():
                    sums[name].append(value)
            index = finite.nonzero().squeeze(1)
            scores = {name: value[index] for name, value in scores.items()}
            seen = _fill(part_batch.take(index), scores)
            metrics, weights = update_metrics(run.algorithm, run.reference, scores, seen)
            if number == 0:
                for i, weight in zip(index.tolist(), weights, strict=True):
                    completions[i].weight = weight
            for name, value in metrics.items():
                sums[name].append(value)
            sums["grad_norm"].append(grad_norm)
            current = {}  # the parameters moved
    return {name: float(np.mean(values)) for name, values in sums.items()}


def _count_update(progress: Progress, count: dict[str, float], made: bool) -> None:
    if made:
        progress.updates += 1
        progress.skipped = 0
        return
    count["updates/skipped"] += 1
    progress.skipped += 1
    if progress.skipped == MAX_SKIPPED:
        raise RunError(
            f"step {progress.step + 1}: {MAX_SKIPPED} updates in a row were skipped, whose loss or gradient was not "
            "finite; look at the learning rate, the size of rewards and the loss"
        )


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


def _count_faults(run: Run, groups: list[Group], count: dict[str, float]) -> None:
    """Traces that lack the template's form, where it has one; the algorithm decides what they mean."""
    if run.template.answer is not None:
        for completion in rows_of(groups):
            if (found := fault(completion, run.template)) is not None:
                count[f"traces/{found}"] += 1


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


def _refuse_broken(run: Run, batch: Batch, step: int) -> None:
    """A frozen score that is finite for no row: nothing would ever be learned, and the run must not pass for one."""
    for score in run.algorithm.frozen:
        if len(batch) and score.name in batch and not _finite({score.name: batch[score.name]}, len(batch)).any():
            read = batch.numbers.get(f"{score.name}_tokens")
            if read is not None and read.isnan().all():
                _warn_once(
                    run, "unread",
                    f"step {step}: the teacher can read no completion: each has no text, or is too long for its context",
                )  # fmt: skip
                continue
            raise RunError(
                f"step {step}: the score {score.name!r} is non-finite for every completion; a model that it reads is broken"
            )


def _warn_unscorable(run: Run, errors: list[str], count: dict[str, float], rows: int) -> None:
    unscorable = int(count["rows/unscorable"])
    silent = "the reward gave None or NaN"
    if run.template.answer is not None:
        silent += f" (an answer is scored behind a completion that ends with {run.template.stop!r})"
    reason = errors[0] if errors else silent
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
            f"step {step} skipped {count['updates/skipped']:g} updates, whose loss or gradient was not finite; "
            "look at the learning rate, the size of rewards and the loss",
        )  # fmt: skip


def _warn_once(run: Run, what: str, text: str) -> None:
    if what not in run.warned:
        run.warned.add(what)
        run.screen.say(f"warning: {text}")


# -- scores and rewards ----------------------------------------------------------------------------------


def _reward(run: Run, groups: list[Group], reward: Reward | None, count: dict[str, float]) -> list[str]:
    """Rewards from the data, from early scores, or from the grader (`reward`), in this order.

    Returns:
        Why rows have none.
    """
    if not groups or all(group.rewards is not None for group in groups):
        return []
    own = None
    if _rewards_itself(run):
        own = _own_reward(run, collate(groups, run.sampling.max_tokens))
    if own is None:
        if reward is None:
            return []
        verdicts = grade(groups, reward)
        count["rows/unparsable"] += sum(
            verdict.grade is not None and verdict.grade.verdict == "unparsable" for own in verdicts for verdict in own
        )
        return errors(verdicts)
    if own.shape != (len(rows_of(groups)),):
        raise ValueError(f"{type(run.algorithm).__name__}.reward gave shape {tuple(own.shape)}, not one number per row")
    values = iter(own.tolist())
    for group in groups:
        group.rewards = [value if math.isfinite(value) else None for value in (next(values) for _ in group.completions)]
    return []


def _rewards_itself(run: Run) -> bool:
    """Whether rewards are made of scores."""
    return run.likelihood is not None or _overrides(run.algorithm, "reward")


def _own_reward(run: Run, batch: Batch) -> Tensor | None:
    """Rewards made of scores. A completion behind which no answer could be scored gets its group's least."""
    if run.likelihood is None:
        return run.algorithm.reward(batch)
    return fill_with_least(likelihood(batch["likelihood"], batch.answer_mask, run.likelihood), batch.group)


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


def _diagnose(run: Run, row: dict[str, float], groups: list[Group]) -> dict[str, float]:
    """The doctor's new findings, shown, as metrics of the step."""
    findings = run.doctor.examine(row, groups) if run.doctor else {}
    for text in findings.values():
        run.screen.say(f"doctor: {text}")
    return {f"doctor/{name}": 1.0 for name in findings}


def _evaluate(run: Run) -> dict[str, float]:
    found: dict[str, float] = {}
    for evaluator in run.evaluators:
        metrics, errors = evaluator()
        if errors:
            _warn_once(
                run,
                f"evaluation {evaluator.name}",
                f"{len(errors)} completions of the evaluation could not be scored; the first: {errors[0]}",
            )
        found |= metrics
    return found


def _evaluation_is_due(run: Run, step: int) -> bool:
    return step in (0, run.steps) or (run.eval_every is not None and step % run.eval_every == 0)


def _checkpoint_is_due(run: Run, step: int) -> bool:
    return step == run.steps or (run.checkpoint_every is not None and step % run.checkpoint_every == 0)


def _save(run: Run, progress: Progress, position: int, row: dict[str, float]) -> None:
    """A checkpoint after the step of `row`, which starts at byte `position` of metrics.jsonl."""
    checkpoints.save(
        run.folder,
        progress.step,
        model=run.model,
        tokenizer=run.tokenizer,
        engine_state=run.engine.state_dict(),
        state={
            "progress": asdict(progress),
            "recipe": run.recipe,
            "fingerprints": run.fingerprints,
            "rollout": run.rollout.state(),
            "doctor": run.doctor.state() if run.doctor else {},
            "metrics_position": position,
            "row": row,
        },
        keep_last=run.keep_last,
    )


def _restore(run: Run, resume: checkpoints.Checkpoint) -> tuple[Progress, int, dict[str, float]]:
    """Model, optimizer and random states; returns what `_save` was given."""
    state = resume.state()
    weights = {f"model.{name}": value for name, value in resume.weights(run.model).items()}
    training = resume.training()
    run.engine.load_state_dict({**training, **weights})
    checkpoints.restore_random(training, state["random"])
    progress = Progress(**state["progress"])
    run.rollout.load_weights(None, progress.updates)
    run.rollout.load_state(state["rollout"])
    if run.doctor:
        run.doctor.load_state(state["doctor"])
    run.screen.say(f"resumed after step {progress.step} from {resume.folder}")
    return progress, state["metrics_position"], state["row"]


def _group_starts(batch: Batch) -> list[int]:
    sizes = torch.bincount(batch.group) if len(batch) else torch.zeros(0, dtype=torch.long)
    return [0, *sizes.cumsum(0).tolist()]
