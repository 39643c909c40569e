"""Chunked projections against the plain formula in float64: numbers, gradients, and what is kept."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from covary.quantities import entropy, jsd, kl, logp, mixture_kl, prob
from covary.scoring import chunked
from covary.scoring.chunked import score_hidden


class Head(nn.Module):
    """The part of a language model that scoring sees."""

    def __init__(self, width: int, vocabulary: int, bias: bool = False, softcap: float | None = None) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, vocabulary, bias=bias)
        self.config = type("Config", (), {"final_logit_softcapping": softcap})()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def in_float64(models: Any, hidden: Any, tokens: Tensor, quantities: Any, temperature: float) -> Tensor:
    logps = []
    for model, h in zip(models, hidden, strict=True):
        head, softcap = model.lm_head, model.config.final_logit_softcapping
        logits = h.double() @ head.weight.double().t() + (0 if head.bias is None else head.bias.double())
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logps.append(torch.log_softmax(logits / temperature, -1))
    return torch.stack([quantity(*logps, tokens) for quantity in quantities])


def gradients(values: Tensor, outer: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((values * outer).sum(), wanted))


@pytest.fixture(params=[1, 60, 2**24], ids=lambda size: f"{size} numbers")
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_NUMBERS", request.param)
    monkeypatch.setattr(chunked, "BLOCK_NUMBERS", {"cpu": request.param})
    monkeypatch.setattr(chunked, "BLOCK_ROWS", 4 if request.param < 2**24 else 2**12)


ONE_STREAM = [(logp,), (entropy,), (prob,), (logp, entropy), (entropy, prob, logp)]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("quantities", ONE_STREAM)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("trained", [True, False])
def test_one_stream(quantities: tuple, bias: bool, temperature: float, trained: bool) -> None:
    torch.manual_seed(0)
    model = Head(6, 23, bias)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # far from uniform
    model.requires_grad_(trained)
    hidden = torch.randn(11, 6, requires_grad=True)
    tokens, outer = torch.randint(23, (11,)), torch.randn(len(quantities), 11)
    found = score_hidden([model], [hidden], tokens, quantities, temperature)
    expected = in_float64([model], [hidden], tokens, quantities, temperature)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    wanted = [hidden, *(model.parameters() if trained else ())]
    for a, b in zip(gradients(found, outer, wanted), gradients(expected, outer.double(), wanted), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        again = score_hidden([model], [hidden], tokens, quantities, temperature)
    torch.testing.assert_close(again, found, atol=1e-5, rtol=1e-5)


@given(
    rows=st.integers(1, 9), vocabulary=st.integers(1, 40), numbers=st.integers(1, 99), seed=st.integers(0, 99),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_sizes_and_blocks(rows: int, vocabulary: int, numbers: int, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    model, hidden = Head(3, vocabulary), torch.randn(rows, 3, requires_grad=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    tokens = torch.randint(vocabulary, (rows,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "BLOCK_NUMBERS", {"cpu": numbers})
        patch.setattr(chunked, "BLOCK_ROWS", 3)
        found = score_hidden([model], [hidden], tokens, (logp, entropy), 1.0)
        slopes = gradients(found, torch.ones(2, rows), [hidden, model.lm_head.weight])
    expected = in_float64([model], [hidden], tokens, (logp, entropy), 1.0)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
    exact = gradients(expected, torch.ones(2, rows).double(), [hidden, model.lm_head.weight])
    for a, b in zip(slopes, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("quantity", [kl, partial(jsd, 0.3), partial(mixture_kl, 0.4)])
@pytest.mark.parametrize("trained", [(), (0,), (0, 1)])
def test_two_streams(quantity: Any, trained: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    models, widths = [Head(6, 23), Head(4, 25)], (6, 4)  # the second vocabulary is padded
    for i, model in enumerate(models):
        model.requires_grad_(i in trained)
    hidden = [torch.randn(11, width, requires_grad=True) for width in widths]
    tokens, outer = torch.randint(23, (11,)), torch.randn(2, 11)
    quantities = (quantity, lambda p, q, tokens: kl(q, p, tokens))
    found = score_hidden(models, hidden, tokens, quantities, 1.3)

    def cut(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        return torch.stack([each(p, q[:, :23].log_softmax(-1), tokens) for each in quantities])

    expected = in_float64(models, hidden, tokens, (cut,), 1.3)[0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    wanted = [*hidden, *(models[i].lm_head.weight for i in trained)]
    for a, b in zip(gradients(found, outer, wanted), gradients(expected, outer.double(), wanted), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_a_stream_that_takes_no_gradient_beside_one_that_does() -> None:
    torch.manual_seed(0)
    models = [Head(6, 23).requires_grad_(False), Head(6, 23).requires_grad_(False)]
    hidden = [torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)]
    found = score_hidden(models, hidden, torch.zeros(5, dtype=torch.long), (kl,), 1.0)
    expected = in_float64(models, hidden, torch.zeros(5, dtype=torch.long), (kl,), 1.0)
    (slope,), (exact,) = (gradients(x, torch.ones(1, 5), hidden[:1]) for x in (found, expected))
    torch.testing.assert_close(slope, exact, atol=1e-5, rtol=1e-4)


def test_impossible_tokens_have_no_part_in_numbers_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block and some tokens of the second have logit -inf; id 30 is beyond the vocabulary."""
    monkeypatch.setattr(chunked, "BLOCK_NUMBERS", {"cpu": 20})
    torch.manual_seed(0)
    model, hidden = Head(6, 20, bias=True), torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        model.lm_head.bias[:7] = -torch.inf
    found = score_hidden([model], [hidden], torch.tensor([9, 3, 30, 19]), (logp, entropy), 1.0)
    assert found[0].isneginf().tolist() == [False, True, True, False]
    possible = (hidden.double() @ model.lm_head.weight.double().t() + model.lm_head.bias)[:, 7:].log_softmax(-1)
    torch.testing.assert_close(found[1].double(), -(possible.exp() * possible).sum(-1), atol=1e-5, rtol=1e-5)
    keep = [0, 3]
    slopes = gradients(found[:, keep], torch.ones(2, 2), [hidden, model.lm_head.weight])
    exact = possible[keep, [2, 12]].sum() - (possible.exp() * possible).sum(-1)[keep].sum()
    for a, b in zip(slopes, torch.autograd.grad(exact, [hidden, model.lm_head.weight]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_autocast_multiplies_in_its_type_and_sums_in_float32() -> None:
    torch.manual_seed(0)
    model, hidden = Head(64, 3000), torch.randn(5, 64, requires_grad=True)
    tokens = torch.randint(3000, (5,))
    with torch.autocast("cpu", torch.bfloat16):
        found = score_hidden([model], [hidden], tokens, (logp, entropy), 1.0)
    assert found.dtype == torch.float32
    plain = (hidden.bfloat16() @ model.lm_head.weight.bfloat16().t()).float().log_softmax(-1)
    torch.testing.assert_close(found[0], logp(plain, tokens), atol=1e-5, rtol=0)
    for slope in gradients(found, torch.ones(2, 5), [hidden, model.lm_head.weight]):
        assert slope.dtype == torch.float32
        assert slope.isfinite().all()


@pytest.mark.parametrize("trained", [True, False])
def test_the_backward_pass_of_frozen_projections_projects_nothing(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain, block = chunked.project, chunked._Blocks.logits
    monkeypatch.setattr(chunked, "project", lambda *args: calls.append(1) or plain(*args))
    monkeypatch.setattr(chunked._Blocks, "logits", lambda *args: calls.append(1) or block(*args))
    model, hidden = Head(6, 20).requires_grad_(trained), torch.randn(4, 6, requires_grad=True)
    values = score_hidden([model], [hidden], torch.zeros(4, dtype=torch.long), (logp,), 1.0)
    assert len(calls) == 1
    values.sum().backward()
    assert len(calls) == (2 if trained else 1)


def test_no_tensor_of_tokens_by_vocabulary_exists_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """P01: no second (B, T, V) tensor, nor a first."""
    monkeypatch.setattr(chunked, "BLOCK_NUMBERS", {"cpu": 2**12})
    rows, vocabulary = 256, 2000
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(each, Tensor):
                    largest = max(largest, each.untyped_storage().nbytes() // 4)
            return out

    model, hidden = Head(8, vocabulary), torch.randn(rows, 8, requires_grad=True)
    tokens = torch.randint(vocabulary, (rows,))
    with Watch():
        values = score_hidden([model], [hidden], tokens, (logp, entropy), 1.0)
        values.sum().backward()
    assert largest == vocabulary * 8  # the weights' own gradient
    assert largest < rows * vocabulary / 4
    expected = in_float64([model], [hidden], tokens, (logp, entropy), 1.0)
    torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=1e-5)


def test_no_tokens_have_no_numbers() -> None:
    assert score_hidden(
        [Head(4, 9)], [torch.zeros(0, 4)], torch.zeros(0, dtype=torch.long), (logp, entropy), 1.0
    ).shape == (2, 0)


def test_a_soft_cap_and_a_hook_are_not_passed_over() -> None:
    torch.manual_seed(0)
    capped, hooked = Head(6, 20, softcap=2.0), Head(6, 20)
    hooked.lm_head.register_forward_hook(lambda module, args, out: out + torch.arange(20.0))
    hidden, tokens = 9 * torch.randn(4, 6), torch.tensor([0, 5, 9, 19])
    torch.testing.assert_close(
        score_hidden([capped], [hidden], tokens, (logp,), 1.0).double(),
        in_float64([capped], [hidden], tokens, (logp,), 1.0), atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    logits = hidden @ hooked.lm_head.weight.t() + torch.arange(20.0)
    expected = logits.log_softmax(-1)[torch.arange(4), tokens][None]
    torch.testing.assert_close(score_hidden([hooked], [hidden], tokens, (logp,), 1.0), expected, atol=1e-4, rtol=1e-5)
    assert not math.isclose(expected[0, 0].item(), 0.0)
