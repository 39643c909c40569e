"""Decoding against plain forward passes: whatever joins, leaves and moves, a row's logits are its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from covary.fused import use_fused
from covary.rollout import decoding as decodings
from covary.rollout import linear
from covary.rollout.decoding import CachedDecoding, Row, SharedDecoding, decoding_of, places_for_copies
from covary.rollout.lean import lean
from covary.rollout.linear import reordered_weights
from covary.rollout.requests import Asked
from covary.types import Example, Request
from tests.models import FAMILIES, random_model

LEAN = ("llama", "qwen2", "qwen3")  # families whose decode steps are covary's own (covary/rollout/lean.py)


@cache
def model_of(family: str, fused: bool = False) -> Any:
    model = random_model(family)
    if fused:  # as `load_model` does
        use_fused(model)
    assert decoding_of(model) == (SharedDecoding, None)
    assert (lean(model) is not None) == (fused and family in LEAN)
    return model


def new_row(prompt: list[int]) -> Row:
    return Row(Asked(Example("", ""), {"prompt": tuple(prompt)}, Request(1), 0), np.random.PCG64(0))


def plain(model: Any, row: Row) -> torch.Tensor:
    return model(input_ids=torch.tensor([[*row.asked.prompt, *row.tokens]]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("front", [0, 40])
@pytest.mark.parametrize(("family", "fused"), [*((family, False) for family in FAMILIES), *((x, True) for x in LEAN)])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_rows_that_join_leave_and_move_keep_their_logits(family: str, fused: bool, front: int, seed: int) -> None:
    """Prompts of 1 to 40 tokens, most of them shared; the sliding window is 8."""
    model, rng = model_of(family, fused), random.Random(seed)
    room, steps = 5, 8

    def ids(count: int) -> list[int]:
        return [rng.randrange(256) for _ in range(count)]

    prompts = [ids(rng.choice([1, 2, 9, 40])) for _ in range(4)]
    decoding = SharedDecoding(model, lambda row: row.asked.prompt, front, max_tokens=steps + 1)
    rows: list[Row] = []
    with torch.no_grad():
        for step in range(steps):
            new = [new_row(rng.choice(prompts)) for _ in range(room - len(rows)) if step == 0 or rng.random() < 0.3]
            if new:
                decoding.join(new)
                rows += new
            torch.testing.assert_close(
                decoding.logits, torch.stack([plain(model, row) for row in rows]), atol=2e-4, rtol=1e-4
            )
            kept = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
            decoding.keep(kept)
            rows = [rows[index] for index in kept]
            tokens = ids(len(rows))
            for row, token in zip(rows, tokens, strict=True):
                row.tokens.append(token)
            decoding.step(torch.tensor(tokens))


@pytest.mark.parametrize("front", [0, 2])
def test_what_is_not_finite_stays_in_its_row_even_when_its_place_is_taken(front: int) -> None:
    model = random_model("llama")
    assert decoding_of(model) == (SharedDecoding, None)
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = torch.nan
    decoding = SharedDecoding(model, lambda row: row.asked.prompt, front, max_tokens=6)
    broken, long, late = new_row([1, 2]), new_row([1, 2]), new_row([3])
    with torch.no_grad():
        decoding.join([broken, long])
        for tokens in ([200, 5], [200, 6]):
            long.tokens.append(tokens[1])
            decoding.step(torch.tensor(tokens))
        assert decoding.logits[0].isnan().all()
        decoding.keep([1])  # the long row moves to the place of the broken one
        long.tokens.append(7)
        decoding.step(torch.tensor([7]))
        decoding.join([late])  # and a new one comes where both have been
        long.tokens.append(8)
        late.tokens.append(9)
        decoding.step(torch.tensor([8, 9]))
        expected = torch.stack([plain(model, row) for row in (long, late)])
        # The output projection is tied: token 200 itself has no logit anywhere.
        torch.testing.assert_close(decoding.logits, expected, atol=2e-4, rtol=1e-4, equal_nan=True)
        assert decoding.logits.isnan().sum(-1).tolist() == [1, 1]


def test_prompts_that_no_row_reads_are_forgotten() -> None:
    decoding = SharedDecoding(model_of("llama"), lambda row: row.asked.prompt, 3, max_tokens=4)
    with torch.no_grad():
        decoding.join([new_row([i, 1, 2]) for i in range(8)])
        (layer, *_) = decoding._caches.values()
        assert layer.prompt_key.shape[0] == 8
        decoding.keep([0, 1])
        assert layer.prompt_key.shape[0] == 3  # and the newest, which rows to come may continue


def test_prompts_are_copied_where_that_is_little() -> None:
    assert places_for_copies([5, 64] * 32) == 64
    assert places_for_copies([5, 64] * 33) == 0


def test_prompts_are_read_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodings, "_PREFILL_TOKENS", 10)
    model = model_of("llama")
    rows = [new_row(list(range(start, start + length))) for start, length in ((0, 4), (9, 6), (3, 12), (5, 1), (7, 2))]
    sizes: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    decoding = SharedDecoding(model, lambda row: row.asked.prompt, 12, max_tokens=2)
    with torch.no_grad():
        decoding.join(rows)
        hook.remove()
        assert sizes == [10, 12, 3]
        torch.testing.assert_close(
            decoding.logits, torch.stack([plain(model, row) for row in rows]), atol=2e-4, rtol=1e-4
        )


def test_a_model_that_decodes_differently_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its positions restart at 0 after the prompt: the plain cache is taken, and its logits stay right."""
    model = random_model("gpt2")
    whole = model.transformer.forward

    def forward(*args: Any, position_ids: Any = None, layout: Any = None, **kwargs: Any) -> Any:
        if layout is not None:
            position_ids = torch.zeros_like(position_ids)
        return whole(*args, position_ids=position_ids, layout=layout, **kwargs)

    monkeypatch.setattr(model.transformer, "forward", forward)
    kind, why = decoding_of(model)
    assert kind is CachedDecoding
    assert why is not None
    assert "differ" in why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reordered_weights_give_the_same_products(dtype: torch.dtype) -> None:
    reordered = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not on every CPU
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8, bias=False)).to(dtype)
    inputs = [torch.randn(rows, 24, dtype=dtype) for rows in (1, 8, 9, 64, 65, 512, 513)] + [
        torch.randn(2, 3, 24, dtype=dtype)
    ]
    inputs.append(torch.randn(24, 5, dtype=dtype).t())  # not contiguous
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        with reordered_weights([model], None):
            assert all(("forward" in layer.__dict__) == reordered for layer in model)
            found = [model(x) for x in inputs]
    assert not any("forward" in layer.__dict__ for layer in model)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_few_numbers_of_rows_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps code for each that it meets, so its memory would grow with the steps of a run."""
    met: set[int] = set()
    product = linear._multiply
    monkeypatch.setattr(linear, "_multiply", lambda x, *rest: met.add(len(x)) or product(x, *rest))
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad(), reordered_weights([model], None):
        for rows in range(1, 600):
            assert model(torch.ones(rows, 4)).shape == (rows, 4)
    assert sorted(met)[:5] == [1, 2, 4, 8, 16]
    assert len(met) == 3 + 8 + 14
    assert max(met) == 512


def test_reordered_weights_are_gone_after_an_error_and_a_changed_weight_is_seen_next_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with pytest.raises(KeyError), reordered_weights([model], None):
        raise KeyError
    assert "forward" not in model[0].__dict__
    with torch.no_grad():
        model[0].weight.copy_(2 * torch.eye(4))
        with reordered_weights([model], None):
            torch.testing.assert_close(model(torch.ones(1, 4)), torch.full((1, 4), 2.0))


def test_a_layer_that_cannot_be_reordered_leaves_none_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reorder = torch.ops.mkldnn._reorder_linear_weight
    made: list[int] = []

    def once(weight: torch.Tensor) -> torch.Tensor:
        if made:
            raise MemoryError
        made.append(1)
        return reorder(weight)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", once)
    with pytest.raises(MemoryError), reordered_weights([model], None):
        pass
    assert made
    assert not any("forward" in layer.__dict__ for layer in model)


def test_a_cpu_without_products_of_a_type_multiplies_plainly() -> None:
    """oneDNN is told at its start what the CPU can do, so in a process of its own."""
    code = (
        "import torch\nfrom covary.rollout.linear import reordered_weights\nmodel = torch.nn.Linear(4, 4)\n"
        "with torch.no_grad(), torch.autocast('cpu', torch.bfloat16), reordered_weights([model], torch.bfloat16):\n"
        "    print('forward' in model.__dict__, model(torch.ones(2, 4)).dtype)\n"
    )
    environ = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "torch.bfloat16"]


def test_reordered_weights_under_autocast_are_of_its_type() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad(), reordered_weights([model], torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
