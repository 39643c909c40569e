"""Every algorithm as a slow loop over rows and tokens, written from its equation and not from `covary.ops`.

Scores are 0-dim tensors, so that autograd gives the reference gradient too. A row holds its sampled
tokens only: the loops know neither masks nor padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from covary.algorithms import GRPO, GVPO, SFT, DrGRPO


@dataclass(frozen=True)
class Row:
    """One completion: live and frozen log-probs of its sampled tokens, by name."""

    group: int
    reward: float
    live: dict[str, list[Tensor]]
    frozen: dict[str, list[float]]


def groups_of(rows: list[Row]) -> list[list[Row]]:
    """Rows by prompt."""
    return [[r for r in rows if r.group == g] for g in sorted({r.group for r in rows})]


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def zero() -> Tensor:
    """A sum without terms; its gradient is 0, not absent."""
    return torch.zeros((), dtype=torch.float64, requires_grad=True)


def gvpo(algorithm: GVPO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over prompts of 1 / (2 (k-1)) sum_i [beta (Delta_i - Deltabar) - (R_i - Rbar)]^2."""
    groups = groups_of(rows)
    loss = zero()
    for members in groups:
        k = len(members)
        if k == 1:
            continue  # a variance needs two
        deltas = []
        for row in members:
            delta = zero()
            for policy, reference in zip(row.live["policy"], row.frozen["reference"], strict=True):
                delta = delta + policy - reference
            deltas.append(delta)
        delta_bar = sum(deltas, zero()) / k
        reward_bar = mean([row.reward for row in members])
        for row, delta in zip(members, deltas, strict=True):
            residual = algorithm.beta * (delta - delta_bar) - (row.reward - reward_bar)
            loss = loss + residual**2 / (2 * (k - 1))
    return loss / len(groups)


def surrogate(policy: Tensor, old: float, advantage: float, clip: float) -> Tensor:
    """min(r A, clip(r) A), case by case: the clip acts only where it lowers the surrogate."""
    r = torch.exp(policy - old)
    if advantage >= 0 and r > 1 + clip:
        return r.detach() * 0 + (1 + clip) * advantage
    if advantage < 0 and r < 1 - clip:
        return r.detach() * 0 + (1 - clip) * advantage
    return r * advantage


def grpo(algorithm: GRPO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over rows of 1/|y| sum_t [-surrogate + kl_coef (e^{-d} - 1 + d)], A = (R - mean) / (std + 1e-6)."""
    loss = zero()
    for members in groups_of(rows):
        rewards = [row.reward for row in members]
        squares = [(reward - mean(rewards)) ** 2 for reward in rewards]
        std = math.sqrt(math.fsum(squares) / (len(members) - 1)) if len(members) > 1 else 0.0
        for row in members:
            advantage = 0.0 if std == 0 else (row.reward - mean(rewards)) / (std + 1e-6)
            for t, policy in enumerate(row.live["policy"]):
                term = -surrogate(policy, row.frozen["old"][t], advantage, algorithm.clip)
                if algorithm.kl_coef:
                    d = policy - row.frozen["initial"][t]
                    term = term + algorithm.kl_coef * (torch.exp(-d) - 1 + d)
                loss = loss + term / len(row.live["policy"])
    return loss / len(rows)


def dr_grpo(algorithm: DrGRPO, rows: list[Row], max_tokens: int) -> Tensor:
    """-1 / (rows * token limit) sum of all surrogates, A = R - mean."""
    loss = zero()
    for members in groups_of(rows):
        reward_bar = mean([row.reward for row in members])
        for row in members:
            for policy, old in zip(row.live["policy"], row.frozen["old"], strict=True):
                loss = loss - surrogate(policy, old, row.reward - reward_bar, algorithm.clip)
    return loss / (len(rows) * max_tokens)


def sft(algorithm: SFT, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean negative log-likelihood over all tokens of all rows."""
    terms = [policy for row in rows for policy in row.live["policy"]]
    return -sum(terms, zero()) / len(terms)
