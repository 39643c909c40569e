"""Rewards that are Python functions: where they come from, and their two calling conventions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covary.objects import load_object
from covary.rewards.types import Graded, TokenIds, as_graded, error_line
from covary.types import Example, UserError

_Kind = inspect.Parameter

GradeItem = Callable[[str, str | None, dict[str, Any]], object]  # (completion, answer, columns)


@dataclass(frozen=True)
class FunctionFile:
    """A function named by the file that holds it, so that another process can load it too."""

    path: str
    name: str

    @classmethod
    def parse(cls, spec: str) -> FunctionFile:
        """Read "path/to/file.py:function"; a relative path starts at the working directory."""
        path, colon, name = spec.rpartition(":")
        if not (colon and path and name):
            raise UserError(f"reward {spec!r} names no function, write path/to/file.py:function")
        return cls(str(Path(path).expanduser().resolve()), name)

    def load(self) -> Callable[..., object]:
        """Execute the file and return the function; UserError says what is wrong with either."""
        function = load_object(f"{self.path}:{self.name}", "reward")
        if not callable(function):
            raise UserError(f"reward: {self.name!r} is not a function in {self.path}")
        return function


def is_batch_form(function: Callable[..., object]) -> bool:
    """Whether it takes all rows at once: it has a parameter named `completions` or `completion_ids`."""
    return not {"completions", "completion_ids"}.isdisjoint(_parameters(function))


def item_form(function: Callable[..., object]) -> GradeItem:
    """Adapt `(completion, answer, ...)` to be called with every column of a row.

    The first parameter gets the completion; the second, if it has no default and names no column,
    the answer, whatever its own name. Every other parameter gets the column, or `answer`, that it
    names; `**kwargs` gets all of them.
    """
    parameters = _parameters(function)
    first, second, *_ = [
        *_names(parameters, _Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD),
        "",
        "",
    ]
    named = _names(parameters, _Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)
    takes_all = bool(_names(parameters, _Kind.VAR_KEYWORD))
    second_is_answer = bool(second) and parameters[second].default is inspect.Parameter.empty

    def grade(completion: str, answer: str | None, columns: dict[str, Any]) -> object:
        row = {**columns, "answer": answer}
        if second_is_answer:
            row.setdefault(second, answer)
        wanted = {k: v for k, v in row.items() if k != first and (takes_all or k in named)}
        return function(completion, **wanted)

    return grade


def call_batch_form(
    function: Callable[..., object],
    examples: Sequence[Example],
    completions: Sequence[str],
    token_ids: TokenIds | None = None,
) -> list[Graded]:
    """Call `(prompts, completions, **columns) -> list` on all rows, with the parameters it takes.

    As in TRL, prompts and columns are what the data have, and a completion of a chat prompt is
    `[{"role": "assistant", "content": text}]`. A column that some rows lack is None there, and where
    the data have no column `answer` that name gives the reference answers. `completion_ids` are the
    tokens, where they are known. The function may be a coroutine. If it raises, or does not return a
    list of one reward a row, every row carries that error.
    """
    names = dict.fromkeys(name for example in examples for name in example.columns)
    prompts = [example.prompt if example.given_prompt is None else example.given_prompt for example in examples]
    available: dict[str, list[Any]] = {
        "answer": [example.answer for example in examples],
        **{name: [example.columns.get(name) for example in examples] for name in names},
        "prompts": prompts,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ],
    }
    if token_ids is not None:
        available["completion_ids"] = [list(ids) for ids in token_ids]
    parameters = _parameters(function)
    takes_all = bool(_names(parameters, _Kind.VAR_KEYWORD))
    try:
        returned = function(**{k: v for k, v in available.items() if takes_all or k in parameters})
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
    except (Exception, SystemExit) as error:  # sys.exit in a reward must not end the run silently
        return [Graded(None, error_line(error))] * len(examples)
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(returned, list | tuple):
        complaint = f"TypeError: returned {type(returned).__name__}, not a list"
    elif len(returned) != len(examples):
        complaint = f"ValueError: returned {len(returned)} rewards for {len(examples)} completions"
    else:
        return [as_graded(value) for value in returned]
    return [Graded(None, complaint)] * len(examples)


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {function!r}: its parameters cannot be read: {error}") from error


def _names(parameters: Mapping[str, inspect.Parameter], *kinds: inspect._ParameterKind) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]
