"""vLLM itself in the trainer's process, where it is installed (docs/results/vllm.md says how that was done)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import covary
from covary.models.lora import merged_weights
from covary.types import RunError
from tests.loop.mini import metrics

pytestmark = pytest.mark.slow
SECTIONS: dict[str, Any] = {
    "steps": 3,
    "model": "tiny",
    "task": {
        "name": "reasoning_gym",
        "tasks": {"chain_sum": {"max_digits": 2, "max_terms": 2}},
        "train": 100,
        "test": 4,
    },
    "algorithm": {"name": "gvpo"},
    "rollout": {"engine": "vllm", "prompts": 8, "completions": 4, "max_tokens": 12, "temperature": 0.8, "stop": ["5"]},
    "optimizer": {"lr": 1e-4, "prompts": 4},
    "engine": {"logprob_temperature": 0.8},
    "log": {"samples": 0},
}


@pytest.fixture(autouse=True)
def small_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")


def test_it_follows_the_policy(tmp_path: Path) -> None:
    covary.train(quiet=True, out=str(tmp_path / "run"), **SECTIONS)
    rows = metrics(tmp_path / "run")[1:]
    assert len(rows) == 3
    for row in rows:
        assert 0 <= row["kl/sampling"] < 1e-6
        assert row["rows/invalid"] == 0
        assert row["grad_norm"] > 0


@pytest.mark.parametrize("synced_before", [0, 1])
def test_without_the_tied_projection_it_stops(tmp_path: Path, monkeypatch, synced_before: int) -> None:
    """At the first sync the projection is random, later it is that of the last update."""
    syncs = 0

    def without_head(model: nn.Module) -> dict[str, Tensor]:
        nonlocal syncs
        syncs += 1
        weights = merged_weights(model)
        return weights if syncs <= synced_before else {k: v for k, v in weights.items() if k != "lm_head.weight"}

    monkeypatch.setattr("covary.api.merged_weights", without_head)
    with pytest.raises(RunError, match="does not compute with the policy's weights"):
        covary.train(quiet=True, out=str(tmp_path / "run"), **SECTIONS)
    assert syncs == synced_before + 1
