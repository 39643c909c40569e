"""The other end of `pool.py`: a process that grades one item after the other until its stdin closes.

    python -m covary.rewards.worker ANSWERS_FD

Requests come through stdin, pickled; verdicts leave through a pipe of their own, one JSON line
each, because the process that reads them must not unpickle what a process wrote that read a
model's text. Whatever a reward function prints goes to stderr.
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
from typing import Any, BinaryIO

from covary.rewards import EXTRACTORS, GRADERS
from covary.rewards.functions import FunctionFile, GradeItem, item_form
from covary.rewards.pool import HEADER, LOAD, Load
from covary.rewards.types import Graded, Grader, as_graded, error_line


def main() -> None:
    """Serve requests until there are no more."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tasks: dict[Grader | FunctionFile, GradeItem] = {}
    load: Load | None = None
    while (request := _read(requests)) is not None:
        index, payload = request
        verdict: dict[str, Any] = {"index": index}
        try:
            if index == LOAD:
                load = pickle.loads(payload)
                

def _read(requests: BinaryIO) -> tuple[int, bytes] | None:
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    index, length = HEADER.unpack(header)
    return index, requests.read(length)
