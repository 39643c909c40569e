"""Why a run cannot learn, said once in plain words while it runs.

After every step each symptom looks at the step's metrics and graded completions. One that stays for as many
steps in a row as `SYMPTOMS` says, and for `ENOUGH` completions, becomes a finding: one line on screen, and `doctor/<name>` in the row of that
step. docs/doctor.md explains each. Patience of 3 steps is for what the policy does, of 5 for what rewards say:
causes are told before their effects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from covary.types import Completion, Group

TRUNCATED = 0.95
"""Share of completions cut at the limit. A model that answers at all ends more than one in twenty."""
PAST_END = 0.1
"""Share of completions that go on behind the end of their turn. None does where the end of a turn ends a completion."""
SAMPLING_KL = 0.01
"""Nats per token. The same weights give below 1e-6 in float32 and below 1e-3 in bfloat16."""
OLD_KL = 0.3
"""Nats per token within one step. The shipped recipes stay below 0.02."""
INITIAL_KL = 4.0
"""Nats per token: as if the initial model gave each token e**-4 = 2 %. The shipped recipes stay below 1."""
SHORTER = 0.25
"""Share of the first steps' mean length. Good answers may become shorter too: the reward has to be no better as well."""
LONGER = 2.0
"""Times the first steps' mean length, where the limit also cuts most completions and the reward is no better."""
LONGER_TRUNCATED = 0.5
"""Longer reasoning is healthy as long as it comes to an end."""
ENOUGH = 48
"""Completions that show a symptom. At one prompt of 4 a step, a policy that is right one time in ten has 20 failures in
a row one time in eight, and 48 one time in 150."""
FIRST_STEPS = 5
"""Steps that say what is normal for this run."""

HARMLESS = frozenset({"solved"})
"""Findings that `doctor: stop` does not stop for."""


@dataclass(frozen=True)
class Facts:
    """What the doctor knows of a run before it starts.

    Attributes:
        max_tokens: the rollout's limit.
        end_tokens: how the tokens that end a completion are written.
        turn_end: what the chat template puts behind an answer, where that ends no completion.
        extract: the extractor of the training grader, None where it reads the whole text.
        extractor: its name.
        grader: of training, where it is a built-in one.
        needs_reward: the method learns from rewards.
    """

    max_tokens: int
    end_tokens: tuple[str, ...] = ()
    turn_end: str | None = None
    extract: Callable[[str], str | None] | None = None
    extractor: str = "none"
    grader: str = ""
    needs_reward: bool = True


def open_turn(turn_end: str, end_tokens: Sequence[str]) -> str:
    """That a chat template ends an answer with what ends no completion, and what to do."""
    return (
        f"the chat template ends an answer with {turn_end!r}, which ends no completion here (end tokens: "
        f"{', '.join(map(repr, end_tokens)) or 'none'}): "
        f"set rollout.stop: [{json.dumps(turn_end, ensure_ascii=False)}], or make it the tokenizer's end token"
    )


class Step:
    """One step as symptoms see it."""

    def __init__(
        self,
        facts: Facts,
        row: Mapping[str, float],
        groups: Sequence[Group],
        start: Mapping[str, float],
        varied: bool,
    ) -> None:
        self.facts = facts
        self.row = row
        self.start = start
        self.varied = varied
        self.sampled: list[Completion] = []
        self.of_prompt: list[list[Completion]] = []
        """The policy's own samples of each prompt. Greedy rows are equal by design, others are not its own."""
        self.rewards: list[list[float]] = []
        for group in groups:
            own = [c for c in group.completions if c.source == "policy" and not c.greedy]
            self.sampled += own
            self.of_prompt.append(own)
            given = zip(group.completions, group.rewards or (), strict=bool(group.rewards))
            self.rewards.append([reward for c, reward in given if c.learn and reward is not None])

    def share(self, test: Callable[[Completion], bool]) -> float:
        """Of the policy's samples; 0 where there are none."""
        return fmean(map(test, self.sampled)) if self.sampled else 0.0

    @property
    def equal_reward(self) -> float | None:
        """The reward of every row, where all have one and the same."""
        values = {reward for rewards in self.rewards for reward in rewards}
        return values.pop() if len(values) == 1 and self.facts.needs_reward else None

    @property
    def flat(self) -> bool:
        """No prompt has two rewards that differ, though some have two."""
        if self.equal_reward is not None:
            return True
        several = [rewards for rewards in self.rewards if len(rewards) > 1]
        return self.facts.needs_reward and bool(several) and all(len(set(rewards)) == 1 for rewards in several)

    @property
    def no_better(self) -> bool:
        """The mean reward has not risen since the first steps."""
        return self.row.get("reward/mean", -math.inf) <= self.start.get("reward/mean", math.inf)

    @property
    def longer(self) -> float:
        """The mean length over that of the first steps; 1 until they are over, or where nothing is sampled."""
        first = self.start.get("completion/length", 0)
        return self.row["completion/length"] / first if first and self.sampled else 1.0

    @property
    def runs_on(self) -> bool:
        """Most completions of the first steps ended themselves: what cuts them now is the policy, not the limit."""
        return self.start.get("completion/truncated", 1.0) < LONGER_TRUNCATED

    @property
    def lengths(self) -> str:
        """Both lengths and rewards, for the user."""
        return (
            f"completions have {self.row['completion/length']:.3g} tokens on average, "
            f"{self.start['completion/length']:.3g} in the first {FIRST_STEPS} steps, and the mean reward is "
            f"{self.row.get('reward/mean', math.nan):.3g} after {self.start.get('reward/mean', math.nan):.3g}"
        )


def _past_end(step: Step) -> str | None:
    end = step.facts.turn_end
    if end is None or (share := step.share(lambda c: end in c.text)) < PAST_END:
        return None
    return f"{share:.0%} of the completions go on behind the end of their turn: {open_turn(end, step.facts.end_tokens)}"


def _truncated(step: Step) -> str | None:
    share = step.share(lambda c: c.finish == "length")
    if share < TRUNCATED:
        return None
    if step.runs_on:
        return (
            f"{share:.0%} of the completions are cut at rollout.max_tokens = {step.facts.max_tokens}, and "
            f"{step.start['completion/truncated']:.0%} were in the first {FIRST_STEPS} steps: the policy no longer ends its "
            "answers; go back to an earlier checkpoint and lower optimizer.lr"
        )
    return (
        f"{share:.0%} of the completions were cut at rollout.max_tokens = {step.facts.max_tokens}, before their end: "
        "raise it, ask for shorter answers in the prompt, or see in rollouts/ what they do instead of ending"
    )


def _no_end(step: Step) -> str | None:
    if not step.sampled or step.runs_on or step.share(lambda c: c.finish != "length"):
        return None
    return (
        f"not one of {len(step.sampled)} completions of this step ended itself: no end token "
        f"({', '.join(map(repr, step.facts.end_tokens)) or 'the model has none'}) and no stop text was sampled; if a "
        "higher rollout.max_tokens does not help, the model never learned to end: name what its answers end with in "
        "rollout.stop, or use another prompt form (task.template)"
    )


def _unparsed(step: Step) -> str | None:
    extract, texts = step.facts.extract, [c.text for c in step.sampled]
    if extract is None:
        graded = sum(map(len, step.rewards))
        if not graded or step.row.get("rows/unparsable", 0) < graded:
            return None
        return (
            f"the grader {step.facts.grader!r} could read an answer in none of {graded} completions, so each got 0: ask for "
            "its form in the prompt (task.instruction, task.system, worked examples), or choose a task.extract or another "
            "grader"
        )
    if not texts or any(extract(text) is not None for text in texts):
        return None
    return (
        f"the extractor {step.facts.extractor!r} found an answer in none of {len(texts)} completions, so each got 0 "
        "unread: ask for that form in the prompt (task.instruction, task.system, worked examples), or choose another "
        "task.extract"
    )


def _unscorable(step: Step) -> str | None:
    count = step.row.get("rows/unscorable", 0)
    if not step.facts.needs_reward or count == 0 or any(step.rewards):
        return None
    return (
        f"none of {count:g} completions got a reward: the reward function gave None or NaN for every one; "
        "try it on a line of rollouts/"
    )


def _collapsed(step: Step) -> str | None:
    several = [{c.text for c in own} for own in step.of_prompt if len(own) > 1]
    if not several or any(len(texts) > 1 for texts in several) or step.equal_reward == 1:
        return None
    return (
        f"all completions of a prompt are the same text, for each of {len(several)} prompts (entropy "
        f"{max(0.0, step.row.get('entropy', 0.0)):.2g} nats per token): the policy tries nothing else, so no completion is "
        "better than another; raise rollout.temperature, lower optimizer.lr, or start from an earlier checkpoint"
    )


def _no_update(step: Step) -> str | None:
    if step.flat or _unscorable(step):
        return None  # told by their own findings, and a solved task needs no update
    row, reason = step.row, None
    if "loss" not in row:
        left = ("rows/invalid", "rows/unscorable", "groups/singleton", "groups/deselected")
        counts = ", ".join(f"{name} {row[name]:g}" for name in left if row.get(name)) or "nothing was sampled"
        reason = f"no row was left to learn from ({counts}); docs/concepts.md says what leaves a batch"
    elif row["lr"] == 0:
        reason = "the learning rate is 0: raise optimizer.lr"
    elif row["grad_norm"] == 0:
        reason = (
            "the gradient is exactly 0: the method keeps none of the rows, everything is clipped, or no trainable "
            "parameter has a part in the loss"
        )
    return reason and f"no update moved the weights: {reason}"


def _no_reward(step: Step) -> str | None:
    if step.equal_reward != 0:
        return None
    return (
        f"every one of {sum(map(len, step.rewards))} completions got reward 0, so none is better than another: read "
        "rollouts/ (a wrong form of answer is a matter of the prompt or of task.extract), take easier questions, a "
        "stronger model, more rollout.completions, or a reward with partial credit"
    )


def _solved(step: Step) -> str | None:
    if step.equal_reward != 1 or not step.varied:
        return None
    return (
        f"solved: every one of {sum(map(len, step.rewards))} completions got reward 1, and nothing is left to learn "
        "from these questions: stop here, or go on with harder ones"
    )


def _equal_rewards(step: Step) -> str | None:
    equal = step.equal_reward
    if not step.flat or equal == 0 or (equal == 1 and step.varied):
        return None
    if equal is None:
        what = f"the completions of a prompt all got the same reward, for each of {len(step.rewards)} prompts"
    else:
        what = f"every one of {sum(map(len, step.rewards))} completions got reward {equal:g}"
    cause = " from the first step on" if equal == 1 else ""
    return (
        f"{what}{cause}, so none is better than another: see in rollouts/ whether the reward tells good completions "
        "from bad ones, and whether the questions are of use to this model (neither too easy nor too hard)"
    )


def _sampling_drift(step: Step) -> str | None:
    value = step.row.get("kl/sampling", 0.0)
    if not value >= SAMPLING_KL:  # NaN is none of this
        return None
    return (
        f"kl/sampling is {value:.2g} nats per token: the rollout's log-probs are not those of the trained policy "
        "(other weights, precision, temperature or prompt), so ratios and gradients are wrong; compare engine.autocast "
        "and rollout.temperature on both sides, and report it if they agree"
    )


def _shorter(step: Step) -> str | None:
    if step.longer > SHORTER or not step.no_better:
        return None
    return f"{step.lengths}: answers collapse; lower optimizer.lr, and see in rollouts/ why short ones are rewarded"


def _longer(step: Step) -> str | None:
    if step.longer < LONGER or step.row["completion/truncated"] < LONGER_TRUNCATED or not step.no_better:
        return None
    return (
        f"{step.lengths}; {step.row['completion/truncated']:.0%} are cut at rollout.max_tokens = "
        f"{step.facts.max_tokens}: answers run away; lower optimizer.lr, or let the reward prefer those that end"
    )


def _old_kl(step: Step) -> str | None:
    value = step.row.get("kl/old", 0.0)
    if not value >= OLD_KL:  # NaN is none of this
        return None
    return (
        f"kl/old is {value:.2g} nats per token: within a step the policy leaves the one that sampled, and the later "
        "updates learn from samples that it would not give; lower optimizer.lr or optimizer.passes, or raise "
        "optimizer.prompts"
    )


def _initial_kl(step: Step) -> str | None:
    value = step.row.get("kl/initial", 0.0)
    if not value >= INITIAL_KL:  # NaN is none of this
        return None
    return (
        f"kl/initial is {value:.2g} nats per token: little of the initial model is left; lower optimizer.lr or raise "
        "the method's weight on the KL, and go back to an earlier checkpoint"
    )


SYMPTOMS: dict[str, tuple[int, Callable[[Step], str | None]]] = {
    "past_end": (3, _past_end),
    "truncated": (3, _truncated),
    "no_end": (5, _no_end),
    "unparsed": (3, _unparsed),
    "unscorable": (3, _unscorable),
    "no_update": (3, _no_update),
    "collapsed": (5, _collapsed),
    "no_reward": (5, _no_reward),
    "equal_rewards": (5, _equal_rewards),
    "solved": (5, _solved),
    "sampling_drift": (3, _sampling_drift),
    "shorter": (3, _shorter),
    "longer": (3, _longer),
    "old_kl": (3, _old_kl),
    "initial_kl": (3, _initial_kl),
}
"""Steps in a row, and what is wrong at a step (None: nothing)."""

_REMEMBERED = ("streaks", "found", "first", "varied")


@dataclass
class Doctor:
    """Looks at every step of a run. What it remembers are plain values, saved in checkpoints.

    Attributes:
        facts: the run.
        stop: findings end the run.
        streaks: steps in a row that show each symptom, and their completions.
        found: what was said, by name: nothing is said twice, by resumed runs neither.
        first: lengths, shares of cut completions and rewards of the first steps.
        varied: whether rewards of one prompt ever differed.
    """

    facts: Facts
    stop: bool = False
    streaks: dict[str, list[int]] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)
    varied: bool = False

    def examine(self, row: Mapping[str, float], groups: Sequence[Group]) -> dict[str, str]:
        """New findings of one step: names of `SYMPTOMS`, and one line for the user.

        Args:
            row: the step's metrics.
            groups: everything that was sampled, with its rewards.
        """
        start = {name: fmean(values) for name, values in self.first.items() if len(values) == FIRST_STEPS}
        step = Step(self.facts, row, groups, start, self.varied)
        self.varied |= not step.flat and any(step.rewards)
        for name in ("completion/length", "completion/truncated", "reward/mean"):
            seen = self.first.setdefault(name, [])
            if len(seen) < FIRST_STEPS and name in row:
                seen.append(row[name])
        rows = sum(len(group.completions) for group in groups) or ENOUGH  # a step without any is no chance
        new: dict[str, str] = {}
        for name, (patience, symptom) in SYMPTOMS.items():
            text = symptom(step)
            steps, seen = self.streaks.get(name, (0, 0))
            self.streaks[name] = [steps + 1, seen + rows] if text else [0, 0]
            steps, seen = self.streaks[name]
            if text and steps >= patience and seen >= ENOUGH and name not in self.found:
                new[name] = f"step {row['step']:g}, {steps} steps in a row: {text}"
        self.found |= new
        return new

    def reason_to_stop(self, row: Mapping[str, float]) -> str | None:
        """What was found in the step of that row, where `doctor: stop` stops for it."""
        texts = [text for name, text in self.found.items() if f"doctor/{name}" in row and name not in HARMLESS]
        return "; ".join(texts) if self.stop and texts else None

    def state(self) -> dict[str, Any]:
        """What a resume needs, as JSON values."""
        return {name: getattr(self, name) for name in _REMEMBERED}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave; a checkpoint of a run without a doctor has none."""
        for name in _REMEMBERED:
            setattr(self, name, state.get(name, getattr(self, name)))
