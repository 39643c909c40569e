"""The folder of an evaluation: what it measures, its samples as they come, its results.

    OUT/<task>/settings.json    everything that the numbers depend on; another start has to bring the same
    OUT/<task>/samples.jsonl    one line per graded completion; `samples-1of4.jsonl` of the process --shard 1/4
    OUT/<task>/results.json     metrics and accuracies by category, once every question is answered

A question counts as answered when all its completions are there, so a process that is killed loses at most the batch
at work, and a further start goes on behind it. Processes share a folder: each takes every n-th question (a shard); a
start without a shard takes whatever is left.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covary.evaluate import Evaluator, Sample, by_category, by_question
from covary.jsonlines import dump_line
from covary.lock import run_lock
from covary.log import disk
from covary.types import UserError

SETTINGS, RESULTS = "settings.json", "results.json"
_FIELDS = {field.name for field in dataclasses.fields(Sample)}


@dataclass(frozen=True)
class Shard:
    """One of `count` processes; it takes the questions whose position leaves the remainder `index`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From `i/n`, i from 0 to n - 1.

        Raises:
            UserError: anything else.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise UserError(f"--shard: takes i/n with i from 0 to n - 1, such as 0/4, got {text!r}")
        return cls(int(index), int(count))

    @property
    def suffix(self) -> str:
        """Of the names of its files."""
        return f"-{self.index}of{self.count}" if self.count > 1 else ""


def answer(
    folder: Path,
    evaluator: Evaluator,
    settings: Mapping[str, Any],
    shard: Shard,
    batch: int,
    say: Callable[[str], None],
) -> list[Sample] | None:
    """Answer what is left of the shard's questions, and write the results once nothing is left at all.

    Args:
        folder: of the task's evaluation; it is made.
        evaluator: what is measured.
        settings: everything that its numbers depend on.
        shard: this process's part.
        batch: completions between two writes, at least those of one question.
        say: told where the file system knows no locks.

    Returns:
        Every sample in the order of the questions, or None while other processes have some left.

    Raises:
        UserError: the folder holds an evaluation with other settings, or another process has this shard.
        RunError: the disk refused.
    """
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with run_lock(folder, say, f"lock{shard.suffix}"):
        _agree(folder, settings)
        per_question = evaluator.samples + evaluator.greedy
        path = folder / f"samples{shard.suffix}.jsonl"
        _keep_whole(path, per_question)
        done = whole(folder, per_question)
        left = [e for i, e in enumerate(evaluator.examples) if i % shard.count == shard.index and e.id not in done]
        size = max(1, batch // per_question)
        for start in range(0, len(left), size):
            _append(path, evaluator.ask(left[start : start + size]))
    done = whole(folder, per_question)
    if any(example.id not in done for example in evaluator.examples):
        return None
    samples = [sample for example in evaluator.examples for sample in done[example.id]]
    results = {
        "metrics": evaluator.metrics(samples),
        "categories": {
            name: {"accuracy": found.mean, "interval": found.half, "questions": found.problems}
            for name, found in by_category(samples).items()
        },
    }
    _replace(folder / RESULTS, json.dumps(_finite(results), indent=2) + "\n")
    return samples


def whole(folder: Path, per_question: int) -> dict[str, list[Sample]]:
    """Samples of every question that has all its completions, over all shards, by id; in the order of their indices."""
    found: dict[str, dict[int, Sample]] = {}
    for path in sorted(folder.glob("samples*.jsonl")):
        for sample in _read(path):
            found.setdefault(sample.id, {})[sample.index] = sample
    return {id: [own[index] for index in range(per_question)] for id, own in found.items() if len(own) == per_question}


def read_settings(folder: Path) -> dict[str, Any]:
    """What an evaluation's folder measures.

    Raises:
        UserError: it is no such folder.
    """
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no evaluation (no readable {SETTINGS})") from error


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    names: list[str] = []
    for key in {**a, **b}:
        mine, other = a.get(key), b.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            names += differing(mine, other, f"{prefix}{key}.")
        elif mine != other:
            names.append(f"{prefix}{key}")
    return names


def _agree(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings, or find the same ones."""
    mine = json.loads(json.dumps(settings))
    if not (folder / SETTINGS).exists():
        _replace(folder / SETTINGS, json.dumps(mine, indent=2) + "\n")
        return
    others = read_settings(folder)
    if names := [name for name in differing(mine, others) if not name.startswith("about.")]:
        raise UserError(
            f"{folder} holds an evaluation with other settings ({', '.join(names)}); name another folder, or remove it"
        )


def _read(path: Path) -> Iterator[Sample]:
    """Samples of a file. What is no whole line (a kill, another process at work) is not there yet."""
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            yield Sample(**{name: row[name] for name in _FIELDS})
        except (ValueError, KeyError, TypeError):
            continue


def _keep_whole(path: Path, per_question: int) -> None:
    """Drop half a line and half a question that a kill left behind."""
    if path.exists():
        kept = [own for own in by_question(list(_read(path))).values() if len(own) == per_question]
        _replace(path, "".join(_line(sample) for own in kept for sample in own))


def _append(path: Path, samples: Sequence[Sample]) -> None:
    with disk(path), open(path, "a", encoding="ascii") as file:
        file.write("".join(map(_line, samples)))
        file.flush()
        os.fsync(file.fileno())


def _line(sample: Sample) -> str:
    return dump_line(dataclasses.asdict(sample))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with disk(path):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
