"""Root mean square norms and gated products of a model on a CPU, in fewer passes over memory.

As transformers writes them, both keep every number on their way for the backward pass, a fifth of the activations of a
small Llama. Here a norm keeps what it was given, and a gated product its two factors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

# By which a module's own numbers and those of this file may differ, relative to their size.
_TOLERANCE = 1e-5


@torch.no_grad()
def use_fused(model: nn.Module) -> None:
    """Let the norms and gated products of a float32 model on a CPU compute as this file does, if they compute the same.

    A module is known by its parts, and keeps its own way where that gives other numbers: Gemma's norms multiply by
    1 + weight.
    """
    for module in model.modules():
        if (found := _fused(module)) is None:
            continue
        forward, weight, width = found
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or "forward" in module.__dict__:
            continue
        if len(signature(module.forward).parameters) != 1:  # a norm with a gate, say, which is no mere function of x
            continue
        example = torch.linspace(-2, 3, 2 * width).view(1, 2, width)
        own = module(example)
        if float((forward(example) - own).norm()) <= _TOLERANCE * float(own.norm()):
            module.forward = forward


def norm_of(module: nn.Module) -> tuple[Tensor, float] | None:
    """Weight and eps of a norm that `use_fused` has taken; None for other modules."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, partial) and forward.func is _normed:
        return forward.args[0].weight, forward.args[1]
    return None


def normed(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*B D"]:
    """A norm of x, x / sqrt(mean of x**2 + eps) * weight over the last dimension; without gradient."""
    exact = _exact(x)
    return (exact * _inverse(exact, eps)).mul_(weight).to(torch.promote_types(x.dtype, weight.dtype))


def _fused(module: nn.Module) -> tuple[Callable[[Tensor], Tensor], Tensor, int] | None:
    """A module in the form of this file, one of its weights, and the width that it reads; None for other modules."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, Tensor)
        and isinstance(eps, float)
        and weight.ndim == 1
    ):
        return partial(_normed, module, eps), weight, len(weight)
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    gated = all(isinstance(part, nn.Module) for part in (gate, up, down))
    if gated and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation"):
        return partial(_gated, module), gate.weight, gate.in_features  # pyright: ignore[reportOptionalMemberAccess]
    return None


def _normed(module: nn.Module, eps: float, x: Tensor) -> Tensor:
    return _Norm.apply(x, module.weight, eps)  # pyright: ignore[reportReturnType]


def _gated(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(_Gated.apply(module.gate_proj(x), module.up_proj(x)))


class _Norm(torch.autograd.Function):
    """x / sqrt(mean of x**2 + eps) * weight, over the last dimension, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*B D"]:
        exact = _exact(x)
        inverse = _inverse(exact, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (exact * inverse).mul_(weight).to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normed = _exact(x) * inverse
        d_out, scale = _exact(d_out), _exact(weight)
        of_weight = d_out * normed
        along = (of_weight @ scale).div_(-x.shape[-1]).unsqueeze(-1)
        d_weight = of_weight.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        d_x = torch.mul(d_out, scale).addcmul_(normed, along).mul_(inverse)
        return d_x.to(x.dtype), d_weight if d_weight is None else d_weight.to(weight.dtype), None


class _Gated(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Float[Tensor, "*B"], up: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(d_out * up, gate), silu(gate).mul_(d_out)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of x**2 + eps), over the last dimension."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
