"""Matrix products of a few rows on a CPU, at the speed of its memory.

A decode step multiplies every weight matrix with a handful of rows. Most of its time goes into reading weights, which
the CPU's library does faster when they lie in the order in which it multiplies (benchmarks/linear.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

# Rows beyond which plain products are as fast.
_MOST_ROWS = 512
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
    layers = {layer: None for model in models for layer in model.modules()}  # models may share some
    mine = [
        layer
        for layer in layers
        if type(layer) is nn.Linear
        and layer.weight.device.type == "cpu"
        and "forward" not in layer.__dict__
        and _is_supported(autocast or layer.weight.dtype)
    ]
    try:
        for layer in mine:
            layer.forward = _Product(layer, autocast or layer.weight.dtype)
        yield
    finally:
        for layer in mine:
            layer.__dict__.pop("forward", None)


def _is_supported(dtype: torch.dtype) -> bool:
    """Whether the library is there, and has products of this type on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Product:
    """x -> x @ weight.T + bias."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        self.layer = layer
        self.dtype = dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
        self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > _MOST_ROWS:
            return linear(x, self.layer.weight, self.layer.bias)
        x = x.to(self.dtype)
        if not (missing := good_rows(rows) - rows):
            return _multiply(x, self.weight, self.bias, "none", [], "")
        padded = pad(x.reshape(rows, -1), (0, 0, 0, missing))
        return _multiply(padded, self.weight, self.bias, "none", [], "")[:rows].view(*x.shape[:-1], -1)


def good_rows(rows: int) -> int:
    """This number, rounded up to one whose products need no padding.

    The library keeps code and buffers for every number of rows that it has met: its memory would grow with a run's steps.
    """
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return rows + -rows % step
