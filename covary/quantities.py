"""Log-prob chunks -> numbers per token: the only mathematics over the vocabulary.

Every quantity is a pure function `(log-prob chunk(s) (N, V), tokens (N,)) -> (N,)`, in nats. The
chunks are float32 log-softmax outputs; an entry may be -inf (a token the model cannot produce).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor


def logp(logps: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Log-prob of the token itself."""
    return logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy(logps: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Entropy of the next-token distribution, in [0, log V]."""
    possible = logps.isfinite()
    # The inner where keeps the gradient finite: 0 * -inf would be NaN in the backward pass too.
    return -torch.where(possible, logps.exp() * torch.where(possible, logps, 0.0), 0.0).sum(-1)


def kl(p: Float[Tensor, "N V"], q: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Exact KL(p || q) of two next-token distributions; inf where q lacks a token that p has."""
    possible = p.exp() > 0  # mass that underflows counts as none: 0 * inf would be NaN
    difference = torch.where(possible, p, 0.0) - torch.where(possible, q, 0.0)
    return torch.where(possible, p.exp() * difference, 0.0).sum(-1)


def prob(logps: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Probability of the token itself, in [0, 1]."""
    return logp(logps, tokens).exp()


def mixture_kl(
    weight: float, p: Float[Tensor, "N V"], q: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Exact KL(m || p) of the mixture m = weight p + (1 - weight) q, 0 < weight < 1; inf where p lacks a token of q."""
    neither = torch.isneginf(p) & torch.isneginf(q)  # logaddexp has no gradient there
    a, b = (torch.where(neither, 0.0, x) for x in (p, q))
    mixture = torch.logaddexp(a + math.log(weight), b + math.log1p(-weight))
    return kl(torch.where(neither, -torch.inf, mixture), p, tokens)


QUANTITIES: dict[str, Callable[..., Tensor]] = {
    "logp": logp,
    "prob": prob,
    "entropy": entropy,
    "kl": kl,
    "mixture_kl": mixture_kl,
}
