"""Drawing tokens: one uniform number per row, whatever the size of the vocabulary.

Letters in shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch

# Vocabulary entries per bin of the two-level inverse CDF: a running sum over V costs more than all the
# rest of sampling, sums over bins cost next to nothing.
_BIN = 256


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, greedy: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row from softmax(logits / temperature), by the inverse CDF at one uniform number.

    Args:
        logits: (R, V), float32; -inf excludes a token for certain.
        temperature: (R,), positive; divides greedy rows' logits too, so pass 1 there.
        greedy: (R,), bool: rows that take the most likely token instead.
        uniforms: (R,), float64, in [0, 1).

    Returns:
        Tokens (R,) and their log-probs (R,) in nats.
    """
    rows, vocabulary = logits.shape
    num_bins = -(-vocabulary // _BIN)
    top = logits.amax(-1, keepdim=True)
    weights = logits.new_empty(rows, num_bins * _BIN)
    # Powers of 2 are several times faster than those of e on a CPU.
    torch.sub(logits, top, out=weights[:, :vocabulary]).mul_(math.log2(math.e) / temperature[:, None]).exp2_()
    weights[:, vocabulary:] = 0
    binned = weights.view(rows, num_bins, _BIN)
    totals = binned.sum(-1)  # (R, bins)
    bins, rest = _inverse_cdf(totals, uniforms)
    row = torch.arange(rows, device=logits.device)
    inner, _ = _inverse_cdf(binned[row, bins], rest)
    tokens = bins * _BIN + inner
    # Where rounding led to a token of probability zero, the most likely one is a choice the policy can make.
    most_likely = greedy | ~(weights[row, tokens] > 0)
    if most_likely.any():
        tokens[most_likely] = logits[most_likely].argmax(-1)
    shifted = (logits[row, tokens] - top[:, 0]) / temperature
    return tokens, shifted - totals.sum(-1).log()


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row, the index (R,) of `weights` (R, n) into which `uniforms` (R,) falls, and how far into it, in [0, 1]."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    target = (uniforms * cdf[:, -1])[:, None]
    index = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index)
    rest = (target - (cdf.gather(-1, index) - weight)) / weight
    return index[:, 0], rest[:, 0].clamp(0, 1)
