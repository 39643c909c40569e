"""Reasoning Gym: questions drawn from procedural generators, one or a weighted mixture of several.

Test questions are drawn first and are distinct. Training questions come from a seed far away
(item i of seed s is item 0 of seed s + i, so near seeds repeat each other's items), a question that
test holds is dropped and another drawn. Training rows may repeat one another, as the generator
deals them: making them distinct would bend the mixture of easy and hard questions away from test's.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from covary.rewards import Grader
from covary.seeding import derive_seed
from covary.tasks.task import ExtractorName, Task, chat_messages, check_examples, check_sizes, question_key
from covary.types import Example, UserError

logger = logging.getLogger(__name__)

# Generators that iterate over a set of strings: their items change with Python's hash seed.
HASH_ORDERED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})

_CHUNK = 500  # generators build tables of their `size` (and word_ladder limits it): draw in chunks of it
_TRAIN_OFFSET = 2**31  # between the seeds of the two splits; sums stay below 2**32, numpy's largest seed
_MAX_USELESS = 1000  # draws in a row without a usable question: there are no more of them
_MAX_FAILURES = 100  # draws in a row that raise
_DRAW_SECONDS = 120.0  # for a single draw
_LOG_SECONDS = 10.0


@dataclass(frozen=True)
class ReasoningGym:
    """Tasks of Reasoning Gym, with their own scorers. The bare answer is each row's given completion (for SFT).

    Attributes:
        tasks: name of a Reasoning Gym task -> its parameters. `weight` among them is its share of
            the mixture (1 by default).
        train: number of training rows.
        test: number of test rows, distinct questions.
        seed: of the questions drawn and of their order.
        instruction: text before the question.
        examples: worked examples, `{question, answer}`, shown as earlier turns.
        system: system message.
        template: prompt template, shipped or a path (`covary.prompts`); None: the algorithm's own.
        extract: how the answer is read from a completion before it is scored.
    """

    tasks: dict[str, dict[str, Any] | None]
    train: int = 2000
    test: int = 200
    seed: int = 0
    instruction: str | None = None
    examples: list[dict[str, str]] | None = None
    system: str | None = None
    template: str | None = None
    extract: ExtractorName = "none"

    def __post_init__(self) -> None:
        check_examples(self.examples)
        check_sizes(train=self.train, test=self.test)
        if not self.tasks:
            raise UserError("tasks: name at least one Reasoning Gym task")
        if self.train + self.test == 0:
            raise UserError("train and test are both 0, so there is nothing to draw")
        for name, parameters in self.tasks.items():
            _check(name, parameters or {})

    def load(self) -> Task:
        """Draw the rows.

        Raises:
            UserError: a task has too few distinct questions, keeps failing or takes too long.
        """
        names = list(self.tasks)
        weights = [float((self.tasks[name] or {}).get("weight", 1)) for name in names]
        draws = [
            _Draws(name, self.tasks[name] or {}, self.seed, test, train)
            for name, test, train in zip(names, _shares(self.test, weights), _shares(self.train, weights), strict=True)
        ]
        # Every test question of the mixture is known before the first training row is drawn.
        held_out: set[str] = set()
        test = [self._example(*item) for draw in draws for item in draw.test_items(held_out)]
        train = [self._example(*item) for draw in draws for item in draw.train_items(held_out)]
        random.Random(derive_seed(self.seed, "order", "test")).shuffle(test)
        random.Random(derive_seed(self.seed, "order", "train")).shuffle(train)
        return Task(
            name=names[0] if len(names) == 1 else "reasoning_gym",
            train=train,
            test=test,
            grader=Grader("reasoning_gym", self.extract),
            notes=[note for draw in draws for note in draw.notes()],
        )

    def _example(self, id: str, name: str, entry: dict[str, Any]) -> Example:
        columns = {
            "metadata": entry["metadata"],
            "question": entry["question"],
            "task": name,
            "category": category_of(name),
        }
        if parameters := _settings(name, self.tasks[name] or {}):
            columns["parameters"] = parameters  # some scorers read them
        answer = None if entry["answer"] is None else str(entry["answer"])
        return Example(
            id=id,
            prompt=chat_messages(
                entry["question"],
                instruction=self.instruction,
                examples=self.examples,
                system=self.system,
            ),
            answer=answer,
            completions=None if answer is None else [answer],
            columns=columns,
        )


_Item = tuple[str, str, dict[str, Any]]  # id, task name, entry


@dataclass
class _Draws:
    """The draws of one Reasoning Gym task, and what became of them."""

    name: str
    parameters: dict[str, Any]
    seed: int
    test: int
    train: int
    draws: int = 0
    failed: int = 0
    dropped: int = 0
    test_questions: set[str] = field(default_factory=set)
    train_questions: set[str] = field(default_factory=set)

    def test_items(self, held_out: set[str]) -> list[_Item]:
        """Items of distinct questions that `held_out` lacks; it takes them up."""

        def accept(key: str) -> bool:
            if key in held_out:
                return False
            held_out.add(key)
            self.test_questions.add(key)
            return True

        return self._collect("test", self.test, accept)

    def train_items(self, held_out: set[str]) -> list[_Item]:
        """Items whose questions `held_out` lacks, with at least half as many questions as test has."""

        def accept(key: str) -> bool:
            if key in held_out:
                self.dropped += 1
                return False
            self.train_questions.add(key)
            return True

        items = self._collect("train", self.train, accept)
        # Fewer, and what is left to learn from is the remainder of a pool that test has used up.
        if 2 * len(self.train_questions) < min(self.train, self.test):
            raise self._too_few()
        return items

    def notes(self) -> list[str]:
        notes = []
        if self.dropped:
            notes.append(
                f"{self.name}: dropped {self.dropped} training rows whose question occurs in test "
                "and drew others in their place"
            )
        if len(self.train_questions) < self.train:
            notes.append(
                f"{self.name}: the {self.train} training rows hold {len(self.train_questions)} distinct questions"
            )
        if self.failed:
            notes.append(f"{self.name}: skipped {self.failed} draws that its generator failed on")
        if self.name in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            notes.append(
                f"{self.name}: its rows depend on Python's hash seed, set PYTHONHASHSEED=0 "
                "to get the same ones in every process"
            )
        return notes

    def _collect(self, split: Literal["train", "test"], count: int, accept: Callable[[str], bool]) -> list[_Item]:
        """The first `count` items whose question is accepted."""
        items: list[_Item] = []
        stream = self._stream(split)
        started = logged = time.monotonic()
        useless = 0
        while len(items) < count:
            item = next(stream)
            if accept(question_key(item[2]["question"])):
                items.append(item)
                useless = 0
            elif (useless := useless + 1) == _MAX_USELESS:
                raise self._too_few()
            now = time.monotonic()
            if now - logged > _LOG_SECONDS:
                logged = now
                logger.info("%s: drew %d of %d %s rows in %.0f s", self.name, len(items), count, split, now - started)
        return items

    def _stream(self, split: Literal["train", "test"]) -> Iterator[_Item]:
        """All items of a split, without end; draws that fail are skipped."""
        dataset_class, config_class = DATASETS[self.name]
        settings = _settings(self.name, self.parameters)
        # Some tasks have no reference answer: their own scorer checks the completion itself.
        needs_answer = dataset_class.score_answer is ProceduralDataset.score_answer
        base = derive_seed(self.seed, "reasoning_gym", self.name) % 2**30
        base += _TRAIN_OFFSET if split == "train" else 0
        dataset: ProceduralDataset | None = None
        failures = 0
        for index in itertools.count():
            offset = index % _CHUNK
            if offset == 0:
                dataset = None
            try:
                with _deadline(_DRAW_SECONDS):
                    if dataset is None:
                        dataset = dataset_class(config_class(**settings, seed=base + index - offset, size=_CHUNK))
                    entry = dataset[offset]
                    if entry["answer"] is None and needs_answer:
                        raise ValueError("the item has no answer")
            except _Overtime:
                raise UserError(
                    f"reasoning_gym task {self.name!r}: a single question took longer than "
                    f"{_DRAW_SECONDS:.0f} s to draw; choose easier parameters"
                ) from None
            except Exception as error:  # generators fail in their own ways, on some seeds only
                self.failed += 1
                failures += 1
                if failures == _MAX_FAILURES:
                    raise UserError(
                        f"reasoning_gym task {self.name!r}: {failures} draws in a row failed, "
                        f"the last one with {_one_line(error)}"
                    ) from error
                continue
            failures = 0
            self.draws += 1
            yield f"{self.name}/{split}/{index}", self.name, entry

    def _too_few(self) -> UserError:
        found = len(self.test_questions) + len(self.train_questions)
        return UserError(
            f"reasoning_gym task {self.name!r}: found only {found} distinct questions in {self.draws} draws, too few "
            f"for test: {self.test} and train: {self.train} that share none; ask for fewer test rows or widen its "
            "parameters"
        )


def category_of(name: str) -> str:
    """Reasoning Gym's own grouping of its tasks: the package that the generator lies in."""
    return DATASETS[name][0].__module__.split(".")[1]


def _check(name: str, parameters: dict[str, Any]) -> None:
    """Name, names of parameters, their plain types, and what the task itself says of their values."""
    if name not in DATASETS or name == "composite":
        nearest = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        raise UserError(f"tasks: {name!r} is not a Reasoning Gym task{hint}")
    _, config_class = DATASETS[name]
    where = f"tasks.{name}"
    fields = {f.name: f for f in dataclasses.fields(config_class) if f.name not in ("seed", "size")}
    for key, value in parameters.items():
        if key == "weight":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UserError(f"{where}.weight: takes a number above 0, not {value!r}")
        elif key in ("seed", "size"):
            raise UserError(f"{where}.{key}: not taken here; seed, train and test of the whole task decide it")
        elif key not in fields:
            valid = ", ".join([*fields, "weight"])
            raise UserError(f"{where}: unknown parameter {key!r}; valid: {valid}")
        elif (valid := _plain_types(fields[key])) and type(value) not in valid:
            names = " or ".join(sorted(t.__name__ for t in valid))
            raise UserError(f"{where}.{key}: takes {names}, not {value!r}")
    try:
        config = config_class(**_settings(name, parameters), seed=0, size=_CHUNK)
        if hasattr(config, "validate"):
            config.validate()
    except AssertionError as error:  # the tasks' convention; the message is made for people
        raise UserError(f"{where}: {' '.join(str(error).split()) or 'parameters do not go together'}") from error
    except Exception as error:  # a value of a type that the check itself cannot handle
        raise UserError(f"{where}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _plain_types(field: dataclasses.Field[Any]) -> set[type]:
    """What a plain field takes; empty for any other. Some defaults contradict their annotation: both count."""
    if field.type not in (int, float, bool, str):
        return set()
    types = {field.type, type(field.default)} & {int, float, bool, str}
    return types | {int} if float in types else types


def _settings(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the task's config class; YAML has no tuples, so a list becomes one where it is due."""
    _, config_class = DATASETS[name]
    tuples = {f.name for f in dataclasses.fields(config_class) if isinstance(f.default, tuple)}
    return {
        key: tuple(value) if key in tuples and isinstance(value, list) else value
        for key, value in parameters.items()
        if key != "weight"
    }


def _shares(total: int, weights: list[float]) -> list[int]:
    """`total` split in proportion to the weights, by largest remainder; ties go to the earlier one."""
    quotas = [total * weight / sum(weights) for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - quotas[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


class _Overtime(BaseException):
    """Not an Exception: generators have `except Exception: continue` in their own retry loops."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt the body after that many seconds, where a timer can (the main thread of a Unix process)."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise _Overtime

    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, previous_handler)
