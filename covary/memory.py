"""What a process does with memory that nothing uses any more, while it trains."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Parameters of mallopt in malloc.h of the GNU C library.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4


@contextmanager
def memory_for_training(device: torch.device) -> Iterator[None]:
    """Within, a training loop on `device` neither looks for garbage in what was there before nor gives freed memory back.

    * Python's collector passes over what was loaded: a tenth of a small model's step.
    * On a CPU, what tensors free is kept for the tensors of the next pass. The GNU C library returns large blocks to the
      system, which fills every page with zeros when it is touched again: 4 % of an update of SmolLM2-135M
      (benchmarks/allocator.py), more in a run's first steps. The process holds its largest size until the loop ends;
      elsewhere than under that library this does nothing.
    """
    gc.collect()
    gc.freeze()
    library = ctypes.CDLL(None) if device.type == "cpu" and platform.libc_ver()[0] == "glibc" else None
    if library is not None:
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        gc.unfreeze()
        if library is not None:
            # To what the library itself moves on to when it meets large blocks.
            library.mallopt(_M_MMAP_MAX, 65536)
            library.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
            library.mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)
            library.malloc_trim(0)
