"""The mathematics that algorithms share: masked and grouped reductions, clipping, KL estimators.

All are pure, differentiable functions of tensors. Masked entries may hold anything, -inf and NaN
included: they are selected away with `where`, never multiplied by zero (math: 0 * -inf is NaN).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before `exp` (as verl does): e^20 is far outside every clip range and finite."""


def masked_sum(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum over the tokens of each row."""
    return torch.where(mask, x, 0.0).sum(-1)


def masked_mean(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Mean over the tokens of each row; 0 for a row without tokens."""
    return masked_sum(x, mask) / mask.sum(-1).clamp(min=1)


def group_sum(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " G"]:
    """Sum over the rows of each group; group ids are dense."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    return x.new_zeros(num_groups).index_add(0, group, x)


def group_size(group: Int[Tensor, " B"]) -> Int[Tensor, " G"]:
    """Rows per group."""
    return torch.bincount(group)


def center(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Each row minus the mean of its group."""
    mean = group_sum(x, group) / group_size(group)
    return x - mean[group]


def group_variance(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " G"]:
    """Unbiased variance (n - 1) within each group; 0 for a group of one."""
    return group_sum(center(x, group).square(), group) / (group_size(group) - 1).clamp(min=1)


def all_equal(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " G"]:
    """Groups in which every row has exactly the same number (rounding of a mean cannot hide it)."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    low = x.new_full((num_groups,), torch.inf).scatter_reduce(0, group, x, "amin")
    high = x.new_full((num_groups,), -torch.inf).scatter_reduce(0, group, x, "amax")
    return low == high


def standardise(x: Float[Tensor, " B"], group: Int[Tensor, " B"], eps: float) -> Float[Tensor, " B"]:
    """Centred and divided by the group's unbiased standard deviation plus `eps`; 0 where all are equal."""
    std = group_variance(x, group).sqrt()
    return torch.where(all_equal(x, group)[group], 0.0, center(x, group) / (std[group] + eps))


def log_ratio(
    policy: Float[Tensor, "B T"], other: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Log policy - log other per token, 0 where masked: whatever stands there reaches neither value nor gradient."""
    return torch.where(mask, policy - other, 0.0)


def ratio(log_ratio: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """exp(log_ratio), finite for every input: clamped at e^20 and e^-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Float[Tensor, "B T"], advantages: Float[Tensor, " B"], low: float, high: float
) -> Float[Tensor, "B T"]:
    """PPO's min(r A, clip(r, 1 - low, 1 + high) A) per token, to be maximised (arXiv 1707.06347, eq. 7)."""
    r = ratio(log_ratio)
    a = advantages.unsqueeze(-1)
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def clip_fraction(
    log_ratio: Float[Tensor, "B T"], advantages: Float[Tensor, " B"], mask: Bool[Tensor, "B T"], low: float, high: float
) -> float:
    """Share of tokens whose gradient the clip removes."""
    r = ratio(log_ratio)
    a = advantages.unsqueeze(-1)
    clipped = ((r > 1 + high) & (a > 0)) | ((r < 1 - low) & (a < 0))
    return float((clipped & mask).sum() / mask.sum().clamp(min=1))


def k3(log_ratio: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """exp(-d) - 1 + d >= 0 for d = log p - log q: unbiased for KL(p||q) under samples of p, in its stable form.

    Its *value* estimates KL(p||q); its gradient through d on samples of p is that of KL(q||p)
    (math: the table of k1, k2, k3). Clamped at |d| = 20.
    """
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d
