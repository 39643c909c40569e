"""Two evaluations of the same questions: differences paired by question, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covary.evaluate import Sample, accuracies
from covary.samples import SETTINGS, differing, read_settings, whole
from covary.statistics import Estimate, estimate
from covary.types import UserError


@dataclass(frozen=True)
class Difference:
    """How two evaluations differ on some questions.

    Attributes:
        task: whose questions they are.
        category: of these; None: all of the task.
        a: accuracy (Average@N) of the first, over questions that both could score.
        b: of the second.
        difference: mean over questions of b - a, with its 95 % interval.
        greedy: the same of the greedy completions; None where one of the two has none.
    """

    task: str
    category: str | None
    a: float
    b: float
    difference: Estimate
    greedy: Difference | None = None

    def line(self) -> str:
        """For a person."""
        name = self.task if self.category is None else f"{self.task}/{self.category}"
        text = f"{name} {_shown(self)}, {self.difference.problems} questions"
        return text if self.greedy is None else f"{text}; greedy {_shown(self.greedy)}"


def compare(a: Path, b: Path) -> tuple[list[Difference], list[str]]:
    """The tasks that two evaluation folders share, each as a whole and by category; and notes of what else differs.

    Raises:
        UserError: no evaluation, an unfinished one, no task in common, or other questions under one task's name.
    """
    folders = [{path.parent.name: path.parent for path in sorted(root.glob(f"*/{SETTINGS}"))} for root in (a, b)]
    for root, tasks in zip((a, b), folders, strict=True):
        if not tasks:
            raise UserError(f"--compare: {root} holds no evaluation; `covary eval --out {root}` makes one")
    shared = [task for task in folders[0] if task in folders[1]]
    if not shared:
        raise UserError(
            f"--compare: {a} has {', '.join(folders[0])} and {b} {', '.join(folders[1])}: no task in common"
        )
    found: list[Difference] = []
    notes: list[str] = []
    for task in shared:
        settings = [read_settings(tasks[task]) for tasks in folders]
        if settings[0]["rows_sha256"] != settings[1]["rows_sha256"]:
            raise UserError(f"--compare: the questions of {task} in {a} are not those in {b}")
        others = [key for key in differing(*settings) if not key.startswith(("model.", "about."))]
        if others:
            notes.append(f"{task}: beside their models, the two differ in {', '.join(others)}")
        found += differences(task, *(_samples(tasks[task], own) for tasks, own in zip(folders, settings, strict=True)))
    return found, notes


def differences(task: str, a: Sequence[Sample], b: Sequence[Sample]) -> list[Difference]:
    """All questions, then each category where there are categories."""
    categories = sorted({sample.category for sample in a if sample.category is not None})
    return [
        _difference(task, category, *([s for s in own if category in (None, s.category)] for own in (a, b)))
        for category in (None, *categories)
    ]


def _difference(
    task: str, category: str | None, a: Sequence[Sample], b: Sequence[Sample], greedy: bool = False
) -> Difference:
    one, two = accuracies(a, greedy), accuracies(b, greedy)
    both = [id for id in one if id in two]
    both_greedy = not greedy and any(s.greedy for s in a) and any(s.greedy for s in b)
    return Difference(
        task,
        category,
        estimate([one[id] for id in both]).mean,
        estimate([two[id] for id in both]).mean,
        estimate([two[id] - one[id] for id in both]),
        _difference(task, category, a, b, greedy=True) if both_greedy else None,
    )


def _samples(folder: Path, settings: dict[str, Any]) -> list[Sample]:
    sampling = settings["sampling"]
    done = whole(folder, sampling["samples"] + sampling["greedy"])
    if len(done) < settings["questions"]:
        raise UserError(
            f"--compare: {folder} is not finished, {len(done)} of {settings['questions']} questions are answered; start "
            "it again and it goes on"
        )
    return [sample for own in done.values() for sample in own]


def _shown(found: Difference) -> str:
    mean, half = found.difference.mean, found.difference.half
    return f"{found.a:.3f} -> {found.b:.3f}, {mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
