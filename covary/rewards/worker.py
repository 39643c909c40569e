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
import sys
from pathlib import Path
from typing import BinaryIO

from covary.rewards import grade_extracted
from covary.rewards.functions import FunctionFile, GradeItem, item_form
from covary.rewards.pool import HEADER, LOAD, LOAD_DEADLINE, Job, PoolTask
from covary.rewards.types import Graded, as_graded, error_line


def main() -> None:
    """Serve requests until there are no more."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (open for as long as the process lives)

    grade: GradeItem = _nothing_loaded
    deadline = LOAD_DEADLINE
    spent = False  # what a MemoryError leaves behind is anyone's guess
    while not spent and (request := _read(requests)) is not None:
        index, payload = request
        # The parent keeps the clock. Should it be killed meanwhile, this ends a hung item, even
        # one that hangs in C and never gives up the interpreter's lock.
        faulthandler.dump_traceback_later(2 * deadline + 1, exit=True, file=nowhere)
        verdict = Graded(None)
        try:
            if index == LOAD:
                job: Job = pickle.loads(payload)
                deadline = job.deadline
                grade = _load(job.task)
                _limit_memory(job.memory)
            else:
                verdict = as_graded(grade(*pickle.loads(payload)))
        except BaseException as error:  # SystemExit too: no item takes the process with it
            spent = isinstance(error, MemoryError)
            verdict = Graded(None, error_line(error))
        faulthandler.cancel_dump_traceback_later()
        answer = {"index": index, "value": verdict.value, "error": verdict.error, "spent": spent}
        _write(answers, json.dumps(answer).encode() + b"\n")


def _load(task: PoolTask) -> GradeItem:
    if isinstance(task, FunctionFile):
        return item_form(task.load())
    grade = grade_extracted(task)
    with contextlib.suppress(Exception):
        grade(
            "1", "2", {}
        )  # the first call imports libraries and builds grammars: not an item's time
    return grade


def _nothing_loaded(completion: str, answer: str | None, columns: dict[str, object]) -> object:
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
