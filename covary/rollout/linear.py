"""Matrix products of a few rows on a CPU, at the speed of its memory.

A decode step multiplies every weight matrix with a handful of rows. Most of its time goes into reading weights, which
the CPU's library does faster when they lie in the order in which it multiplies (benchmarks/linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

# Rows beyond which plain products are as fast.
_MOST_ROWS = 512
# What the models of transformers call layers that they give the same states: with few rows, one product is faster than several.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_multiply = torch.ops.mkldnn._linear_pointwise.default


@contextmanager
def reordered_weights(models: Sequence[nn.Module], autocast: torch.dtype | None) -> Iterator[None]:
    """Within, linear layers of models on a CPU multiply with reordered copies of their weights; nothing else changes.

    The copies take the memory of the weights once more, and know nothing of changes to them. Elsewhere, and where the
    library is missing or cannot multiply the type, this does nothing.

    Args:
        models: their parameters are not touched.
        autocast: compute type of the forward passes within; None for the weights' own.
    """
    modules = {module: None for model in models for module in model.modules()}  # models may share some
    products = [_Product(layers, autocast or layers[0].weight.dtype) for layers in _together(modules, autocast)]
    try:
        for product in products:
            for index, layer in enumerate(product.layers):
                layer.forward = _Part(product, index)
        yield
    finally:
        for product in products:
            for layer in product.layers:
                layer.__dict__.pop("forward", None)


def _together(modules: Iterable[nn.Module], autocast: torch.dtype | None) -> Iterator[list[nn.Linear]]:
    """The linear layers that this is for, those together that are given the same states."""
    for module in modules:
        apart = {
            name: [layer]
            for name, layer in module.named_children()
            if type(layer) is nn.Linear
            and layer.weight.device.type == "cpu"
            and "forward" not in layer.__dict__
            and _is_supported(autocast or layer.weight.dtype)
        }
        for names in _TOGETHER:
            alike = [layer for name in names for layer in apart.get(name, [])]
            if len(alike) == len(names) and len({(x.in_features, x.bias is None, x.weight.dtype) for x in alike}) == 1:
                yield alike
                apart = {name: layer for name, layer in apart.items() if name not in names}
        yield from apart.values()


def _is_supported(dtype: torch.dtype) -> bool:
    """Whether the library is there, and has products of this type on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Product:
    """x -> x @ weight.T + bias, of layers that are given the same x one after the other: one product for all of them."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        self.dtype = dtype
        weights = [layer.weight.detach().to(dtype) for layer in layers]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(_joined(weights))
        biases = [layer.bias.detach().to(dtype) for layer in layers if layer.bias is not None]
        self.bias = _joined(biases) if biases else None
        self.sizes = [layer.out_features for layer in layers]
        self._given: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def of(self, index: int, x: Tensor) -> Tensor:
        """What the layer of this index makes of x."""
        if x.numel() // x.shape[-1] > _MOST_ROWS:
            return linear(x, self.layers[index].weight, self.layers[index].bias)
        if x is not self._given:
            self._given, self._parts = x, self(x).split(self.sizes, dim=-1)
        part = self._parts[index]
        if index == len(self.layers) - 1:
            self._given, self._parts = None, ()  # no longer than it is needed
        return part

    def __call__(self, x: Tensor) -> Tensor:
        """What all of them make of x, side by side."""
        rows = x.numel() // x.shape[-1]
        if rows > _MOST_ROWS:
            return _plainly(self.layers, x)
        x = x.to(self.dtype)
        if not (missing := good_rows(rows) - rows):
            return _multiply(x, self.weight, self.bias, "none", [], "")
        padded = pad(x.reshape(rows, -1), (0, 0, 0, missing))
        return _multiply(padded, self.weight, self.bias, "none", [], "")[:rows].view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class _Part:
    """The forward pass of one of a product's layers."""

    product: _Product
    index: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.product.of(self.index, x)


def side_by_side(layers: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """What layers make of the same x, in one tensor: of one product, within `reordered_weights` that made one."""
    part = layers[0].__dict__.get("forward")
    if isinstance(part, _Part) and list(part.product.layers) == list(layers):
        return part.product
    return partial(_plainly, layers)


def _plainly(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    return _joined([linear(x, layer.weight, layer.bias) for layer in layers], dim=-1)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def good_rows(rows: int) -> int:
    """This number, rounded up to one whose products need no padding.

    The library keeps code and buffers for every number of rows that it has met: its memory would grow with a run's steps.
    """
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return rows + -rows % step
