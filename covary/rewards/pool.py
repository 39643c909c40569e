"""Graders in processes of their own, which may hang, crash or eat memory without harm to the run.

A completion is untrusted text, and some scorers evaluate it. A worker is a plain subprocess (not
`multiprocessing`, which would import the user's main script again) with one item in flight, and
this side keeps the clock: a worker that is late or dies is killed with its process group and
replaced, and only its item is unscorable. This and the worker's guard are against accidents; they
are no sandbox against code that means harm.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from covary.rewards.functions import FunctionFile
from covary.rewards.types import Grade, Graded, Grader, as_graded, error_line
from covary.types import RunError

HEADER = struct.Struct("!qQ")  # of a request: index of the item or LOAD, bytes that follow
LOAD = -1
LOAD_DEADLINE = 120.0  # seconds to start Python and import a grader, on a busy machine
LONGEST_EXTRACT = 2000  # characters of an extracted answer that come back
_LONGEST_ANSWER = 1 << 20  # bytes
_LONGEST_WAIT = 0.2  # seconds, after which a run looks whether it is to end

PoolTask = Grader | FunctionFile
Item = tuple[str, str | None, dict[str, Any]]  # completion, answer, columns


@dataclass(frozen=True)
class Job:
    """What a worker is told before its first item: the task, seconds an item, bytes of memory."""

    task: PoolTask
    deadline: float
    memory: int


class Pool:
    """A few worker processes, started when first needed; usable from any thread, one run at a time.

    Attributes:
        workers: how many processes.
        deadline: seconds that one item may take; loading the grader is not charged to it.
        memory: bytes that a worker may allocate beyond what the loaded grader takes. Beyond that
            an allocation raises MemoryError in the item at work (Linux only).
    """

    def __init__(self, workers: int = 2, deadline: float = 10.0, memory: int = 2 << 30) -> None:
        """Nothing is started yet."""
        self.workers = workers
        self.deadline = deadline
        self.memory = memory
        self._lock = threading.Lock()
        self._running: list[_Worker] = []
        self._ending = threading.Event()
        weakref.finalize(self, _end, self._running, self._running)

    def run(self, task: PoolTask, items: Sequence[Item]) -> list[Graded]:
        """Grade all items `(completion, answer, columns)`; one verdict each, in order."""
        with self._lock:
            _end(self._running, [worker for worker in self._running if worker.is_gone()])
            try:
                return self._run(Job(task, self.deadline, self.memory), items)
            finally:
                # After an interrupt, a late verdict must not be taken for another run's.
                _end(self._running, [worker for worker in self._running if worker.busy])

    def close(self) -> None:
        """End the processes. A later run starts new ones; one under way in another thread fails at once."""
        self._ending.set()
        with self._lock:
            _end(self._running, self._running)
            self._ending.clear()

    def _run(self, job: Job, items: Sequence[Item]) -> list[Graded]:
        verdicts: list[Graded | None] = [None] * len(items)
        waiting = deque(range(len(items)))
        seats = min(self.workers, len(items))  # one fewer for every process that fails to load the task
        while waiting or any(worker.busy for worker in self._running):
            if self._ending.is_set():
                raise RunError("grading was ended before it was done")
            while waiting and len(self._running) < seats:
                self._running.append(_Worker())
            for worker in self._running:
                if worker.busy or not waiting:
                    continue
                if worker.job != job:
                    worker.ask(LOAD, job, LOAD_DEADLINE)
                    continue
                index = waiting.popleft()
                try:
                    worker.ask(index, items[index], job.deadline)
                except Exception as error:  # the columns cannot be pickled
                    verdicts[index] = Graded(None, error_line(error))
            busy = [worker for worker in self._running if worker.busy]
            _wait(busy)
            for worker in busy:
                index = worker.index
                verdict = worker.verdict()
                if index is None or verdict is None:
                    continue
                if index != LOAD:
                    verdicts[index] = verdict
                elif verdict.error is None:
                    worker.job = job
                else:
                    seats -= 1
                    if not worker.ended:
                        worker.end()
                    if seats == 0:
                        failed = Graded(None, f"the grader could not be loaded: {verdict.error}")
                        while waiting:
                            verdicts[waiting.popleft()] = failed
                if worker.ended:
                    self._running.remove(worker)
        return [verdict for verdict in verdicts if verdict is not None]


class _Worker:
    """This side of one process: what was asked, what has arrived, when it is due.

    Attributes:
        job: what it has loaded.
        index: of the item at work (or LOAD); None while it has nothing to do.
        due: when its verdict has to be there (`time.monotonic`).
        ended: whether the process is gone and the pipes are closed.
    """

    def __init__(self) -> None:
        self._answers, writer = os.pipe()
        # Same modules as here, but the working directory does not come first (`-P`): files there
        # may be called like a module. A session of its own, so that its children die with it.
        paths = (os.path.abspath(path) for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "covary.rewards.worker", str(writer)],
            stdin=subprocess.PIPE,
            stdout=2,
            bufsize=0,
            pass_fds=(writer,),
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        os.close(writer)
        assert self._process.stdin is not None
        self._requests = self._process.stdin.fileno()
        os.set_blocking(self._answers, False)
        os.set_blocking(self._requests, False)
        self._outgoing = memoryview(b"")
        self._incoming = b""
        self.due = math.inf
        self._deadline = math.inf
        self.job: Job | None = None
        self.index: int | None = None
        self.ended = False

    @property
    def busy(self) -> bool:
        return self.index is not None

    def is_gone(self) -> bool:
        """Whether an idle process has died (or talks without being asked, which is no better)."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._answers, 1)
            return True
        return False

    def ask(self, index: int, payload: object, deadline: float) -> None:
        """Ask for a verdict within `deadline` seconds; `verdict` moves the bytes, so no blocking."""
        data = pickle.dumps(payload)
        self._outgoing = memoryview(HEADER.pack(index, len(data)) + data)
        self._deadline = deadline
        self.due = time.monotonic() + deadline
        self.index = index

    def verdict(self) -> Graded | None:
        """Move what bytes can be moved. The verdict, if it is there or if there will be none."""
        try:
            verdict = self._exchange()
        except (BrokenPipeError, EOFError):
            return Graded(None, f"the grader's process died ({self.end()})")
        except ValueError as error:
            self.end()
            return Graded(None, f"the grader's process sent nonsense ({error_line(error)})")
        if verdict is None and time.monotonic() >= self.due:
            self.end()
            verdict = Graded(None, f"no verdict within {self._deadline:g} s")
        return verdict

    def register(self, poll: select.poll) -> None:
        poll.register(self._answers, select.POLLIN)
        if self._outgoing:
            poll.register(self._requests, select.POLLOUT)

    def end(self) -> str:
        """Kill the process and its children; say how the process ended."""
        # Not reaped yet, so the number of the group is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._answers)
        self.index, self.ended = None, True
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _exchange(self) -> Graded | None:
        if self._outgoing:
            with contextlib.suppress(BlockingIOError):
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._answers, _LONGEST_ANSWER)
            if not data:
                raise EOFError
            self._incoming += data
        if len(self._incoming) >= _LONGEST_ANSWER:
            raise ValueError("an endless answer")
        line, newline, rest = self._incoming.partition(b"\n")
        if not newline:
            return None
        self._incoming = rest
        answer = json.loads(line)
        if not isinstance(answer, dict) or answer.get("index") != self.index:
            raise ValueError(f"not the verdict on item {self.index}")
        self.index = None
        if answer.get("spent"):
            self.end()
        error, grade = answer.get("error"), answer.get("grade")
        if error is not None:
            return Graded(None, str(error))
        graded = as_graded(answer.get("value"))
        return replace(graded, grade=Grade(*grade)) if grade else graded


def _wait(busy: list[_Worker]) -> None:
    """Return when a pipe is ready, a deadline has passed, or it is time to see whether the run goes on."""
    poll = select.poll()
    for worker in busy:
        worker.register(poll)
    seconds = min((worker.due for worker in busy), default=0.0) - time.monotonic()
    poll.poll(math.ceil(min(max(seconds, 0), _LONGEST_WAIT) * 1000))


def _end(running: list[_Worker], workers: list[_Worker]) -> None:
    for worker in list(workers):
        worker.end()
        running.remove(worker)
