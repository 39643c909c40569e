"""One request to a server: what is tried again, and what no request can be made of."""

from __future__ import annotations

import socket
import threading

import pytest

from covary.http import post_json, read_key
from covary.settings import check_address
from covary.types import RunError, UserError


def answer_each(server: socket.socket, answers: list[bytes]) -> threading.Thread:
    """One connection per answer. The request is read to its end first: closing before that resets the connection, and
    the answer may be lost."""

    def serve() -> None:
        for answer in answers:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as request:
                length = 0
                while (line := request.readline().strip().lower()) != b"":
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                request.read(length)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    answers = [b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{", b"garbage\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n{}"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = answer_each(server, answers)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert post_json(url, {}, key=None, timeout=5, attempts=3, pause=0.01) == {}
        thread.join(5)


def test_answers_that_always_break_off_end_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer_each(server, [b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{"] * 2)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RunError, match=r"no answer in 2 attempts; the last: IncompleteRead"):
            post_json(url, {}, key=None, timeout=5, attempts=2, pause=0.01)


@pytest.mark.parametrize(
    "url", ["http://localhost:8000/v1", "https://a.b/v1/", "http://[::1]:8000/v1", "http://h%20x/"]
)
def test_addresses(url: str) -> None:
    check_address(url)


@pytest.mark.parametrize(
    "url",
    ["localhost:1/v1", "http://", "http://:8000/v1", "http://[::1/v1", "http://local host/v1", "http://h/v1\n", "http://höst/é",
     "http://h:99999/v1", "http://h:x/v1", "http://h:0/v1", "ftp://h/v1", ""],
)  # fmt: skip
def test_what_no_request_can_be_sent_to_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url: takes an address such as http://localhost:8000/v1, got"):
        check_address(url)


def test_a_key_is_what_the_variable_holds_without_its_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret\n")
    assert read_key("SOME_KEY", "teacher.api_key") == "secret"


@pytest.mark.parametrize("held", [None, "", " \n"])
def test_a_key_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, held: str | None) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if held is not None:
        monkeypatch.setenv("SOME_KEY", held)
    with pytest.raises(UserError, match=r"^teacher.api_key: the environment variable SOME_KEY is not set$"):
        read_key("SOME_KEY", "teacher.api_key")


@pytest.mark.parametrize("held", ["sécret", "two\nlines"])
def test_a_key_that_no_request_can_carry_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setenv("SOME_KEY", held)
    with pytest.raises(UserError, match="SOME_KEY holds characters that no key has") as refused:
        read_key("SOME_KEY", "teacher.api_key")
    assert held not in str(refused.value)


NESTED = b'{"a":' * 100_000


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n" + NESTED, RunError, "something that is no JSON"),
        (b"HTTP/1.0 400 Bad\r\n\r\n" + NESTED, UserError, "refused the request: 400"),
        (b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", UserError, "refused the request: 400 Bad"),
        (b"HTTP/1.0 500 Bad\r\n\r\n" + NESTED, RunError, "no answer in 1 attempts; the last: 500"),
        (
            b"HTTP/1.0 302 Found\r\nLocation: http://[::1/x\r\n\r\n",
            RunError,
            "no answer in 1 attempts; the last: Invalid IPv6",
        ),
    ],
)
def test_answers_made_to_break_the_reader_end_in_one_line(answer: bytes, error: type, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer_each(server, [answer])
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(error, match=message):
            post_json(url, {}, key=None, timeout=5, attempts=1, pause=0.01)
