"""The mathematics that algorithms share: masked and grouped reductions, clipping, KL estimators.

All are pure, differentiable functions of tensors. Masked entries may hold anything, -inf and NaN
included: they are selected away with `where`, never multiplied by zero (math: 0 * -inf is NaN).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before `exp` (as verl does): e^20 is far outside every clip range and finite."""

Likelihood = Literal["sum", "mean", "prob", "geo", "mean_prob"]
"""What is made of the log-probs of a reference answer's tokens, see `likelihood`."""


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


def log_mixture(p: Float[Tensor, "*S"], q: Float[Tensor, "*S"], weight: float) -> Float[Tensor, "*S"]:
    """log(weight exp(p) + (1 - weight) exp(q)) of log-probs, without leaving the logarithm."""
    parts = [math.log(w) if w > 0 else -math.inf for w in (weight, 1 - weight)]
    return torch.logaddexp(p + parts[0], q + parts[1])


def likelihood(logps: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], kind: Likelihood) -> Float[Tensor, " B"]:
    """A reference answer's likelihood from the log-probs of its tokens; NaN for a row without answer tokens.

    Args:
        logps: log-probs, in nats.
        mask: the answer's tokens.
        kind: `sum` log p(y), in nats (the ELBO's); `mean` of the tokens' log-probs; `prob` p(y); `geo` the geometric and
            `mean_prob` the arithmetic mean of the tokens' probabilities (RLPR: the latter is robust to one rare token).
    """
    length = mask.sum(-1)
    total = masked_sum(logps, mask)
    mean = total / length.clamp(min=1)
    values = {
        "sum": lambda: total,
        "mean": lambda: mean,
        "prob": total.exp,
        "geo": mean.exp,
        "mean_prob": lambda: masked_mean(logps.exp(), mask),
    }
    return torch.where(length > 0, values[kind](), torch.nan)


def fill_with_least(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """NaN replaced by the smallest number of the row's group, and by that of all rows in a group of nothing but NaN.

    So the rows of such a group are equal, and nothing is learned from their differences.
    """
    num_groups = int(group.max()) + 1 if group.numel() else 0
    known = torch.where(x.isnan(), torch.inf, x)
    least = x.new_full((num_groups,), torch.inf).scatter_reduce(0, group, known, "amin")
    least = torch.where(least.isinf(), least.amin() if num_groups else torch.inf, least)
    return torch.where(x.isnan(), torch.where(least.isinf(), torch.nan, least)[group], x)


def group_logsumexp(x: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " G"]:
    """Log sum exp over the rows of each group; -inf for a group without rows."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    top = x.detach().new_full((num_groups,), -torch.inf).scatter_reduce(0, group, x.detach(), "amax")
    top = torch.where(top.isfinite(), top, 0.0)
    return top + group_sum((x - top[group]).exp(), group).log()


def row_surrogate(
    log_ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    low: float,
    high: float,
) -> Float[Tensor, " B"]:
    """`clipped_surrogate` of one advantage per row, averaged over the row's tokens (GRPO's aggregation)."""
    return masked_mean(clipped_surrogate(log_ratio, advantage.unsqueeze(-1), low, high), mask)


def importance_k3(
    log_p: Float[Tensor, "*S"], log_q: Float[Tensor, "*S"], log_den: Float[Tensor, "*S"]
) -> Float[Tensor, "*S"]:
    """W (u - 1 - log u) >= 0 with w = p / den, u = q / p: its mean over samples of den is KL(p || q).

    With p and q live and den not, its mean gradient is that of the KL too; with a live den it is not. expm1, because
    u - 1 - log u cancels to 0 in float32 near u = 1.
    """
    log_u = log_q - log_p
    return ratio(log_p - log_den) * (torch.expm1(log_u.clamp(max=MAX_LOG_RATIO)) - log_u)


def added_to_bound(s: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """What each row adds to log(mean exp s) of its group: with it, less without it; 0 for a group of one."""
    size = group_size(group)[group].to(s.dtype)
    others = torch.full_like(s, -torch.inf)
    for g in range(int(group.max()) + 1 if group.numel() else 0):
        # Taken row by row: with one dominant row, whole minus row would cancel to nothing.
        rows = (group == g).nonzero().squeeze(1)
        without = s[rows].repeat(len(rows), 1).fill_diagonal_(-torch.inf)
        others[rows] = without.logsumexp(-1)
    added = (group_logsumexp(s, group)[group] - size.log()) - (others - (size - 1).clamp(min=1).log())
    return torch.where(size > 1, added, 0.0)


def above_baseline(
    x: Float[Tensor, " B"], of_baseline: Bool[Tensor, " B"], group: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """How far each row lies above the mean of its group's baseline rows, at least 0; a row of NaN gets 0.

    NaN for a group whose baseline has no number.
    """
    known = of_baseline & ~x.isnan()
    count = group_sum(known.to(x.dtype), group)
    baseline = group_sum(torch.where(known, x, 0.0), group) / count  # 0 / 0 is NaN
    above = torch.where(x.isnan(), 0.0, (x - baseline[group]).clamp(min=0))
    return torch.where((count > 0)[group], above, torch.nan)
