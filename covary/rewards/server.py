"""A chat model behind an OpenAI-compatible server: bounded concurrency, retries, one line for what went wrong."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from covary.rewards.judge import Reply

TRIES = 5
FIRST_WAIT = 0.5  # seconds before the second try; doubled each time
LONGEST_WAIT = 30.0
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # states of a server that may be over in a moment
_LONGEST_REASON = 200


@dataclass(frozen=True)
class ChatServer:
    """Asks `POST url/chat/completions`, greedy.

    Attributes:
        url: up to and with the version, such as http://localhost:8000/v1.
        model: the server's name of the model.
        max_tokens: of a reply, at most.
        concurrency: requests under way at a time.
        timeout: seconds a request.
        key: sent as bearer token, where there is one.
    """

    url: str
    model: str
    max_tokens: int
    concurrency: int = 8
    timeout: float = 60.0
    key: str | None = None

    def __call__(self, messages: Sequence[str]) -> list[Reply]:
        """One reply for each user message, in order. A server that is gone is not waited for by every message."""
        gone = threading.Event()
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="judge") as threads:
            return list(threads.map(lambda message: self._ask(message, gone), messages))

    def _ask(self, message: str, gone: threading.Event) -> Reply:
        reason, wait = "", FIRST_WAIT
        for number in range(TRIES):
            # After one message has found nobody through all its tries, the others try once.
            if number and gone.wait(wait):
                return Reply(None, reason)
            try:
                return _content(self._post(message))
            except urllib.error.HTTPError as error:
                reason = f"{self.url}: HTTP {error.code} {_reason(error)}"
                if error.code not in _PASSING:
                    return Reply(None, reason)
                wait = _asked_to_wait(error) or 2 * wait
            except (OSError, HTTPException) as error:  # no connection, a time-out, a reply cut short
                reason = f"{self.url}: {_one_line(getattr(error, 'reason', error))}"
                wait = 2 * wait
            except ValueError as error:
                return Reply(None, f"{self.url}: no reply of an OpenAI-compatible server ({_one_line(error)})")
            wait = min(wait, LONGEST_WAIT)
        gone.set()
        return Reply(None, f"{reason} (tried {TRIES} times)")

    def _post(self, message: str) -> Any:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode("ascii"), headers
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            return json.loads(response.read())


def _content(body: Any) -> Reply:
    """The text of the first choice.

    Raises:
        ValueError: there is none.
    """
    try:
        content = body["choices"][0]["message"]["content"]
    except (LookupError, TypeError) as error:
        raise ValueError("no choices[0].message.content") from error
    return (
        Reply(content) if isinstance(content, str) else Reply(None, "the reply has no text; is max_tokens too small?")
    )


def _asked_to_wait(error: urllib.error.HTTPError) -> float | None:
    """Seconds that the server asks for; a date counts as none."""
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except ValueError:
        return None


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says, of its JSON error the message."""
    text = error.read().decode("utf-8", "replace")
    try:
        found = json.loads(text)["error"]
        text = found["message"] if isinstance(found, dict) else found
    except (ValueError, LookupError, TypeError):
        pass
    return _one_line(text or error.reason)


def _one_line(value: object) -> str:
    text = " ".join(str(value).split()) or type(value).__name__
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."
