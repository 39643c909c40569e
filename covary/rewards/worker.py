"""The other end of `pool.py`: a process that grades one item after another until its stdin closes.

    python -m covary.rewards.worker ANSWERS_FD

Requests come through stdin, pickled. Verdicts leave through a pipe of their own as JSON lines: this
process reads what a model wrote, so nobody may unpickle what it says. Whatever a reward function
prints goes to stderr, and its stdin is empty.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from covary.rewards import grade_extracted
from covary.rewards.functions import FunctionFile, GradeItem, item_form
from covary.rewards.pool import HEADER, LOAD, LOAD_DEADLINE, LONGEST_EXTRACT, Job, PoolTask
from covary.rewards.types import Grade, Graded, Grader, as_graded, error_line

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EFFECT_FAMILIES = ("socket.", "shutil.", "subprocess.", "ctypes.", "pty.")
_EFFECTS = {
    *("os.chmod", "os.chown", "os.link", "os.symlink", "os.mkdir", "os.rename", "os.rmdir"),
    *("os.remove", "os.truncate", "os.utime", "os.putenv", "os.unsetenv"),
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"),
    *("os.kill", "os.killpg", "signal.pthread_kill"),
}


def main() -> None:
    """Serve requests until there are no more."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _outlive_the_signals_of_the_run()
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (open for as long as the process lives)

    guard = _Guard()
    sys.addaudithook(guard)
    grade: GradeItem = _nothing_loaded
    deadline = LOAD_DEADLINE
    spent = False  # what a MemoryError leaves behind is anyone's guess
    while not spent and (request := _read(requests)) is not None:
        index, payload = request
        # The parent keeps the clock. Should it be killed meanwhile, this ends a hung item, even
        # one that hangs in C and never gives up the interpreter's lock.
        allowed = LOAD_DEADLINE if index == LOAD else deadline
        faulthandler.dump_traceback_later(2 * allowed + 1, exit=True, file=nowhere)
        verdict, said = Graded(None), None
        try:
            if index == LOAD:
                job: Job = pickle.loads(payload)
                deadline = job.deadline
                guard.on = False
                grade = _load(job.task)
                guard.on = isinstance(job.task, Grader)  # what the user wrote may do what it likes
                _limit_memory(job.memory)
            else:
                said = grade(*pickle.loads(payload))
                verdict = as_graded(said.value if isinstance(said, Grade) else said)
        except BaseException as error:  # SystemExit too: no item takes the process with it
            spent = isinstance(error, MemoryError)
            verdict = Graded(None, error_line(error))
        faulthandler.cancel_dump_traceback_later()
        answer = {"index": index, "value": verdict.value, "error": verdict.error, "spent": spent}
        if isinstance(said, Grade):
            # Cut, since a model may state megabytes.
            answer["grade"] = [said.verdict, said.extracted and said.extracted[:LONGEST_EXTRACT], said.credit]
        _write(answers, json.dumps(answer).encode() + b"\n")


def _outlive_the_signals_of_the_run() -> None:
    """Grade on where every process of a job is asked to stop: the run finishes its step first, and then ends this.

    A handler that does nothing, where "ignore" would be inherited by the programs that a reward starts.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in numbers])


class _Guard:
    """An audit hook: while on, nothing may be written, started, signalled or sent.

    Graders only compute, but some of Reasoning Gym's evaluate what the model wrote. This stops text
    that happens to be code; code that means harm knows ways around it.
    """

    on = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise PermissionError for an event with effects outside of the process."""
        if not self.on:
            return
        writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITING
        if writes or event in _EFFECTS or event.startswith(_EFFECT_FAMILIES):
            raise PermissionError(f"a grader may not do this: {event}")


def _load(task: PoolTask) -> GradeItem:
    if isinstance(task, FunctionFile):
        return item_form(task.load())
    grade = grade_extracted(task)
    with contextlib.suppress(Exception):
        # The first formula imports libraries and builds grammars: not an item's time. Plain numbers need neither.
        grade(r"\boxed{x}", r"\sqrt{2} + x", {})
    return grade


def _nothing_loaded(completion: str, answer: str | None, columns: dict[str, Any]) -> object:
    raise RuntimeError("no grader is loaded")


def _limit_memory(extra: int) -> None:
    """Let an allocation of more than `extra` bytes beyond today's fail with MemoryError (Linux)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + extra
        resource.setrlimit(
            resource.RLIMIT_AS,
            (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
        )


def _read(requests: BinaryIO) -> tuple[int, bytes] | None:
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    index, length = HEADER.unpack(header)
    return index, requests.read(length)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
