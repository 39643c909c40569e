"""One CUDA device: the same loop, and scores that agree with the CPU's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from covary.engines.local import LocalEngine
from covary.types import Completion, Example, Group, Score
from tests.loop.mini import metrics, run
from tests.models import random_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_a_run_on_cuda(tmp_path, autocast):
    trained = run(tmp_path, engine={"device": "cuda", "autocast": autocast}, reference="initial", steps=3)
    assert next(trained.model.parameters()).is_cuda
    last = metrics(tmp_path / "run")[-1]
    assert last["kl/sampling"] < (1e-6 if autocast == "none" else 1e-2)
    assert last["grad_norm"] > 0


def test_scores_equal_those_of_the_cpu():
    model = random_llama(50)
    group = Group(
        Example("a", ""), {"prompt": [1, 2, 3]}, [Completion([4, 5, 6], "", "eos"), Completion([7], "", "eos")]
    )
    cpu = LocalEngine(model).score([group], [Score("p")])["p"]
    cuda = LocalEngine(deepcopy(model).cuda()).score([group], [Score("p")])["p"]
    for a, b in zip(cpu, cuda, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
