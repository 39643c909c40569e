"""Norms and gated products against the modules of transformers that they stand for (covary/fused.py)."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from covary.fused import _Gated, _Norm, use_fused
from tests.models import FAMILIES, random_model


def fused(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in module.__dict__}


def of_model(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of a sum of their squares."""
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_keeps_its_logits_and_gradients(family: str) -> None:
    model = random_model(family)
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.weight.normal_()  # pyright: ignore[reportAttributeAccessIssue]
    other = deepcopy(model)
    use_fused(other)
    expected = {"llama": {"LlamaRMSNorm", "LlamaMLP"}, "qwen2": {"Qwen2RMSNorm", "Qwen2MLP"}}
    expected |= {"qwen3": {"Qwen3RMSNorm", "Qwen3MLP"}}
    assert fused(other) == expected.get(family, set())
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    (plain, of_plain), (logits, gradients) = of_model(model, ids), of_model(other, ids)
    torch.testing.assert_close(logits, plain, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == of_plain.keys()
    for name, gradient in gradients.items():
        assert (gradient - of_plain[name]).norm() <= 1e-5 * of_plain[name].norm(), name


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = random_model("llama")
    use_fused(model)
    ids = torch.arange(9)[None]
    copied = deepcopy(model)
    before = model(input_ids=ids).logits
    with torch.no_grad():
        for module in copied.modules():
            if type(module).__name__ in ("LlamaRMSNorm", "LlamaMLP"):
                for parameter in module.parameters():
                    parameter.mul_(1.5)
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=0, rtol=0)
    plain = random_model("llama")
    plain.load_state_dict(copied.state_dict())
    torch.testing.assert_close(copied(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_derivatives_by_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5,)))
    assert gradcheck(lambda x, w: _Norm.apply(x, w, 1e-6), (x, weight))
    gate, up = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(_Gated.apply, (gate, up))


@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_a_norm_gives_the_types_of_its_module(of_input: torch.dtype, of_weight: torch.dtype) -> None:
    norm = LlamaRMSNorm(6)
    nn.init.normal_(norm.weight)
    norm = norm.to(of_weight)
    x, other = (torch.linspace(-1, 2, 12).view(2, 6).to(of_input).requires_grad_() for _ in range(2))
    ours, theirs = _Norm.apply(x, norm.weight, 1e-6), norm(other)
    assert ours.dtype == theirs.dtype  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=1e-2)
    ours.sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    theirs.sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=2e-2, rtol=2e-2)


def test_less_is_kept_for_the_backward_pass() -> None:
    model = random_model("llama")

    def kept() -> int:
        sizes: dict[int, int] = {}  # storages are kept once however often they are saved
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=torch.zeros(1, 64, dtype=torch.long)).logits.sum()
        found = sum(sizes.values())
        del loss
        return found

    before = kept()
    use_fused(model)
    assert kept() < 0.8 * before


def test_a_norm_of_another_kind_is_left_alone() -> None:
    model = nn.Sequential(Gemma3RMSNorm(4), LlamaRMSNorm(4).to(torch.bfloat16), LlamaRMSNorm(4))
    nn.init.ones_(model[0].weight)
    use_fused(model)
    assert ["forward" in module.__dict__ for module in model] == [False, False, True]


class GatedRMSNorm(LlamaRMSNorm):
    """Of the same parts, and the same numbers as long as nobody gives it a gate, as Mamba's."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


class PairRMSNorm(LlamaRMSNorm):
    """One that cannot be called with states alone."""

    def forward(self, hidden_states: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(hidden_states) + other


def test_a_norm_that_reads_more_than_its_states_is_left_alone() -> None:
    model = nn.ModuleList([GatedRMSNorm(4), PairRMSNorm(4)])
    use_fused(model)
    assert fused(model) == set()
    torch.testing.assert_close(model[0](torch.ones(2, 4), torch.zeros(2, 4)), torch.zeros(2, 4))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    x[1, 2] = torch.nan
    x.requires_grad_()
    out: Any = _Norm.apply(x, weight, 1e-6)
    out[[0, 2]].sum().backward()
    assert out.isfinite().all(-1).tolist() == [True, False, True]
    assert x.grad is not None
    assert x.grad[[0, 2]].isfinite().all()
