"""Forward passes of a few tokens through a model of Llama's shape, without what its modules cost.

A good part of a decode step of a small model on a CPU is time between operations: the modules of transformers call each
other, and turn queries and keys one after the other. What is computed here is the same (`lean` compares), in half as many
operations: an eighth of a step of 8 or 32 rows of SmolLM2 (LOG.md). Letters in shapes: N tokens, V vocabulary, H heads, K heads of keys and values, E their width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from covary.attention import Forest, Layout, packed_inputs
from covary.fused import norm_of, normed
from covary.rollout.linear import side_by_side

if TYPE_CHECKING:  # transformers takes seconds to import, in which `covary check` has other work to do
    from transformers import PreTrainedModel

# By which the logits of the model's own pass and of this one may differ, relative to their size.
_TOLERANCE = 1e-5
_compared: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

Product = Callable[[Tensor], Tensor]
Norm = tuple[Tensor, float]
"""Weight and eps."""


def lean(model: PreTrainedModel) -> Lean | None:
    """A model's forward pass in this form, if it has the shape and computes the same; else None.

    The model has to attend as layouts say (`covary.attention.use_packed`). It is compared the first time.
    """
    if not _has_shape(model):
        return None
    found = Lean(model)
    if model not in _compared:
        _compared[model] = _agrees(model, found)
    return found if _compared[model] else None


class Lean:
    """Of a model whose weights are taken as they are now, or as `reordered_weights` has them."""

    def __init__(self, model: Any) -> None:
        base = model.base_model
        self.embed, self.rotary = base.embed_tokens, base.rotary_emb
        self.layers = [_Layer(layer) for layer in base.layers]
        self.norm = norm_of(base.norm)
        self.head = side_by_side([model.get_output_embeddings()])

    def __call__(
        self,
        tokens: Int[Tensor, " N"],
        positions: Int[Tensor, " N"],
        layout: Layout,
        wanted: Int[Tensor, " n"] | slice = slice(None),
    ) -> Float[Tensor, "n V"]:
        """Next-token logits after the wanted tokens."""
        x = self.embed(tokens)
        cos, sin = (part[0, :, None] for part in self.rotary(x[None], positions[None]))  # (N, 1, E)
        before, after = sin.chunk(2, dim=-1)
        sin = torch.cat([-before, after], dim=-1)  # of the other half of a head, with its sign
        for layer in self.layers:
            x = layer(x, cos, sin, layout)
        return self.head(normed(x[wanted], *self.norm))


class _Layer:
    def __init__(self, layer: Any) -> None:
        self.attention = attention = layer.self_attn
        self.width = attention.head_dim
        self.kv = attention.k_proj.out_features // self.width
        self.heads = attention.q_proj.out_features // self.width
        self.of_input, self.of_attended = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        self.of_heads = [norm_of(norm) for name, norm in attention.named_children() if name in _HEAD_NORMS]
        self.qkv = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = side_by_side([attention.o_proj])
        self.gate_and_up = side_by_side([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.down = side_by_side([layer.mlp.down_proj])

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        states = self.qkv(normed(x, *self.of_input)).unflatten(-1, (-1, self.width))  # (N, H + 2 K, E)
        turning, value = states.split([self.heads + self.kv, self.kv], dim=1)
        if self.of_heads:
            both = zip(turning.split([self.heads, self.kv], dim=1), self.of_heads, strict=True)
            turning = torch.cat([normed(part, *norm) for part, norm in both], dim=1)
        before, after = turning.chunk(2, dim=-1)
        turned = (turning * cos).addcmul_(torch.cat([after, before], dim=-1), sin)
        query, key = turned.split([self.heads, self.kv], dim=1)
        attended = layout.attend(self.attention, query, key, value, self.attention.scaling, None)
        x = x + self.out(attended.flatten(1))
        gate, up = self.gate_and_up(normed(x, *self.of_attended)).chunk(2, dim=-1)
        return x + self.down(silu(gate).mul_(up))


def _has_shape(model: Any) -> bool:
    """Whether its parts are those of Llama; what they compute is compared (`_agrees`)."""
    base, head = model.base_model, model.get_output_embeddings()
    parts = [getattr(base, name, None) for name in ("embed_tokens", "rotary_emb", "layers", "norm")]
    if not all(isinstance(part, nn.Module) for part in parts) or type(head) is not nn.Linear:
        return False
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    return norm_of(base.norm) is not None and all(map(_layer_has_shape, base.layers))


def _layer_has_shape(layer: Any) -> bool:
    children = dict(layer.named_children())
    if children.keys() != _LAYER:
        return False
    if not all(hasattr(children["self_attn"], name) for name in ("head_dim", "scaling")):
        return False
    attention, mlp = (dict(children[name].named_children()) for name in ("self_attn", "mlp"))
    if attention.keys() not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or mlp.keys() != _MLP:
        return False
    linear = [*(attention[name] for name in _ATTENTION), *(mlp[name] for name in _MLP - {"act_fn"})]
    norms = [norm_of(children[name]) for name in ("input_layernorm", "post_attention_layernorm")]
    norms += [norm_of(attention[name]) for name in _HEAD_NORMS & attention.keys()]
    return all(type(part) is nn.Linear for part in linear) and None not in norms


def _agrees(model: PreTrainedModel, found: Lean) -> bool:
    device = model.device
    tokens, positions = torch.tensor([0, 1, 2, 3, 1], device=device), torch.tensor([0, 1, 2, 0, 1], device=device)
    layout = Forest.of([3, 2], [], [], device)
    with torch.no_grad():
        own = model(**packed_inputs(tokens, positions, device), layout=layout).logits[0].float()
        try:
            difference = (found(tokens, positions, layout).float() - own).norm()
        except RuntimeError:  # shapes that do not fit each other: heads of which a part is turned, say
            return False
    return bool(difference <= _TOLERANCE * own.norm())
