"""Runs whose completions come from vLLM: they follow the policy, and end where vLLM does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import covary
from covary.models.loading import load_model
from covary.types import RunError, UserError
from tests.fake_vllm import FakeVllm, installed, serving_vllm
from tests.loop.mini import metrics, on_traces, rollouts, run, vowels
from tests.models import byte_tokenizer, save_random_model

ROLLOUT: dict[str, Any] = {"prompts": 4, "completions": 4, "max_tokens": 6, "engine": "vllm", "temperature": 0.8}


@pytest.fixture
def fake(tmp_path: Path) -> FakeVllm:
    return FakeVllm(load_model(str(save_random_model(tmp_path / "model")), device="cpu"), byte_tokenizer())


def run_with(folder: Path, url: str | None, **changes: Any) -> Any:
    server = {"server": {"url": url, "attempts": 1}} if url else {}
    return run(folder, rollout=ROLLOUT | server, engine={"logprob_temperature": 0.8}, **changes)


def check(folder: Path, fake: FakeVllm) -> None:
    """It sampled with the policy of each step."""
    rows = metrics(folder / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert 0 <= row["kl/sampling"] < 1e-9
        assert row["rows/invalid"] == 0
        assert row["grad_norm"] > 0
    assert len(fake.synced) == 3  # at the start, for step 2, and for the evaluation at the end


def test_a_run_on_a_server(tmp_path, fake):
    with serving_vllm(fake) as (url, _):
        run_with(tmp_path, url)
    check(tmp_path, fake)
    assert not list((tmp_path / "run").glob("weights-*"))


def test_a_run_with_vllm_in_its_process(tmp_path, fake):
    with installed(fake) as made:
        run_with(tmp_path, None)
    check(tmp_path, fake)
    assert [settings["dtype"] for settings in made] == ["float32"]


def test_a_server_that_stops_following_loses_no_step(tmp_path, fake):
    with serving_vllm(fake) as (url, _):
        fake.takes = lambda name: name != "lm_head.weight" or len(fake.synced) < 2
        with pytest.raises(RunError, match=r"does not compute with the policy's weights.*step-000001.*--resume"):
            run_with(tmp_path, url, eval={"every": None}, checkpoint={"every": None})
        assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1]
        fake.takes = lambda name: True
        covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    assert metrics(tmp_path / "run")[-1]["kl/sampling"] < 1e-9


def test_traces_end_where_the_template_ends_them(tmp_path, fake):
    """Another context, a stop string, and an answer behind it."""
    sections = on_traces(tmp_path)
    with serving_vllm(fake) as (url, _):
        rollout = {"engine": "vllm", "server": {"url": url}, "prompts": 2, "completions": 4, "max_tokens": 40}
        run(tmp_path, algorithm={"name": "covrl"}, steps=1, **sections | {"rollout": rollout})
    row = metrics(tmp_path / "run")[-1]
    assert row["kl/sampling"] < 1e-9
    assert row["grad_norm"] > 0
    rows = rollouts(tmp_path / "run", 1)
    assert "stop_string" in {row["finish"] for row in rows}
    assert not any("e" in row["completion"] for row in rows)


def test_a_folder_for_weights_that_cannot_be_made_is_found_out_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    rollout = {"engine": "vllm", "server": {"url": "http://127.0.0.1:1/v1", "weights": str(tmp_path / "file")}}
    with pytest.raises(UserError, match=r"^rollout.server.weights: .*is not a folder that can be written to"):
        run(tmp_path, rollout=rollout)


def test_without_vllm_the_message_says_how_to_install_it(tmp_path):
    with pytest.raises(UserError, match=r"^rollout.engine: .* pip install 'covary\[vllm\]'; or name a server"):
        run_with(tmp_path, None)
    assert not (tmp_path / "run").exists()
