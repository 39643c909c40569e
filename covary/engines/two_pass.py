"""The gradient of a coupled loss over more rows than fit one forward pass.

Pass 1 gives the scores of the whole group without gradient, autograd on that small tensor gives
dloss/dscores, and pass 2 runs any parts of the group with those numbers as weights: the same gradient
(the chain rule), at the cost of one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores


def two_pass_backward(
    algorithm: Algorithm,
    batch: Batch,
    known: Scores,
    live: Callable[[Sequence[int]], Scores],
    parts: Sequence[Sequence[int]],
) -> Tensor:
    """Accumulate the gradient of `algorithm.loss` over `batch`, if the loss is finite; returns the loss.

    Args:
        algorithm: its loss is evaluated on the whole batch.
        batch: whole groups, finite rows only.
        known: detached scores of all rows at the current parameters (pass 1).
        live: scores with gradient of some rows of the batch.
        parts: a partition of the batch's rows, each of which fits one forward pass.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in known.items()}
    loss = algorithm.loss(leaves, batch)
    if not loss.isfinite():
        return loss.detach()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    for rows in parts:
        surrogate: list[Tensor] = []
        for name, value in live(rows).items():
            weight = gradients[name]
            if weight is None:
                continue
            weight = weight[torch.as_tensor(rows, device=weight.device)]
            surrogate.append(torch.where(weight != 0, value * weight, 0.0).sum())
        if surrogate:
            torch.stack(surrogate).sum().backward()
    return loss.detach()
