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
    """Log-prob of the token itself; -inf for an id that the model lacks (the padding of another's vocabulary)."""
    known = tokens < logps.shape[-1]
    chosen = logps.gather(-1, torch.where(known, tokens, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(known, chosen, -torch.inf)


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


def tempered_kl(
    temperature: float, p: Float[Tensor, "N V"], q: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """KL(p || q) of both distributions at a temperature: their log-probs are divided by it and normalised again."""
    return kl(torch.log_softmax(p / temperature, -1), torch.log_softmax(q / temperature, -1), tokens)


def jsd(
    beta: float, p: Float[Tensor, "N V"], q: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Generalised Jensen-Shannon divergence: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    GKD's (arXiv 2306.13649, eq. 1) for p the teacher and q the student. At most log 2. Its ends are KL(p || q) for
    beta = 0 and KL(q || p) for beta = 1, the limits of jsd / beta and jsd / (1 - beta): jsd itself vanishes there, so
    the quantity jumps at both ends.
    """
    if beta in (0, 1):
        return kl(p, q, tokens) if beta == 0 else kl(q, p, tokens)
    # Two -inf have no log-sum with a gradient; a number whose exp is 0 stands for -inf, and is in no sum below.
    low = torch.finfo(p.dtype).min / 4
    m = torch.logaddexp(p.clamp(min=low) + math.log(beta), q.clamp(min=low) + math.log1p(-beta))
    return beta * kl(p, m, tokens) + (1 - beta) * kl(q, m, tokens)


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
    "tempered_kl": tempered_kl,
    "jsd": jsd,
    "mixture_kl": mixture_kl,
}
