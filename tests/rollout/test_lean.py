"""Forward passes of covary's own against those of the model (covary/rollout/lean.py)."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GraniteConfig, LlamaConfig, MistralConfig

from covary.attention import Forest, packed_inputs
from covary.fused import use_fused
from covary.models.lora import add_lora
from covary.rollout.decoding import SharedDecoding, decoding_of
from covary.rollout.lean import Lean, lean
from covary.rollout.linear import reordered_weights
from covary.settings import Lora
from tests.models import FAMILIES, random_model

SMALL: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip


def prepared(model: Any) -> Any:
    """As a rollout has it."""
    use_fused(model)
    assert decoding_of(model) == (SharedDecoding, None)
    return model


def built(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_()
    return prepared(model)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_the_models(family: str, autocast: torch.dtype | None) -> None:
    model = built(FAMILIES[family])
    layout = Forest.of([5, 3], [], [], torch.device("cpu"))
    tokens, positions = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    cast = torch.autocast("cpu", dtype=autocast, enabled=autocast is not None)
    with torch.no_grad(), reordered_weights([model], autocast), cast:
        found = lean(model)
        assert found is not None
        own = model(**packed_inputs(tokens, positions, torch.device("cpu")), layout=layout).logits[0]
        ours = found(tokens, positions, layout)
    tolerance = 1e-5 if autocast is None else 3e-2
    assert (ours.float() - own.float()).norm() <= tolerance * own.float().norm()


def test_a_model_of_the_same_parts_that_computes_something_else_is_not_taken() -> None:
    """Granite scales its residuals and embeddings."""
    model = built(GraniteConfig(**SMALL, residual_multiplier=0.5, embedding_multiplier=3.0))
    assert lean(model) is None


@pytest.mark.parametrize(
    "config",
    [FAMILIES["gemma3"], FAMILIES["gpt2"], MistralConfig(**SMALL, sliding_window=8), LlamaConfig(**SMALL, hidden_act="gelu")],
)  # fmt: skip
def test_other_shapes_are_not_taken(config: Any) -> None:
    assert lean(built(config)) is None


def test_adapters_hooks_and_modules_of_another_kind_are_not_passed_over() -> None:
    model = prepared(random_model("llama"))
    assert lean(model) is not None
    handle = model.model.layers[0].register_forward_hook(lambda *given: None)
    assert lean(model) is None
    handle.remove()
    assert lean(model) is not None
    add_lora(model, Lora(rank=2), "base")
    assert lean(model) is None


def test_weights_are_read_when_they_are_used() -> None:
    model = prepared(random_model("llama"))
    found = lean(model)
    assert isinstance(found, Lean)
    layout, tokens = Forest.of([3], [], [], torch.device("cpu")), torch.tensor([1, 2, 3])
    with torch.no_grad():
        before = found(tokens, torch.arange(3), layout)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(2)
        after = found(tokens, torch.arange(3), layout)
        own = model(**packed_inputs(tokens, torch.arange(3), torch.device("cpu")), layout=layout).logits[0]
    assert (after - before).norm() > 0.1 * before.norm()
    assert (after - own).norm() <= 1e-5 * own.norm()
