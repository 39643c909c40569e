"""The client of an OpenAI-compatible server, against one of our own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from covary.rewards.server import ChatServer

Answer = tuple[int, dict[str, str], Any]  # status, headers, body


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers request number i (from 0) with `answer(body, i)`; its address and what it got."""
    got: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(got)
                got.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
            status, headers, content = answer(body, number)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the screen."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def saying(text: str | None) -> Answer:
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_replies_come_in_order_and_requests_say_everything():
    with serving(lambda body, _: saying(body["messages"][0]["content"].upper())) as (url, got):
        replies = ChatServer(url + "/", "judge", 7, key="secret")(["a", "b \ud800", "c"])
    assert [reply.text for reply in replies] == ["A", "B \ud800", "C"]
    assert {(g["path"], g["key"], g["model"], g["max_tokens"], g["temperature"]) for g in got} == {
        ("/v1/chat/completions", "Bearer secret", "judge", 7, 0)
    }


def test_no_key_is_sent_where_none_is_set():
    with serving(lambda *_: saying("x")) as (url, got):
        ChatServer(url, "judge", 7, pause=0.01)(["a"])
    assert got[0]["key"] is None


def test_no_more_requests_than_allowed_are_under_way():
    now, most, lock = 0, 0, threading.Lock()

    def slow(body: dict[str, Any], number: int) -> Answer:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return saying("x")

    with serving(slow) as (url, got):
        ChatServer(url, "judge", 7, concurrency=3)(["a"] * 12)
    assert len(got) == 12
    assert most == 3


@pytest.mark.parametrize("failure", [(503, {}, "busy"), (429, {"Retry-After": "0"}, {}), (500, {}, b"\xff")])
def test_what_passes_is_tried_again(failure: Answer):
    with serving(lambda _, number: failure if number < 2 else saying("Correct")) as (url, got):
        (reply,) = ChatServer(url, "judge", 7, pause=0.01)(["a"])
    assert reply.text == "Correct"
    assert len(got) == 3


def test_a_mistake_is_told_at_once_with_the_servers_own_words():
    error = {"error": {"message": "The model `jugde`\ndoes not exist.", "code": 404}}
    with serving(lambda *_: (404, {}, error)) as (url, got):
        (reply,) = ChatServer(url, "jugde", 7, pause=0.01)(["a"])
    assert reply.error == f"{url}/chat/completions refused the request: 404 The model `jugde` does not exist."
    assert len(got) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "something that is no JSON"),
        ({"choices": []}, "no choices[0].message.content"),
        ({"choices": [{"message": {"content": None}}]}, "a reply without text; raise max_tokens"),
        ([1], "no JSON object"),
    ],
)
def test_a_reply_of_another_form_is_no_reply(content: Any, reason: str):
    with serving(lambda *_: (200, {}, content)) as (url, got):
        (reply,) = ChatServer(url, "judge", 7, pause=0.01)(["a"])
    assert reply.text is None
    assert reason in (reply.error or "")
    assert len(got) == 1


def test_a_late_reply_is_tried_again_and_told():
    with serving(lambda *_: (time.sleep(0.3), saying("late"))[1]) as (url, got):
        (reply,) = ChatServer(url, "judge", 7, timeout=0.05, attempts=3, pause=0.01)(["a"])
        deadline = time.monotonic() + 20
        while len(got) < 3 and time.monotonic() < deadline:  # on a busy machine the server reads them later
            time.sleep(0.01)
    assert "no answer in 3 attempts; the last: timed out" in (reply.error or "")
    assert len(got) == 3


def test_a_connection_that_is_cut_is_a_reason_of_that_message():
    def cut(body: dict[str, Any], number: int) -> Answer:
        return (200, {"Content-Length": "1000"}, b"{") if number == 0 else saying("Correct")

    with serving(cut) as (url, _):
        first, second = ChatServer(url, "judge", 7, concurrency=1, timeout=5, attempts=1)(["a", "b"])
    assert first.text is None
    assert first.error
    assert second.text == "Correct"


def test_a_server_that_is_gone_is_not_waited_for_by_every_message():
    with serving(lambda *_: saying("x")) as (url, _):
        pass
    start = time.monotonic()
    replies = ChatServer(url, "judge", 7, concurrency=2, attempts=3, pause=0.2)(["a"] * 200)
    assert time.monotonic() - start < 20  # each would wait for 0.6 s
    assert all("refused" in (reply.error or "") for reply in replies)
