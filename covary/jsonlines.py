"""JSON Lines as bytes really are: lines end at newline characters only, and one bad character loses nothing."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from covary.types import UserError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""Yield (physical line number from 1, row) for every line that is not blank, one line at a time.

    A byte-order mark is skipped, a missing final newline and ``\r\n`` are accepted, and other line
    separators (U+2028) may stand inside strings.

    Raises:
        UserError: the file cannot be read, or a line is not UTF-8, not JSON or not an object; the
            message names file and line.
    """
    for number, _, line in _lines(path):
        yield number, parse_row(line, f"{path}, line {number}")


def line_offsets(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows of a file are, without reading what they say.

    Returns:
        physical line numbers (N,), and byte offsets (N + 1,): row i lies from offset i up to offset i + 1.

    Raises:
        UserError: the file cannot be read.
    """
    numbers, starts = array("q"), array("q")
    end = 0
    for number, start, line in _lines(path):
        numbers.append(number)
        starts.append(start)
        end = start + len(line)
    starts.append(end)
    return np.frombuffer(numbers, np.int64), np.frombuffer(starts, np.int64)


def _lines(path: str | Path) -> Iterator[tuple[int, int, bytes]]:
    """(physical line number, byte offset, line) of every line that is not blank; without the byte-order mark."""
    try:
        # A binary file splits at \n alone; a text file would also need newline="\n" and decodes in
        # blocks, which loses the number of an undecodable line.
        file = open(path, "rb")  # noqa: SIM115 (closed by the `with` below; only opening is tried)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        offset = 0
        for number, line in enumerate(file, start=1):
            start, offset = offset, offset + len(line)
            if number == 1 and line.startswith(_BYTE_ORDER_MARK):
                start, line = start + len(_BYTE_ORDER_MARK), line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                yield number, start, line


def dump_line(row: Any) -> str:
    r"""One line of JSON with its newline, in ASCII: a lone surrogate is written as ``\udxxx`` and read back."""
    return json.dumps(row, ensure_ascii=True) + "\n"


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """The object of one line.

    Raises:
        UserError: the line is not UTF-8, not JSON or not an object; the message starts with `where`.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        bad = line[error.start]
        raise UserError(f"{where}: not valid UTF-8 (byte 0x{bad:02x} at column {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # an integer of too many digits, too deep a nesting
        raise UserError(f"{where}: not readable as JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object but {_JSON_NAMES[type(row)]}")
    return row


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
