"""Rows of any table -> Examples: a prompt column, perhaps an answer, perhaps completions; the rest goes to rewards.

The formats are those of the ecosystem, as they are: a prompt of text or chat messages; given completions beside it
(`completion`), or a preference (`chosen`, `rejected`), or both prompt and completion in one conversation (`messages`)
or in the common beginning of a preference. A row is read when it is drawn; all are read once at the start, to check
them and to keep training and test apart.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np

from covary.rewards import Grader
from covary.seeding import derive_seed
from covary.tasks.tables import Row, Table
from covary.tasks.task import ExtractorName, Task, chat_messages, check_examples, check_sizes, question_key
from covary.types import Example, Message, Prompt, UserError

_ROLES = ("system", "user", "assistant", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Rows:
    """What the families of tables have in common: which columns mean what, the prompt's form, and the split.

    Attributes:
        path: training rows.
        test_path: test rows.
        prompt: column with the prompt: text, or chat messages `[{role, content}, ...]`.
        answer: column with the reference answer: text, number, true/false, a list of these, or null. By default
            `answer`, where the rows have such a column.
        completion: column with given completions for methods that learn from data: a text, an
            assistant message, or a list of them, one per completion. By default `completion`, likewise.
        rewards: column with the rewards of those completions: a number or a list.
        chosen: column with the preferred completion of a pair, reward 1: text, an assistant message, or a
            conversation that starts with the prompt. By default `chosen`, likewise.
        rejected: column with the other one, reward 0. By default `rejected`, likewise.
        grader: what compares a completion with the answer.
        extract: how the answer is read from a completion before that.
        tolerance: relative difference that `numeric`, and decimals in `math` and `answer_tags`, may have; a column
            `tolerance` of a row goes first. None: the grader's own.
        filter: column -> what it has to be, one value or several, or `{not: ...}` what it must not be. Other rows, of
            test too, are left out unread. None: all rows.
        train: at most so many training rows (drawn by seed, kept in their order); all by default.
        test: without test rows of their own, number of questions held out of the training rows (none by
            default); with them, at most so many.
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
    grader: Literal["exact", "numeric", "math", "multiple_choice", "answer_tags"] = "math"
    extract: ExtractorName = "none"
    tolerance: float | None = None
    filter: dict[str, Any] | None = None
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
        for column, wanted in (self.filter or {}).items():
            if isinstance(wanted, dict) and set(wanted) != {"not"}:
                raise UserError(
                    f"filter.{column}: takes a value, a list of them, or {{not: ...}}, got {_shown(wanted)}"
                )
        if (self.chosen is None) != (self.rejected is None) or (
            self.chosen is not None and self.completion is not None
        ):
            raise UserError("chosen: goes together with rejected, and without completion and rewards")
        if self.rewards is not None and self.completion is None:
            raise UserError("rewards: names the rewards of given completions, so completion is needed too")
        if self.tolerance is not None and self.grader in ("exact", "multiple_choice"):
            raise UserError(f"tolerance: would be ignored, {self.grader} compares no numbers")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise UserError(f"tolerance: must be a relative difference, at least 0 and below 1, got {self.tolerance:g}")
        for name in ("instruction", "examples", "system"):
            if self.raw and getattr(self, name) is not None:
                raise UserError(f"{name}: has no place in a raw prompt; write it into the file or set raw: false")

    def tables(self) -> tuple[Table, Table | None]:
        """Training rows, and test rows where they are apart: what a family knows."""
        raise NotImplementedError(f"{type(self).__name__} has no tables")

    def title(self, table: Table) -> str:
        """The task's name in metrics."""
        return table.name

    def load(self) -> Task:
        """Read and check every row, and split them.

        Raises:
            UserError: a file, a row or a column is not as described (file and row are named), or
                the split leaves no rows.
        """
        notes: list[str] = []
        table, test_table = self.tables()
        pool = self._examples(table, learn=True)
        if test_table is None:
            held_out = pool.questions[self._held_out(pool)]
            test = pool.take(np.isin(pool.questions, held_out) & pool.first_of_question())
        else:
            test = self._examples(test_table, learn=False)
            held_out = test.questions
            test = self._at_most(self.test, test, "test", notes)
        train = pool.take(~np.isin(pool.questions, held_out))
        dropped = len(pool) - len(train) - (len(test) if test_table is None else 0)
        if dropped:
            notes.append(f"dropped {dropped} training rows whose question occurs in test")
        if not len(train) and self.train != 0:
            raise UserError(
                f"{self.path}: no training rows are left once questions that occur in test are dropped "
                "(train: 0 asks for none)"
            )
        train = self._at_most(self.train, train, "train", notes)
        if not len(train) and not len(test):
            raise UserError("task: train and test leave no rows at all")
        graded = train.answered or test.answered
        if not graded:
            notes.append("no row has an answer, so nothing grades completions but a `reward` of the recipe")
        return Task(
            name=self.title(table),
            train=train,
            test=test,
            grader=Grader(self.grader, self.extract, self.tolerance) if graded else None,
            notes=notes,
        )

    def _held_out(self, pool: Examples) -> np.ndarray:
        """Positions of `self.test` rows of distinct questions."""
        distinct = np.flatnonzero(pool.first_of_question())
        wanted = self.test or 0
        if wanted > len(distinct):
            raise UserError(f"{self.path}: has {len(distinct)} distinct questions, too few to hold out test: {wanted}")
        chosen = random.Random(derive_seed(self.seed, "hold out")).sample(range(len(distinct)), wanted)
        return distinct[sorted(chosen)]

    def _at_most(self, limit: int | None, examples: Examples, split: str, notes: list[str]) -> Examples:
        if limit is None:
            return examples
        if limit > len(examples):
            notes.append(f"{split}: {limit} rows were asked for, {len(examples)} are there")
            return examples
        indices = random.Random(derive_seed(self.seed, "limit", split)).sample(range(len(examples)), limit)
        return examples.take(np.array(sorted(indices), dtype=np.int64))

    def _examples(self, table: Table, learn: bool) -> Examples:
        """All rows of a table, checked. Only rows to learn from must have the columns `completion` and `rewards`."""
        if not len(table):
            raise UserError(f"{table.source}: holds no rows")
        present: set[str] = set()
        while True:
            examples = self._checked(table, Form(self, self._columns(present, learn)), present)
            if examples is not None:
                return examples

    def _checked(self, table: Table, form: Form, present: set[str]) -> Examples | None:
        """Every row read once. None where one has a column of a usual name that `present` lacked: it is added."""
        questions = np.zeros(len(table), np.uint64)
        ids = np.zeros(len(table), np.uint64)
        own_ids = True
        answered = np.zeros(len(table), bool)
        kept = np.zeros(len(table), bool)
        for index, row in enumerate(table):
            if not self._wanted(row, table.where(index)):
                continue
            kept[index] = True
            if not (self._watched & row.keys()) <= present:
                present |= self._watched & row.keys()
                return None
            example = form.example(row, "", table.where(index))
            questions[index] = _hash(question_key(example.prompt))
            answered[index] = example.answer is not None
            own_ids = own_ids and isinstance(row.get("id"), str | int)
            ids[index] = _hash(str(row["id"])) if own_ids else 0
        if not kept.any():
            raise UserError(f"{table.source}: filter leaves none of {len(table)} rows")
        own_ids = own_ids and len(np.unique(ids[kept])) == kept.sum()
        everything = Examples(table, replace(form, own_ids=own_ids), np.arange(len(table)), questions, answered)
        return everything.take(kept)

    def _wanted(self, row: Row, where: str) -> bool:
        """Whether the row passes the filter."""
        for column, wanted in (self.filter or {}).items():
            value = _column(row, column, f"{where}, filter")
            negated = isinstance(wanted, dict)
            named = wanted["not"] if negated else wanted
            if (value in (named if isinstance(named, list) else [named])) == negated:
                return False
        return True

    @cached_property
    def _watched(self) -> set[str]:
        """Names of columns whose presence decides how rows are read."""
        return {"prompt", "answer", "completion", "chosen", "rejected", "messages"} | (
            {self.completion, self.chosen} - {None}
        )

    def _columns(self, present: set[str], learn: bool) -> Columns:
        """The columns that are read: those that are named, and of the usual names those that the rows have."""
        answer = self.answer or ("answer" if "answer" in present else None)
        named = self.completion or self.chosen
        if named is not None:
            if not (learn or named in present):
                return Columns(answer)
            return Columns(answer, self.completion, self.rewards, self.chosen, self.rejected, strict=True)
        if {"chosen", "rejected"} <= present:
            return Columns(answer, chosen="chosen", rejected="rejected")
        if "completion" in present:
            return Columns(answer, completion="completion")
        if "messages" in present and "prompt" not in present and self.prompt == "prompt":
            return Columns(answer, messages="messages")
        return Columns(answer)


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read, None where there is none.

    `strict`: completions were named, so every row has them; those of the usual names may be missing or of another
    kind, and the row then has none.
    """

    answer: str | None = None
    completion: str | None = None
    rewards: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    messages: str | None = None
    strict: bool = False


@dataclass(frozen=True)
class Form:
    """How a row becomes an Example: the one place where formats are told apart.

    Attributes:
        rows: the settings.
        columns: what is read.
        own_ids: the column `id` tells every row apart.
    """

    rows: Rows
    columns: Columns
    own_ids: bool = False

    def example(self, row: Row, id: str, where: str) -> Example:
        """The row as an Example. Every column but the prompt and given completions stays in `columns`.

        Raises:
            UserError: a column is missing or not what it should be; the message starts with `where`.
        """
        columns = self.columns
        prompt, given = self._prompt_and_given(row, where)
        completions = rewards = None
        if given is not None:
            try:
                completions, rewards = self._completions(row, given, where)
            except UserError:
                if columns.strict:
                    raise
        answer = None
        if columns.answer is not None:
            answer = _answer(_column(row, columns.answer, where), f"{where}, column {columns.answer!r}")
        taken = {
            self.rows.prompt,
            columns.completion,
            columns.rewards,
            columns.chosen,
            columns.rejected,
            columns.messages,
        }
        return Example(
            id=str(row["id"]) if self.own_ids else id,
            prompt=self._formed(prompt, f"{where}, column {columns.messages or self.rows.prompt!r}"),
            answer=answer,
            completions=completions,
            rewards=rewards,
            columns={name: value for name, value in row.items() if name not in taken},
            given_prompt=prompt,
        )

    def _prompt_and_given(self, row: Row, where: str) -> tuple[Any, dict[str, Any] | None]:
        """The prompt as the data have it, and the given completions by column."""
        columns = self.columns
        if columns.messages is not None:
            messages = _column(row, columns.messages, where)
            if isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
                return messages[:-1], {columns.messages: messages[-1]}
            return messages, None
        if columns.chosen is not None and columns.rejected is not None:
            if columns.strict or {columns.chosen, columns.rejected} <= row.keys():
                pair = [_column(row, name, where) for name in (columns.chosen, columns.rejected)]
                prompt, chosen, rejected = _without_prompt(row.get(self.rows.prompt), *pair)
                if prompt is not None:
                    return prompt, {columns.chosen: chosen, columns.rejected: rejected}
            return _column(row, self.rows.prompt, where), None
        prompt = _column(row, self.rows.prompt, where)
        if columns.completion is not None and (columns.strict or row.get(columns.completion) is not None):
            return prompt, {columns.completion: _column(row, columns.completion, where)}
        return prompt, None

    def _completions(self, row: Row, given: dict[str, Any], where: str) -> tuple[list[str], list[float | None] | None]:
        texts = [_completions(value, f"{where}, column {name!r}") for name, value in given.items()]
        if len(texts) == 2:
            return [texts[0][-1], texts[1][-1]], [1.0, 0.0]
        if (name := self.columns.rewards) is not None:
            return texts[0], _rewards(_column(row, name, where), len(texts[0]), f"{where}, column {name!r}")
        return texts[0], None

    def _formed(self, value: Any, where: str) -> Prompt:
        """The prompt as the model is to see it."""
        rows = self.rows
        if isinstance(value, str):
            _check_text(value, where)
            if rows.raw:
                return value
            return chat_messages(value, instruction=rows.instruction, examples=rows.examples, system=rows.system)
        if rows.raw:
            raise UserError(f"{where}: raw takes text prompts, this is {type(value).__name__}")
        *before, question = _messages(value, where)
        own_system = before[:1] if before and before[0]["role"] == "system" else []
        if own_system and rows.system is not None:
            raise UserError(f"{where}: the prompt has a system message of its own, so the system setting cannot apply")
        form = chat_messages(
            question["content"], instruction=rows.instruction, examples=rows.examples, system=rows.system
        )
        # Worked examples stand before the conversation, after whichever system message there is.
        return [*own_system, *form[:-1], *before[len(own_system) :], form[-1]]


class Examples(Sequence[Example]):
    """Some rows of a table as Examples, each made when it is asked for; 17 bytes a row stay in memory.

    Attributes:
        questions: a hash of each row's question.
        answered: whether any row has an answer.
    """

    def __init__(
        self, table: Table, form: Form, indices: np.ndarray, questions: np.ndarray, answered: np.ndarray
    ) -> None:
        self._table, self._form, self._indices = table, form, indices  # ascending
        self.questions = questions
        self._answered = answered
        self.answered = bool(answered.any())

    def take(self, chosen: np.ndarray) -> Examples:
        """The rows at those positions (ascending), or where a mask is true."""
        parts = (self._indices[chosen], self.questions[chosen], self._answered[chosen])
        return Examples(self._table, self._form, *parts)

    def first_of_question(self) -> np.ndarray:
        """Mask of the first row of each question."""
        mask = np.zeros(len(self), bool)
        mask[np.unique(self.questions, return_index=True)[1]] = True
        return mask

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, position: int) -> Example: ...
    @overload
    def __getitem__(self, position: slice) -> Examples: ...
    def __getitem__(self, position: int | slice) -> Example | Examples:
        if isinstance(position, slice):
            return self.take(np.arange(len(self))[position])
        index = int(self._indices[position])
        return self._made(index, self._table.row(index))

    def __iter__(self) -> Iterator[Example]:
        wanted = iter(self._indices.tolist())
        following = next(wanted, None)
        if following is None:
            return
        for index, row in enumerate(self._table):
            if index == following:
                yield self._made(index, row)
                following = next(wanted, None)
                if following is None:
                    return

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_same, self, other))

    def _made(self, index: int, row: Row) -> Example:
        return self._form.example(row, self._table.id(index), self._table.where(index))


def _same(a: object, b: object) -> bool:
    return a == b


def _hash(text: str) -> int:
    """64 bits: among a million questions two that differ are taken for one with probability 3e-8."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _column(row: Row, name: str, where: str) -> Any:
    if name not in row:
        raise UserError(f"{where}: no column {name!r}; it has {', '.join(row) or 'none'}")
    return row[name]


def _role(message: Any) -> str | None:
    return message.get("role") if isinstance(message, dict) else None


def _without_prompt(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected), the prompt cut off two completions that start with it.

    A prompt of its own holds where it has the completions' form: a text prompt beside conversations that start with
    the user's turn repeats what they hold. Without either the prompt is what both have in common.
    """
    conversations = isinstance(chosen, list) and isinstance(rejected, list)
    whole = conversations and bool(chosen) and _role(chosen[0]) not in (None, "assistant")
    if prompt is not None and not (isinstance(prompt, str) and whole):
        return prompt, chosen, rejected
    if not (conversations or (isinstance(chosen, str) and isinstance(rejected, str))):
        return None, chosen, rejected
    differences = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    common = next(differences, min(len(chosen), len(rejected)))
    if conversations:
        # Two conversations may be the same to the end; their last turns are the completions all the same.
        common = min(common, len(chosen) - 1, len(rejected) - 1)
    elif 0 < common < max(len(chosen), len(rejected)) and chosen[common - 1] == " ":
        common -= 1  # the space belongs to the completion: " blue" and " green" are whole words
    return (chosen[:common] or None), chosen[common:], rejected[common:]


def _messages(value: Any, where: str) -> list[Message]:
    """Chat messages that end with the user's turn."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: takes text or a list of chat messages, not {_shown(value)}")
    messages = [_message(message, where) for message in value]
    if messages[-1]["role"] != "user":
        raise UserError(f"{where}: the last message has to be the user's, it is of role {messages[-1]['role']!r}")
    return messages


def _message(value: Any, where: str) -> Message:
    # A column of structs has every key that some message has, null in the others.
    message = {k: v for k, v in value.items() if v is not None or k == "content"} if isinstance(value, dict) else {}
    if set(message) != {"role", "content"}:
        raise UserError(f"{where}: a chat message has the keys role and content, this one is {_shown(value)}")
    if message["role"] not in _ROLES:
        raise UserError(f"{where}: role {message['role']!r} is none of {', '.join(_ROLES)}")
    _check_text(message["content"], where)
    return message


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{where}: takes text, not {_shown(value)}")
    if not value.strip():
        raise UserError(f"{where}: is empty")
    _check_whole(value, where)


def _check_whole(text: str, where: str) -> None:
    if _SURROGATE.search(text):
        raise UserError(f"{where}: holds half of a surrogate pair, which no tokenizer can read")


def _answer(value: Any, where: str) -> str | None:
    """The text of a reference answer, as people write it: whole numbers without a point, a list with commas."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        return format(value.normalize(), "f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, list) and value:
        items = [_answer(item, where) for item in value]
        if None not in items:
            return ", ".join(map(str, items))
    raise UserError(f"{where}: an answer is text, a number, true, false, a list of these, or null, not {_shown(value)}")


def _completions(value: Any, where: str) -> list[str]:
    completions = []
    for item in value if isinstance(value, list) else [value]:
        if _role(item) == "assistant" and set(item) >= {"content"}:
            item = _message(item, where)["content"] if item["content"] else item["content"]
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
