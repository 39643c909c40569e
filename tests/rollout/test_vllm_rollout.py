"""vLLM as rollout engine, in process and behind its server: what is asked, what comes back, and whose weights it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from covary.models.lora import add_lora, merged_weights
from covary.rollout.transformers import TransformersRollout
from covary.rollout.vllm import VllmRollout, ending
from covary.rollout.vllm_local import LocalVllm
from covary.rollout.vllm_server import COMMAND, VllmServer
from covary.settings import Lora
from covary.types import Completion, Example, Group, Request, RunError, Sampling, UserError
from tests.fake_vllm import FakeVllm, installed, serving_vllm
from tests.models import byte_tokenizer, random_llama

PROBE = byte_tokenizer().encode("A text of the run, of which its vLLM has to think as it does.")
PLAN = [Request(3), Request(1, decoding="greedy", learn=False)]
SAMPLING = Sampling(12, temperature=0.7)


@pytest.fixture
def model() -> PreTrainedModel:
    return random_llama(seed=1, scale=8.0)  # far from uniform, so that temperatures and weights show


@pytest.fixture
def fake(model: PreTrainedModel) -> FakeVllm:
    return FakeVllm(model, byte_tokenizer())


@contextmanager
def behind(kind: str, fake: FakeVllm, model: PreTrainedModel, folder: Path, **changes: Any) -> Iterator[VllmRollout]:
    """The engine under test over a fake vLLM, held either way."""
    weights = partial(merged_weights, model)
    common: dict[str, Any] = {"probe": PROBE, "temperature": SAMPLING.temperature, **changes}
    if kind == "server":
        with serving_vllm(fake) as (url, _):
            yield VllmRollout(VllmServer(url, folder, pause=0.01), model, byte_tokenizer(), weights, **common)
    else:
        with installed(fake):
            local = LocalVllm(
                model.config, byte_tokenizer(), dtype="float32", memory_share=0.3, eager=True, trust_remote_code=False
            )
            yield VllmRollout(local, model, byte_tokenizer(), weights, **common)


@pytest.fixture(params=["server", "local"])
def rollout(request: Any, fake: FakeVllm, model: PreTrainedModel, tmp_path: Path) -> Iterator[VllmRollout]:
    with behind(request.param, fake, model, tmp_path) as made:
        yield made


def groups(count: int) -> list[Group]:
    return [
        Group(Example(f"e{i}", "q"), {"prompt": byte_tokenizer().encode(f"question {i}:"), "other": [65 + i]})
        for i in range(count)
    ]


def sample(rollout: VllmRollout, count: int = 2, sampling: Sampling = SAMPLING, seed: int = 3) -> list[Group]:
    return rollout.generate([PLAN] * count, groups(count), sampling, seed)


def own_logps(model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """Of each token, computed plainly."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def nudge(model: PreTrainedModel, size: float = 1e-2, seed: int = 0) -> None:
    """An update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * weight.std() * torch.randn(weight.shape, generator=generator))


# -- completions -----------------------------------------------------------------------------------------


def test_log_probs_are_the_trainers_at_the_temperature(rollout, model):
    for group in sample(rollout):
        for row in group.completions:
            temperature = 1.0 if row.greedy else SAMPLING.temperature
            expected = own_logps(model, group.contexts["prompt"], row.tokens, temperature)
            torch.testing.assert_close(torch.tensor(row.logps), expected, atol=1e-4, rtol=0)


def test_rows_are_those_that_the_plan_asks_for(rollout, model):
    rollout.load_weights(None, 5)
    plan = [Request(2, context="other"), *PLAN]
    (group,) = rollout.generate([plan], groups(1), SAMPLING, seed=0)
    rows = group.completions
    assert [row.context for row in rows] == ["other", "other", *["prompt"] * 4]
    assert [row.greedy for row in rows] == [False] * 5 + [True]
    assert [row.learn for row in rows] == [True] * 5 + [False]
    assert {row.weights_version for row in rows} == {5}
    assert {row.source for row in rows} == {"policy"}
    for row in rows:
        ends = [place for place, token in enumerate(row.tokens) if token == 257]
        assert ends == ([len(row.tokens) - 1] if row.finish == "eos" else [])
        assert row.finish == "eos" or len(row.tokens) == 12
        said = row.tokens[:-1] if row.finish == "eos" else row.tokens
        assert row.text == byte_tokenizer().decode(said, skip_special_tokens=False)
    greedy = rows[-1]
    assert greedy.tokens[0] == int(model(input_ids=torch.tensor([group.contexts["prompt"]])).logits[0, -1].argmax())


def test_a_sample_depends_on_its_question_and_place_alone(rollout):
    together = sample(rollout)
    (alone,) = rollout.generate([PLAN], groups(2)[1:2], SAMPLING, seed=3)
    assert [row.tokens for row in alone.completions] == [row.tokens for row in together[1].completions]
    sampled = [tuple(row.tokens) for group in together for row in group.completions if not row.greedy]
    assert len(set(sampled)) == len(sampled)
    assert [row.tokens for row in sample(rollout, seed=4)[0].completions] != [
        row.tokens for row in together[0].completions
    ]


def test_nothing_is_left_to_defaults(rollout, fake):
    sample(rollout, sampling=Sampling(5, 0.7, ("x", "<|im_end|>")))
    rows = [asked for asked in fake.asked if asked["max_tokens"] == 5]
    assert len(rows) == 8
    assert [row["temperature"] for row in rows].count(0.0) == 2
    for row in rows:
        assert row.pop("temperature") in (0.0, 0.7)
        assert 0 <= row.pop("seed") < 2**31
        row.pop("prompt")
        assert row == {
            "n": 1, "max_tokens": 5, "min_tokens": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0, "stop": ["x", "<|im_end|>"],
            "include_stop_str_in_output": True, "stop_token_ids": [257], "ignore_eos": True, "skip_special_tokens": False,
        }  # fmt: skip


def test_stop_strings(rollout):
    found = sample(rollout, count=6, sampling=Sampling(60, 0.7, ("e", "Z")))
    rows = [row for group in found for row in group.completions]
    stopped = [row for row in rows if row.finish == "stop_string"]
    assert stopped
    for row in rows:
        text = byte_tokenizer().decode(row.tokens)
        assert ("e" in text or "Z" in text) == (row.finish == "stop_string")
        assert "e" not in row.text
        assert len(row.logps) == len(row.tokens)
    for row in stopped:
        assert byte_tokenizer().decode(row.tokens)[-1] in "eZ"
        assert byte_tokenizer().decode(row.tokens)[:-1] == row.text


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6), st.lists(st.integers(0, 258), max_size=6), st.sampled_from([(), ("e",), ("ab", "q", "é")])
)
def test_a_completion_ends_where_the_local_engine_ends_it(seed: int, more: list[int], stop: tuple[str, ...]) -> None:
    sampling = Sampling(12, 1.0, stop)
    engine = TransformersRollout(random_llama(seed=1), byte_tokenizer())  # near uniform: all bytes occur
    (group,) = engine.generate([[Request(1)]], groups(1), sampling, seed)
    (row,) = group.completions
    said = row.tokens if row.finish == "length" else [*row.tokens, *more]  # vLLM may say more than it should
    assert ending(said, byte_tokenizer(), engine.end_ids, sampling) == (len(row.tokens), row.finish, row.text)
    if row.finish == "length":
        assert ending(said[:-1], byte_tokenizer(), engine.end_ids, sampling) is None


def test_progress(rollout):
    seen: list[tuple[int, int]] = []
    rollout.on_progress = lambda *numbers: seen.append(numbers)
    sample(rollout)
    assert seen == [(n, 8) for n in range(1, 9)]


def test_prompts_that_do_not_fit_are_refused_before_anything_is_sent(rollout, fake):
    with pytest.raises(UserError, match=r"example 'e0', context 'prompt': a prompt of 11 tokens and max_tokens = 250"):
        sample(rollout, sampling=Sampling(250))
    with pytest.raises(UserError, match="the prompt has no tokens"):
        rollout.generate([[Request(1)]], [Group(Example("e", ""), {"prompt": []})], SAMPLING, 0)
    with pytest.raises(ValueError, match="source 'teacher' requested, but this engine samples the policy only"):
        rollout.generate([[Request(1, source="teacher")]], groups(1), SAMPLING, 0)
    assert not fake.asked
    assert not fake.synced


# -- answers that are none -------------------------------------------------------------------------------


def ended_early(said: dict[str, Any]) -> None:
    if len(said["token_ids"]) == 12:
        said["token_ids"], said["logprobs"]["token_logprobs"] = said["token_ids"][:3], [-1.0] * 3


def not_finite(said: dict[str, Any]) -> None:
    if len(said["token_ids"]) == 12:
        said["logprobs"]["token_logprobs"][2] = math.nan


@pytest.mark.parametrize("spoil", [ended_early, not_finite])
def test_a_row_that_nothing_ended_or_without_numbers_has_no_tokens(rollout, fake, spoil):
    before = [row for group in sample(rollout) for row in group.completions]
    fake.spoil = spoil
    after = [row for group in sample(rollout) for row in group.completions]
    assert any(row.finish == "length" for row in before)
    for one, other in zip(before, after, strict=True):
        assert other.tokens == ([] if one.finish == "length" else one.tokens)
        assert len(other.logps) == len(other.tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [65, 400]}, "sampled the token 400, and the model has 259"),
        (
            {"logprobs": {"token_logprobs": [0.5, -1.0]}, "token_ids": [65, 66]},
            "a log-prob of 0.5, and none is above 0",
        ),
        ({"finish_reason": "abort"}, r"broke a completion off \(abort\)"),
    ],
)
def test_a_broken_answer_ends_the_run(rollout, fake, change, message):
    sample(rollout)
    fake.spoil = lambda said: said.update({"logprobs": {"token_logprobs": [-1.0, -1.0]}, **change})
    with pytest.raises(RunError, match=message):
        sample(rollout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": None}, "answered without token ids and log-probs"),
        ({"token_ids": [float("inf")]}, "answered without token ids and log-probs"),
        ({"token_ids": [3.7]}, "answered without token ids and log-probs"),
        ({"token_ids": "34"}, "answered without token ids and log-probs"),
        ({"logprobs": {"token_logprobs": [10**400]}}, "answered without token ids and log-probs"),
        ({"logprobs": None}, "answered without token ids and log-probs"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "1 log-probs of"),
        ({"prompt_token_ids": [1]}, "answered to another prompt"),
    ],
)
def test_a_broken_answer_of_the_server(fake, model, tmp_path, change, message):
    with behind("server", fake, model, tmp_path) as rollout:
        sample(rollout)
        fake.spoil = lambda said: said.update(change) if len(said["token_ids"]) > 1 else None
        with pytest.raises(RunError, match=message):
            sample(rollout)


# -- weights ---------------------------------------------------------------------------------------------


def test_weights_are_sent_once_for_each_update_and_whole(rollout, fake, model):
    sample(rollout)
    sample(rollout)
    nudge(model)
    rollout.load_weights(None, 1)
    rollout.load_weights(None, 2)
    found = sample(rollout)
    assert len(fake.synced) == 2
    assert fake.synced[1] == sorted(model.state_dict())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(fake.synced[1])
    assert {row.weights_version for row in found[0].completions} == {2}
    for name, weight in model.state_dict().items():
        assert torch.equal(fake.model.state_dict()[name], weight)


def test_small_updates_are_seen_to_arrive(rollout, model):
    for version in range(1, 5):
        sample(rollout)
        nudge(model, 1e-4, version)
        rollout.load_weights(None, version)
    assert rollout.weights_version == 3


@pytest.mark.parametrize("size", [1e-4, 1e-2])
def test_stale_weights_end_the_run(rollout, fake, model, size):
    sample(rollout)
    nudge(model, size)
    rollout.load_weights(None, 1)
    fake.takes = lambda name: False
    with pytest.raises(RunError, match=r"still has the weights of an earlier update: .* to the last digit .*moved by"):
        sample(rollout)
    assert rollout.weights_version == 0  # nothing was sampled that would pass for the policy's


@pytest.mark.parametrize("size", [1e-3, 1e-1])
@pytest.mark.parametrize("stays", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_part_that_stays_behind_ends_the_run(rollout, fake, model, stays, size):
    sample(rollout)
    nudge(model, size)
    rollout.load_weights(None, 1)
    fake.takes = lambda name: name != stays
    with pytest.raises(RunError, match=r"does not compute with the policy's weights.*nats apart per token \(allowed:"):
        sample(rollout)


def test_another_model_ends_the_run_at_once(rollout, fake):
    fake.takes = lambda name: False
    with pytest.raises(RunError, match=r"does not compute with the policy's weights.*Perhaps it serves another model"):
        sample(rollout)


def test_prompts_remembered_under_old_weights_end_the_run(rollout, fake, model):
    sample(rollout)
    fake.resets = False
    nudge(model, 0.1)
    rollout.load_weights(None, 1)
    with pytest.raises(RunError, match="what it remembers of a prompt belongs to other weights"):
        sample(rollout)


def test_log_probs_of_another_temperature_end_the_run(rollout, fake):
    fake.tempered = False
    with pytest.raises(RunError, match=r"of temperature 1: vLLM needs --logprobs-mode processed_logprobs"):
        sample(rollout)


@pytest.mark.parametrize("kind", ["server", "local"])
def test_at_temperature_1_either_kind_of_log_prob_will_do(kind, fake, model, tmp_path):
    with behind(kind, fake, model, tmp_path, temperature=1.0) as rollout:
        fake.tempered = False
        sample(rollout, sampling=SAMPLING)


def test_weights_that_change_while_it_samples_end_the_run(rollout, fake):
    sample(rollout)

    def restarted(said: dict[str, Any]) -> None:
        if len(said["token_ids"]) > 1:
            nudge(fake.model, 1e-2)

    fake.spoil = restarted
    with pytest.raises(RunError, match="its weights changed while it sampled"):
        sample(rollout)


def test_an_adapter_is_merged(rollout, fake, model):
    add_lora(model, Lora(rank=2), "base")
    sample(rollout)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    rollout.load_weights(None, 1)
    sample(rollout)  # compares
    assert fake.synced == [sorted(random_llama().state_dict())] * 2


# -- the two ways ----------------------------------------------------------------------------------------


def test_the_server_reads_weights_from_a_folder_that_is_gone_after(fake, model, tmp_path):
    with serving_vllm(fake) as (url, seen):
        server = VllmServer(url, tmp_path / "weights", key="secret")
        rollout = VllmRollout(
            server, model, byte_tokenizer(), partial(merged_weights, model), probe=PROBE, temperature=1.0
        )
        sample(rollout, sampling=Sampling(4))
    paths = [asked["path"] for asked in seen]
    assert paths[:2] == ["/collective_rpc", "/reset_prefix_cache"]
    assert set(paths[2:]) == {"/v1/completions"}
    assert Path(seen[0]["kwargs"]["weights_path"]).parent == tmp_path / "weights"
    assert list((tmp_path / "weights").iterdir()) == []
    assert {asked["key"] for asked in seen} == {"Bearer secret"}
    assert "secret" not in repr(server)


def test_a_server_that_takes_no_weights(fake, model, tmp_path):
    with serving_vllm(fake, development=False) as (url, _):
        server = VllmServer(url, tmp_path)
        with pytest.raises(RunError) as caught:
            server.load(merged_weights(model))
    assert str(caught.value).endswith(f"404 Not Found; start the server with {COMMAND}")


def test_a_server_that_does_not_see_the_folder(fake, model, tmp_path, monkeypatch):
    with serving_vllm(fake) as (url, _):
        server = VllmServer(url, tmp_path, attempts=1)
        monkeypatch.setattr(
            "covary.rollout.vllm_server.save_file", lambda tensors, file: file.with_suffix(".x").touch()
        )
        monkeypatch.setattr(Path, "chmod", lambda path, mode: None)
        with pytest.raises(RunError, match=rf"does the server see {tmp_path}\? rollout.server.weights names another"):
            server.load(merged_weights(model))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="no folder for weights can be made"):
        VllmServer("http://127.0.0.1:1/v1", tmp_path / "file").load(merged_weights(model))


def test_a_server_that_was_killed(fake, model, tmp_path):
    with serving_vllm(fake) as (url, _):
        server = VllmServer(url, tmp_path, attempts=2, pause=0.01)
        rollout = VllmRollout(
            server, model, byte_tokenizer(), partial(merged_weights, model), probe=PROBE, temperature=1.0
        )
        sample(rollout)
    with pytest.raises(RunError, match=r"gave no answer in 2 attempts; the last: .*refused"):
        sample(rollout)


def test_the_engine_in_this_process(fake, model, monkeypatch):
    with installed(fake) as made:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        LocalVllm(
            model.config, byte_tokenizer(), dtype="bfloat16", memory_share=0.4, eager=False, trust_remote_code=False
        )
        import os

        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert made == [
        {
            "dtype": "bfloat16", "load_format": "dummy", "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
            "max_model_len": -1, "gpu_memory_utilization": 0.4, "enforce_eager": False, "trust_remote_code": False, "seed": 0,
        }
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["enqueue", "collective_rpc"])
def test_what_vllm_raises_in_this_process_is_one_line(fake, model, method):
    def fails(*given: Any, **named: Any) -> Any:
        raise ValueError("KV cache\nis full")

    with installed(fake):
        local = LocalVllm(
            model.config, byte_tokenizer(), dtype="float32", memory_share=0.4, eager=True, trust_remote_code=False
        )
        setattr(local.llm, method, fails)
        act: Callable[[], Any] = partial(local.complete, [], None) if method == "enqueue" else partial(local.load, {})
        with pytest.raises(RunError, match="ValueError: KV cache is full"):
            act()


def test_completions_are_plain_rows(rollout):
    (row, *_) = sample(rollout)[0].completions
    assert isinstance(row, Completion)
    assert row.roles is None
