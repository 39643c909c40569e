"""Reading and writing JSON Lines: encodings, physical line numbers, bad lines (cases D01 and D02)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from covary.jsonlines import dump_line, read_jsonl
from covary.types import UserError

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(content: bytes) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        return path

    return to_file


def test_byte_order_mark_is_not_part_of_the_first_key(write: Write) -> None:
    path = write(b'\xef\xbb\xbf{"question":"3+4","answer":"7"}\n{"question":"5+1","answer":"6"}\n')
    rows = list(read_jsonl(path))
    assert [number for number, _ in rows] == [1, 2]
    assert list(rows[0][1]) == ["question", "answer"]


def test_missing_final_newline_keeps_the_row(write: Write) -> None:
    assert list(read_jsonl(write(b'{"q":"3+4"}\n{"q":"5+1"}'))) == [(1, {"q": "3+4"}), (2, {"q": "5+1"})]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_other_line_separators_stay_inside_strings(write: Write, separator: str) -> None:
    line = json.dumps({"q": f"x{separator}y"}, ensure_ascii=False) + "\n"
    assert list(read_jsonl(write(line.encode()))) == [(1, {"q": f"x{separator}y"})]


def test_carriage_returns_before_newlines(write: Write) -> None:
    assert list(read_jsonl(write(b'{"q":1}\r\n\r\n{"q":2}\r\n'))) == [(1, {"q": 1}), (3, {"q": 2})]


def test_a_repeated_key_takes_its_last_value(write: Write) -> None:
    assert list(read_jsonl(write(b'{"q":1,"q":2}\n'))) == [(1, {"q": 2})]


def test_blank_lines_are_skipped_and_counted_when_a_later_line_is_broken(write: Write) -> None:
    path = write(b'{"q":"first","answer":"1"}\n\n{"q":"second","answer":"2"\n{"q":"third","answer":"3"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl, line 3: not valid JSON \(.*column \d+\)"):
        list(read_jsonl(path))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"[4, 5]", "an array"),
        (b'"text"', "a string"),
        (b"12", "a number"),
        (b"1.5", "a number"),
        (b"true", "true or false"),
        (b"null", "null"),
    ],
)
def test_a_row_that_is_no_object_says_so(write: Write, line: bytes, what: str) -> None:
    with pytest.raises(UserError, match=f"line 1: not a JSON object but {what}"):
        list(read_jsonl(write(line + b"\n")))


def test_undecodable_byte_names_line_and_column(write: Write) -> None:
    with pytest.raises(UserError, match=r"line 2: not valid UTF-8 \(byte 0xe9 at column 7\)"):
        list(read_jsonl(write(b'{"q":1}\n{"q":"\xe9"}\n')))


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"q":' + b"9" * 5000 + b"}"])
def test_json_beyond_the_parser_is_the_users_mistake_too(write: Write, line: bytes) -> None:
    with pytest.raises(UserError, match="line 1: not readable as JSON"):
        list(read_jsonl(write(line)))


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_unreadable_file_names_its_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(read_jsonl(tmp_path / name))


def test_rows_are_read_one_line_at_a_time(write: Write) -> None:
    rows = read_jsonl(write(b'{"q":1}\nbroken\n'))
    assert next(rows) == (1, {"q": 1})  # before the broken line is looked at


def test_half_a_surrogate_pair_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = [{"text": "sound"}, {"text": "left\ud83dright"}, {"text": "also\u2028sound"}]
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(map(dump_line, samples))
    assert path.read_bytes().isascii()
    assert [row for _, row in read_jsonl(path)] == samples
