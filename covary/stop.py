"""Ctrl-C and SIGTERM while a run goes on: the first asks it to stop after its step, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody asked the run to stop.

    Attributes:
        signal: who asked; None while nobody has.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def asked(self) -> bool:
        """Whether the loop shall end after the step that it is in."""
        return self.signal is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals for a while. Other threads than the main one cannot, and an ignored signal stays ignored."""
        before = {s: signal.getsignal(s) for s in _SIGNALS}
        if threading.current_thread() is not threading.main_thread():
            before = {}
        # None is a handler that was not installed from Python: it could not be put back.
        before = {s: handler for s, handler in before.items() if handler not in (signal.SIG_IGN, None)}

        def give_back() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def ask(number: int, frame: FrameType | None) -> None:
            give_back()  # so the second one acts as if nobody had listened
            self.signal = signal.Signals(number)
            # Not through sys.stderr or the screen: this may have interrupted either while it was writing.
            with suppress(OSError):
                os.write(
                    2, f"\n{self.signal.name}: the run stops after this step and saves it; again: at once\n".encode()
                )

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            give_back()

    def leave(self) -> None:
        """End the program as the signal would have: KeyboardInterrupt (exit code 130), or SystemExit(143)."""
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)
