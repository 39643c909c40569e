"""Your own JSON Lines files: a prompt column, perhaps an answer, perhaps completions; the rest goes to rewards."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from covary.jsonlines import read_jsonl
from covary.rewards import Grader
from covary.seeding import derive_seed
from covary.tasks.task import ExtractorName, Task, chat_messages, check_examples, check_sizes, question_key
from covary.types import Example, Message, Prompt, UserError

_DEFAULT_ANSWER = "answer"
_ROLES = ("system", "user", "assistant", "tool")
_SPLIT_NAME = re.compile(r"(train|test|dev|valid|validation|eval|data)([-_.]?\d+)?", re.IGNORECASE)

_Rows = list[tuple[int, dict[str, Any]]]  # physical line, row


@dataclass(frozen=True)
class Jsonl:
    """Rows of JSON Lines files.

    Attributes:
        path: file of training rows.
        test_path: file of test rows.
        prompt: column with the prompt: text, or chat messages `[{role, content}, ...]`.
        answer: column with the reference answer: text, number, true/false or null. By default
            `answer`, in files that have such a column.
        completion: column with given completions for methods that learn from data: a text, an
            assistant message, or a list of them, one per completion.
        rewards: column with the rewards of those completions: a number or a list.
        chosen: column with the preferred completion of a pair (text or assistant message), reward 1.
        rejected: column with the other one, reward 0.
        grader: what compares a completion with the answer.
        extract: how the answer is read from a completion before that.
        train: at most so many training rows (drawn by seed, kept in file order); all by default.
        test: without `test_path`, number of questions held out of `path` (none by default); with
            it, at most so many of its rows.
        seed: of these choices.
        instruction: text before the question (the last user message).
        examples: worked examples, `{question, answer}`, shown as earlier turns.
        system: system message.
        template: prompt template, shipped or a path (`covary.prompts`); None: the algorithm's own.
        raw: give text prompts to the model as they are, without chat template (base models).
    """

    path: str
    test_path: str | None = None
    prompt: str = "prompt"
    answer: str | None = None
    completion: str | None = None
    rewards: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    grader: Literal["exact", "math"] = "math"
    extract: ExtractorName = "none"
    train: int | None = None
    test: int | None = None
    seed: int = 0
    instruction: str | None = None
    examples: list[dict[str, str]] | None = None
    system: str | None = None
    template: str | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        check_examples(self.examples)
        check_sizes(train=self.train, test=self.test)
        if (self.chosen is None) != (self.rejected is None) or (
            self.chosen is not None and self.completion is not None
        ):
            raise UserError("chosen: goes together with rejected, and without completion and rewards")
        if self.rewards is not None and self.completion is None:
            raise UserError("rewards: names the rewards of given completions, so completion is needed too")
        for name in ("instruction", "examples", "system"):
            if self.raw and getattr(self, name) is not None:
                raise UserError(f"{name}: has no place in a raw prompt; write it into the file or set raw: false")

    def load(self) -> Task:
        """Read the files and split the rows.

        Raises:
            UserError: a file, a line or a column is not as described (file and line are named), or
                the split leaves no rows.
        """
        notes: list[str] = []
        pool = self._read(Path(self.path).expanduser(), learn=True)
        if self.test_path is None:
            held_out = self._hold_out(pool)
            test = list(held_out.values())
        else:
            test = self._read(Path(self.test_path).expanduser(), learn=False)
            held_out = {question_key(example.prompt): example for example in test}
            test = self._at_most(self.test, test, "test", notes)
        train = [example for example in pool if question_key(example.prompt) not in held_out]
        dropped = len(pool) - len(train) - (len(test) if self.test_path is None else 0)
        if dropped:
            notes.append(f"dropped {dropped} training rows whose question occurs in test")
        if not train and self.train != 0:
            raise UserError(
                f"{self.path}: no training rows are left once questions that occur in test are dropped "
                "(train: 0 asks for none)"
            )
        train = self._at_most(self.train, train, "train", notes)
        if not train and not test:
            raise UserError("task: train and test leave no rows at all")
        graded = any(example.answer is not None for example in (*train, *test))
        if not graded:
            notes.append("no row has an answer, so nothing grades completions but a `reward` of the recipe")
        return Task(
            name=_short_name(Path(self.path).expanduser()),
            train=train,
            test=test,
            grader=Grader(self.grader, self.extract) if graded else None,
            notes=notes,
        )

    def _hold_out(self, pool: list[Example]) -> dict[str, Example]:
        """`self.test` rows of distinct questions by question, in file order."""
        distinct: dict[str, Example] = {}
        for example in pool:
            distinct.setdefault(question_key(example.prompt), example)
        wanted = self.test or 0
        if wanted > len(distinct):
            raise UserError(f"{self.path}: has {len(distinct)} distinct questions, too few to hold out test: {wanted}")
        chosen = set(random.Random(derive_seed(self.seed, "hold out")).sample(list(distinct), wanted))
        return {question: example for question, example in distinct.items() if question in chosen}

    def _at_most(self, limit: int | None, examples: list[Example], split: str, notes: list[str]) -> list[Example]:
        if limit is None:
            return examples
        if limit > len(examples):
            notes.append(f"{split}: {limit} rows were asked for, {len(examples)} are there")
            return examples
        indices = random.Random(derive_seed(self.seed, "limit", split)).sample(range(len(examples)), limit)
        return [examples[i] for i in sorted(indices)]

    def _read(self, path: Path, learn: bool) -> list[Example]:
        """Rows of one file. Only files to learn from must have the columns `completion` and `rewards`."""
        rows = list(read_jsonl(path))
        if not rows:
            raise UserError(f"{path}: holds no rows")
        answer = self.answer or (_DEFAULT_ANSWER if any(_DEFAULT_ANSWER in row for _, row in rows) else None)
        given = self.completion or self.chosen
        offline = given is not None and (learn or any(given in row for _, row in rows))
        offline_columns = (self.completion, self.rewards, self.chosen, self.rejected) if offline else ()
        names = [self.prompt, answer, *offline_columns]
        used = [name for name in names if name is not None]
        return [
            self._example(row, id, f"{path}, line {line}", used, answer, offline)
            for (line, row), id in zip(rows, _ids(rows, path), strict=True)
        ]

    def _example(
        self, row: dict[str, Any], id: str, where: str, used: list[str], answer: str | None, offline: bool
    ) -> Example:
        for name in used:
            if name not in row:
                raise UserError(f"{where}: no column {name!r}; it has {', '.join(row) or 'none'}")
        completions = rewards = None
        if offline and self.completion is not None:
            completions = _completions(row[self.completion], f"{where}, column {self.completion!r}")
            if self.rewards is not None:
                rewards = _rewards(row[self.rewards], len(completions), f"{where}, column {self.rewards!r}")
        if offline and self.chosen is not None and self.rejected is not None:
            pair = [_completions(row[name], f"{where}, column {name!r}") for name in (self.chosen, self.rejected)]
            completions, rewards = [pair[0][-1], pair[1][-1]], [1.0, 0.0]
        return Example(
            id=id,
            prompt=self._prompt(row[self.prompt], f"{where}, column {self.prompt!r}"),
            answer=None if answer is None else _answer(row[answer], f"{where}, column {answer!r}"),
            completions=completions,
            rewards=rewards,
            columns={name: value for name, value in row.items() if name not in used},
        )

    def _prompt(self, value: Any, where: str) -> Prompt:
        if isinstance(value, str):
            _check_text(value, where)
            if self.raw:
                return value
            return chat_messages(value, instruction=self.instruction, examples=self.examples, system=self.system)
        if self.raw:
            raise UserError(f"{where}: raw takes text prompts, this is {type(value).__name__}")
        *before, question = _messages(value, where)
        own_system = before[:1] if before and before[0]["role"] == "system" else []
        if own_system and self.system is not None:
            raise UserError(f"{where}: the prompt has a system message of its own, so the system setting cannot apply")
        form = chat_messages(
            question["content"], instruction=self.instruction, examples=self.examples, system=self.system
        )
        # Worked examples stand before the conversation, after whichever system message there is.
        return [*own_system, *form[:-1], *before[len(own_system) :], form[-1]]


def _messages(value: Any, where: str) -> list[Message]:
    """Chat messages that end with the user's turn."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: takes text or a list of chat messages, not {_shown(value)}")
    for message in value:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UserError(f"{where}: a chat message has the keys role and content, this one is {_shown(message)}")
        if message["role"] not in _ROLES:
            raise UserError(f"{where}: role {message['role']!r} is none of {', '.join(_ROLES)}")
        _check_text(message["content"], where)
    if value[-1]["role"] != "user":
        hint = "; given answers belong into a column of their own (task.completion)"
        raise UserError(
            f"{where}: the last message has to be the user's, it is of role {value[-1]['role']!r}"
            + (hint if value[-1]["role"] == "assistant" else "")
        )
    return value


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{where}: takes text, not {_shown(value)}")
    if not value.strip():
        raise UserError(f"{where}: is empty")
    _check_whole(value, where)


def _check_whole(text: str, where: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where}: holds half of a surrogate pair, which no tokenizer can read")


def _answer(value: Any, where: str) -> str | None:
    """The text of a reference answer. A whole number is written without a point, as people write it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else str(value)
    raise UserError(f"{where}: an answer is text, a number, true, false or null, not {_shown(value)}")


def _completions(value: Any, where: str) -> list[str]:
    completions = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and set(item) == {"role", "content"} and item["role"] == "assistant":
            item = item["content"]
        if not isinstance(item, str):
            raise UserError(f"{where}: a completion is text or an assistant message, not {_shown(item)}")
        _check_whole(item, where)
        completions.append(item)
    if not completions:
        raise UserError(f"{where}: holds no completion")
    return completions


def _rewards(value: Any, count: int, where: str) -> list[float | None]:
    values = value if isinstance(value, list) else [value]
    if len(values) != count:
        raise UserError(f"{where}: {len(values)} rewards for {count} completions")
    for item in values:
        if item is not None and not isinstance(item, int | float):
            raise UserError(f"{where}: a reward is a number or null, not {_shown(item)}")
    # Not finite means the same as null: this completion could not be scored.
    return [float(item) if item is not None and abs(item) <= sys.float_info.max else None for item in values]


def _ids(rows: _Rows, path: Path) -> Iterable[str]:
    """The `id` column where it tells every row of the file apart, else file stem and line."""
    ids = [str(row["id"]) for _, row in rows if isinstance(row.get("id"), str | int)]
    if len(set(ids)) == len(rows):
        return ids
    return [f"{path.stem}/{line}" for line, _ in rows]


def _short_name(path: Path) -> str:
    """The file's stem, or the folder's name where the stem only says which split it is."""
    folder = path.resolve().parent.name
    return folder if folder and _SPLIT_NAME.fullmatch(path.stem) else path.stem


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
