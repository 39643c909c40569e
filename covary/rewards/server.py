"""A chat model behind an OpenAI-compatible server: bounded concurrency, and a reason where there is no reply."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from covary.http import post_json
from covary.rewards.judge import Reply
from covary.types import RunError, UserError


@dataclass(frozen=True)
class ChatServer:
    """Asks `POST url/chat/completions`, greedy. One message that has no reply does not keep the others from theirs.

    Attributes:
        url: up to and with the version, such as http://localhost:8000/v1.
        model: the server's name of the model.
        max_tokens: of a reply, at most.
        concurrency: requests under way at a time.
        timeout: seconds a request.
        key: sent as bearer token, where there is one.
        attempts: per message, while the server answers at all.
        pause: seconds before the second attempt; doubled each time.
    """

    url: str
    model: str
    max_tokens: int
    concurrency: int = 8
    timeout: float = 60.0
    key: str | None = field(default=None, repr=False)
    attempts: int = 5
    pause: float = 1.0

    def __call__(self, messages: Sequence[str]) -> list[Reply]:
        """One reply for each user message, in order."""
        gone = threading.Event()
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="judge") as threads:
            return list(threads.map(lambda message: self._ask(message, gone), messages))

    def _ask(self, message: str, gone: threading.Event) -> Reply:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        try:
            answer = post_json(
                f"{self.url.rstrip('/')}/chat/completions",
                body,
                key=self.key,
                timeout=self.timeout,
                attempts=1 if gone.is_set() else self.attempts,
                pause=self.pause,
            )
        except UserError as error:  # refused, perhaps this message alone: it may be too long
            return Reply(None, str(error))
        except RunError as error:
            gone.set()  # it was tried often enough: thousands of other messages try once
            return Reply(None, str(error) or type(error).__name__)
        return _content(answer, self.url)


def _content(answer: dict[str, Any], url: str) -> Reply:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        return Reply(None, f"{url}: the answer has no choices[0].message.content, so it is of no chat model")
    return Reply(content) if isinstance(content, str) else Reply(None, f"{url}: a reply without text; raise max_tokens")
