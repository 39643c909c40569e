"""Completions by key, in memory and in a JSON Lines file that later runs read.

A line holds all completions of a key. Lines are appended whole; what a kill cut short is left out when the file is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from covary.types import Completion, Finish, RunError, UserError


class Store:
    """What is known of completions that never change.

    Attributes:
        path: of the file. None: nothing outlives the run.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        """Read the file, if there is one.

        Args:
            path: of the file; it is made when there is something to keep.
            say: where to tell of damaged lines.

        Raises:
            UserError: the file cannot be read.
        """
        self.path = path
        self._known: dict[str, list[Completion]] = {}
        self._begun = False
        damaged = 0
        for line in self._lines():
            try:
                row = json.loads(line)
                self._known[str(row["key"])] = [_completion(*entry) for entry in row["completions"]]
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged += 1
        if damaged:
            say(f"note: {path}: {damaged} damaged lines are left out, and sampled again where they are needed")

    def get(self, key: str) -> list[Completion]:
        """The completions of a key; none where it is not known."""
        return self._known.get(key, [])

    def add(self, completions: Mapping[str, list[Completion]]) -> None:
        """Keep completions by key, in place of those that a key had.

        Raises:
            RunError: the disk refuses them.
        """
        rows = {key: [[c.tokens, c.text, c.finish] for c in several] for key, several in completions.items()}
        # What comes back is what was kept, whether or not a file lies between.
        self._known |= {key: [_completion(*entry) for entry in entries] for key, entries in rows.items()}
        if self.path is None or not rows:
            return
        lines = "".join(json.dumps({"key": key, "completions": entries}) + "\n" for key, entries in rows.items())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:  # one write, so that lines of two runs do not mix
                file.write((lines if self._begun else "\n" + lines).encode("ascii"))  # ends a line that was cut short
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path} could not be written ({error.strerror or error})") from error
        self._begun = True

    def _lines(self) -> list[bytes]:
        if self.path is None or not self.path.exists():
            return []
        try:
            return [line for line in self.path.read_bytes().split(b"\n") if line.strip()]
        except OSError as error:
            raise UserError(f"teacher.cache: {self.path} cannot be read ({error.strerror or error})") from error


def _completion(tokens: Any, text: Any, finish: Any) -> Completion:
    if (
        not all(type(token) is int and 0 <= token < 2**31 for token in tokens)
        or not isinstance(text, str)
        or finish not in get_args(Finish)
    ):
        raise TypeError("no completion")
    return Completion(list(tokens), text, finish)
