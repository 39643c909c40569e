"""What freed memory does while a loop trains (covary/memory.py)."""

import gc
import json
import platform
import subprocess
import sys

import pytest
import torch

from covary.memory import memory_for_training

GLIBC = platform.libc_ver()[0] == "glibc"
FAULTS = """
import json, resource, sys
import torch
from covary.memory import memory_for_training

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MB, in pages of 4 KB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

found = {"before": faults()}
with memory_for_training(torch.device(sys.argv[1])):
    for _ in range(4):  # the library's own caches of small remainders have to fill first
        faults()
    found["within"] = faults()
    held = resident()
found["returned"] = held - resident()
found["after"] = faults()
print(json.dumps(found))
"""


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_memory_that_a_cpu_frees_is_there_for_the_next_tensor_and_is_returned_in_the_end() -> None:
    found = json.loads(subprocess.run([sys.executable, "-c", FAULTS, "cpu"], check=True, capture_output=True).stdout)
    pages = 4 * 2**26 // 4096
    assert found["before"] > 0.9 * pages
    assert found["after"] > 0.4 * pages  # some of what was held may still be there
    assert found["within"] < 0.05 * pages
    assert found["returned"] > 0.9 * 2**26


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_of_a_model_elsewhere_memory_is_left_to_the_library() -> None:
    found = json.loads(subprocess.run([sys.executable, "-c", FAULTS, "meta"], check=True, capture_output=True).stdout)
    assert found["within"] > 0.9 * 4 * 2**26 // 4096


def test_what_was_loaded_is_looked_through_again_after_an_error() -> None:
    frozen = 0

    def broken() -> None:
        nonlocal frozen
        with memory_for_training(torch.device("cpu")):
            frozen = gc.get_freeze_count()
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert frozen > 0
    assert gc.get_freeze_count() == 0
