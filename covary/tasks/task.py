"""What every task family returns, and the pieces they share: prompt form and question identity."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from covary.rewards import Grader
from covary.types import Example, Message, Prompt, UserError

ExtractorName = Literal["none", "last_number", "boxed", "answer_tag", "last_line"]

_SPLIT_NAME = re.compile(r"(train|test|dev|valid|validation|eval|data)([-_.]?\d+)?", re.IGNORECASE)


@dataclass
class Task:
    """Rows to train on, rows to test on, and what grades them. The two splits share no question text.

    Attributes:
        name: short; metrics are named `eval/<name>/accuracy`.
        train: training rows, in an order that depends on the task's seed only.
        test: held-out rows.
        grader: None where no row has an answer: then the recipe has to give a `reward`.
        notes: plain sentences for the user, such as how many rows were dropped and why.
    """

    name: str
    train: Sequence[Example]
    test: Sequence[Example]
    grader: Grader | None
    notes: list[str] = field(default_factory=list)


def chat_messages(
    question: str,
    *,
    instruction: str | None = None,
    examples: Sequence[dict[str, str]] | None = None,
    system: str | None = None,
) -> list[Message]:
    """The prompt as chat: system message, worked examples as earlier turns, then the question.

    The instruction stands before the question of every user turn, so that the worked examples show
    the very form in which the question comes.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    for example in examples or ():
        messages.append({"role": "user", "content": _instructed(example["question"], instruction)})
        messages.append({"role": "assistant", "content": example["answer"]})
    messages.append({"role": "user", "content": _instructed(question, instruction)})
    return messages


def check_examples(examples: Sequence[dict[str, str]] | None) -> None:
    """Worked examples are `{question: ..., answer: ...}` and nothing else.

    Raises:
        UserError: an example has other keys.
    """
    for number, example in enumerate(examples or (), start=1):
        if set(example) != {"question", "answer"}:
            keys = ", ".join(map(str, example)) or "none"
            raise UserError(f"examples, item {number}: needs the keys question and answer, has {keys}")


def check_sizes(**sizes: int | None) -> None:
    """Numbers of rows are not negative.

    Raises:
        UserError: naming the size that is.
    """
    for name, size in sizes.items():
        if size is not None and size < 0:
            raise UserError(f"{name}: a number of rows is 0 or more, not {size}")


def question_key(prompt: Prompt) -> str:
    """What makes two prompts the same question: their text, whatever its white space and system message."""
    if isinstance(prompt, str):
        return " ".join(prompt.split())
    turns = (f"{m['role']}: {m['content']}" for m in prompt if m["role"] != "system")
    return "\n".join(" ".join(turn.split()) for turn in turns)


def file_title(path: Path) -> str:
    """What a task of that file is called: its stem, or the folder's name where the stem only says which split it is."""
    path = path.expanduser().resolve()
    return path.parent.name if path.parent.name and _SPLIT_NAME.fullmatch(path.stem) else path.stem


def _instructed(question: str, instruction: str | None) -> str:
    return question if instruction is None else f"{instruction}\n{question}"
