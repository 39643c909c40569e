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

from covary.rewards import server as client
from covary.rewards.server import ChatServer

Answer = tuple[int, dict[str, str], Any]  # status, headers, body


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
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
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
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
        ChatServer(url, "judge", 7)(["a"])
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


@pytest.mark.parametrize("failure", [(503, {}, "busy"), (429, {"Retry-After": "0.01"}, {}), (500, {}, b"\xff")])
def test_what_passes_is_tried_again(failure: Answer):
    with serving(lambda _, number: failure if number < 2 else saying("Correct")) as (url, got):
        (reply,) = ChatServer(url, "judge", 7)(["a"])
    assert reply.text == "Correct"
    assert len(got) == 3


def test_a_mistake_is_told_at_once_with_the_servers_own_words():
    error = {"error": {"message": "The model `jugde`\ndoes not exist.", "code": 404}}
    with serving(lambda *_: (404, {}, error)) as (url, got):
        (reply,) = ChatServer(url, "jugde", 7)(["a"])
    assert reply.error == f"{url}: HTTP 404 The model `jugde` does not exist."
    assert len(got) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "no reply of an OpenAI-compatible server"),
        ({"choices": []}, "no choices"),
        ({"choices": [{"message": {"content": None}}]}, "is max_tokens too small"),
        ([1], "no choices"),
    ],
)
def test_a_reply_of_another_form_is_no_reply(content: Any, reason: str):
    with serving(lambda *_: (200, {}, content)) as (url, got):
        (reply,) = ChatServer(url, "judge", 7)(["a"])
    assert reply.text is None
    assert reason in (reply.error or "")
    assert len(got) == 1


def test_a_late_reply_is_tried_again_and_told():
    with serving(lambda *_: (time.sleep(0.3), saying("late"))[1]) as (url, got):
        (reply,) = ChatServer(url, "judge", 7, timeout=0.05)(["a"])
    assert "timed out (tried 5 times)" in (reply.error or "")
    assert len(got) == client.TRIES


def test_a_server_that_is_gone_is_not_waited_for_by_every_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.05)
    with serving(lambda *_: saying("x")) as (url, _):
        pass
    start = time.monotonic()
    replies = ChatServer(url, "judge", 7, concurrency=2)(["a"] * 200)
    assert time.monotonic() - start < 10  # one message alone waits 1.5 s
    assert all("refused" in (reply.error or "") for reply in replies)
