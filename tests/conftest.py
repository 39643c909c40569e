"""Deterministic, single-threaded tests; shapes of public losses and ops are checked as they run."""

from __future__ import annotations

import gc
import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from jaxtyping import install_import_hook

# Before the modules are imported: every jaxtyping signature in them is then checked at each call.
install_import_hook(["covary.ops", "covary.quantities", "covary.algorithms"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
# Command lines started by tests run single-threaded too: two threads on a busy machine can be many times slower.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _heap() -> None:
    """A run collects garbage at its start: half a second where the heap holds every test and its modules."""
    loop = import_module("covary.train")  # `covary.train` is the function
    loop.gc = SimpleNamespace(collect=lambda: None, freeze=gc.freeze, unfreeze=gc.unfreeze)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared test data."""
    folder = os.environ.get("COVARY_SHARED")
    if not folder:
        pytest.skip("COVARY_SHARED is not set: it names the folder of shared test data")
    return Path(folder)
