"""One process at a time on a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from covary.types import RunError, UserError

LOCK_FILE = "lock"


def is_locked(folder: Path, name: str = LOCK_FILE) -> bool:
    """Whether another process holds `folder`."""
    try:
        with open(folder / name, "r+", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None], name: str = LOCK_FILE) -> Iterator[None]:
    """Hold `folder` for this process.

    The operating system forgets the lock when the process ends, however it ends. It is a POSIX record lock, which a
    forked child does not inherit: a reward's children that outlive a killed run do not keep the folder. (Threads of
    one process are not kept apart.) The file stays: another process may have opened it to lock it.

    Args:
        folder: an existing run folder.
        say: told where the file system knows no locks.
        name: of the lock's file; processes that share a folder in parts lock one part each.

    Raises:
        UserError: another process holds it.
        RunError: the file cannot be opened.
    """
    path = folder / name
    try:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (closed below; its opening has an error of its own)
    except OSError as error:
        raise RunError(f"{path} could not be opened ({error.strerror or error})") from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise UserError(f"{folder} is in use by {holder}; stop that first, or wait for it") from error
            say(f"note: {path} cannot be locked here ({error.strerror}); start no second process on this folder")
        with suppress(OSError):  # who it is helps a person, and a full disk must not matter
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield
