"""The mathematics that algorithms share: masked and grouped reductions, clipping, KL estimators.

All are pure, differentiable functions of tensors. Masked entries may hold anything, -inf and NaN
included: they are selected away with `where`, never multiplied by zero (math: 0 * -inf is NaN).
"""

from __future__ import annotations

from collections.abc import Callable

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
    """Each row minus the mean of its group; exactly 0 where all rows of the group are equal.

    A mean of equal numbers may be off by rounding, which an optimizer that divides by the gradient's size would turn into
    whole steps. So rows are taken relative to one of their group first.
    """
    if not group.numel():
        return x
    origin = x.new_full((int(group.max()) + 1,), torch.inf).scatter_reduce(0, group, x.detach(), "amin")
    x = x - origin[group]
    return x - (group_sum(x, group) / group_size(group))[group]


def group_variance(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " G"]:
    """Unbiased variance (n - 1) within each group; 0 for a group of one."""
    return group_sum(center(x, group).square(), group) / (group_size(group) - 1).clamp(min=1)


def group_covariance(x: Float[Tensor, " B"], y: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " G"]:
    """Unbiased covariance (n - 1) within each group; 0 for a group of one."""
    product = center(x, group) * center(y, group)
    return group_sum(product, group) / (group_size(group) - 1).clamp(min=1)


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


def leave_one_out(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Each row minus the mean of the *other* rows of its group; 0 for a group of one."""
    size = group_size(group)[group]
    return center(x, group) * size / (size - 1).clamp(min=1)


def first_best(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """The row with the largest number of each group, the first of them where several share it."""
    rows = torch.arange(len(x), device=x.device)
    best = x.new_full((int(group.max()) + 1 if len(x) else 0,), -torch.inf).scatter_reduce(0, group, x, "amax")
    candidate = torch.where(x == best[group], rows, len(x))
    first = candidate.new_full(best.shape, len(x)).scatter_reduce(0, group, candidate, "amin")
    return rows == first[group]


def whiten(
    x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], reduce: Callable[[Tensor], Tensor]
) -> Float[Tensor, "B T"]:
    """Minus the mean, divided by the population standard deviation, over the masked entries of all ranks; 0 elsewhere."""
    kept = torch.where(mask, x, 0.0).double()
    count, total = reduce(torch.stack([mask.sum().double(), kept.sum()]))
    mean = total / count.clamp(min=1)
    variance = reduce(torch.where(mask, kept - mean, 0.0).square().sum()) / count.clamp(min=1)
    return torch.where(mask, (kept - mean) / (variance + 1e-8).sqrt(), 0.0).to(x.dtype)


def return_after(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], gamma: float = 1.0) -> Float[Tensor, "B T"]:
    """Discounted sum over the tokens after each one: sum over i > t of gamma^(i-t-1) x_i; 0 at the last token.

    Distances count from the token itself, in masked-in tokens: a weight by position (gamma^i) would fade late tokens.
    """
    total = x.new_zeros(len(x))
    after = []
    for t in reversed(range(x.shape[1])):
        after.append(total)
        total = torch.where(mask[:, t], x[:, t] + gamma * total, total)
    return torch.stack(after[::-1], dim=1) if after else torch.zeros_like(x)


def ratio(log_ratio: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """exp(log_ratio), finite for every input: clamped at e^20 and e^-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Float[Tensor, "*S"], advantages: Float[Tensor, "..."], low: float, high: float
) -> Float[Tensor, "*S"]:
    """PPO's min(r A, clip(r, 1 - low, 1 + high) A), to be maximised (arXiv 1707.06347, eq. 7).

    Per token with advantages (B, 1) or (B, T), per sequence with (B,).
    """
    _check_rank(log_ratio, advantages)
    r = ratio(log_ratio)
    return torch.minimum(r * advantages, r.clamp(1 - low, 1 + high) * advantages)


def clipped(
    log_ratio: Float[Tensor, "*S"], advantages: Float[Tensor, "..."], low: float, high: float
) -> Bool[Tensor, "*S"]:
    """Where the clip of `clipped_surrogate` removes the gradient."""
    _check_rank(log_ratio, advantages)
    r = ratio(log_ratio)
    return ((r > 1 + high) & (advantages > 0)) | ((r < 1 - low) & (advantages < 0))


def _check_rank(log_ratio: Tensor, advantages: Tensor) -> None:
    # (B,) against (B, T) would broadcast rows over tokens where B equals T.
    if advantages.ndim != log_ratio.ndim:
        raise ValueError(f"advantages of {advantages.ndim} dimension for log-ratios of {log_ratio.ndim}")


def share(where: Bool[Tensor, "*S"], mask: Bool[Tensor, "*S"]) -> float:
    """Share of the masked entries that are true; 0 where nothing is masked in."""
    return float((where & mask).sum() / mask.sum().clamp(min=1))


def check_clip(low: float, high: float) -> None:
    """A ratio's clip range: below 1 by less than 1, above by anything.

    Raises:
        ValueError: naming the number.
    """
    if not 0 < low < 1:
        raise ValueError(f"the lower clip takes a number between 0 and 1, got {low}")
    if not high > 0:
        raise ValueError(f"the upper clip takes a number above 0, got {high}")


def k3(log_ratio: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """exp(-d) - 1 + d >= 0 for d = log p - log q: unbiased for KL(p||q) under samples of p, in its stable form.

    Its *value* estimates KL(p||q); its gradient through d on samples of p is that of KL(q||p)
    (math: the table of k1, k2, k3). Clamped at |d| = 20.
    """
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d
