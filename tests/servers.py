"""A fake server that speaks the completions API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # clients ask with many threads at once; more than wait here are reset


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that says what `answer` says to a request (its body, `path` and `key`); its address, and what it saw."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = body | {"path": self.path, "key": self.headers.get("Authorization")}
            seen.append(asked)
            status, said = answer(asked)
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def choice(text: str, reason: str = "stop", **more: Any) -> Answer:
    return 200, {"choices": [{"text": text, "finish_reason": reason, **more}]}
