"""A JSON request to a server, tried again where that may help; several at a time."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from typing import Any, TypeVar

from covary.types import RunError, UserError

_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
_LONGEST_PAUSE = 30.0  # seconds
_Asked, _Answer = TypeVar("_Asked"), TypeVar("_Answer")


def post_json(
    url: str, body: Mapping[str, Any], *, key: str | None, timeout: float, attempts: int, pause: float = 1.0
) -> dict[str, Any]:
    """The server's answer to `body`, an object.

    Refused connections, time-outs, answers that break off and the statuses that ask for patience are tried again, with pauses that double; any
    other refusal is the request's own fault.

    Args:
        url: where to.
        body: what.
        key: bearer token.
        timeout: seconds without a byte from the server.
        attempts: in all.
        pause: seconds before the second attempt; a `Retry-After` of the server goes before it.

    Raises:
        UserError: the server refuses the request; its own words are quoted.
        RunError: there was no answer at the last attempt either, or none that is a JSON object.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode("utf-8"), headers)
    for attempt in range(1, attempts + 1):
        wait = min(pause * 2 ** (attempt - 1), _LONGEST_PAUSE)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return _object(response.read(), url)
        except urllib.error.HTTPError as error:
            said = _said(error)
            if error.code not in _AGAIN:
                raise UserError(f"{url} refused the request: {error.code} {said}") from error
            trouble = f"{error.code} {said}"
            asked = error.headers.get("Retry-After", "")
            wait = min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else wait
        except (OSError, HTTPException, ValueError) as error:
            # Time-outs, URLError and http.client's resets among them; ValueError is a redirection to no address.
            trouble = str(getattr(error, "reason", None) or error) or type(error).__name__
        if attempt < attempts:
            time.sleep(wait)
    raise RunError(f"{url} gave no answer in {attempts} attempts; the last: {trouble}")


def ask_all(
    ask: Callable[[_Asked], _Answer],
    asked: Sequence[_Asked],
    concurrency: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[_Answer]:
    """What `ask` answers to each, in order, at most `concurrency` at a time. The first failure ends it.

    Args:
        ask: one request.
        asked: what each request is about.
        concurrency: requests under way at a time.
        on_progress: called with (answers so far, answers in all).
    """
    with ThreadPoolExecutor(concurrency, thread_name_prefix="ask") as threads:
        futures = [threads.submit(ask, one) for one in asked]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if on_progress is not None:
                    on_progress(done, len(futures))
        except BaseException:  # the first failure, or Ctrl-C: what has not started never does
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def read_key(variable: str, what: str) -> str:
    """A server's key, from the environment. Blanks around it are not part of it: files of secrets end with a line break.

    Args:
        variable: its name.
        what: the setting that names it, for messages.

    Raises:
        UserError: it is not set, or holds what no request can carry.
    """
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"{what}: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{what}: the environment variable {variable} holds characters that no key has")
    return key


def _object(data: bytes, url: str) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{url} answered with something that is no JSON ({data[:80]!r})") from error
    if not isinstance(answer, dict):
        raise RunError(f"{url} answered with something that is no JSON object ({data[:80]!r})")
    return answer


def _said(error: urllib.error.HTTPError) -> str:
    """The server's message, one line; OpenAI's servers wrap it in `error` or `detail`."""
    try:
        text = error.read(10_000).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        answer = json.loads(text)
        inner = answer.get("error") or answer.get("detail") or answer.get("message") or answer
        text = inner.get("message", str(inner)) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(text.split())[:300] or str(error.reason)
