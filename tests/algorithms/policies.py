"""Small policies: one token of six atoms, or a tree of tokens; exact expectations, gradients, optima. All float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from covary.algorithms import GVPO
from covary.batch import Batch
from tests.algorithms.helpers import make_batch

Leaves = Sequence[tuple[int, ...]]

BETA = 0.3
ATOMS = 6
ALGORITHM = GVPO(beta=BETA)
REWARDS = torch.tensor([0.0, 1.0, 0.3, 0.7, 0.1, 0.5], dtype=torch.float64)


def logits(seed: int, n: int = ATOMS) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


REFERENCE = logits(0).log_softmax(-1)
SAMPLERS = {
    "reference": REFERENCE.exp(),
    "uniform": torch.full((ATOMS,), 1 / ATOMS, dtype=torch.float64),
    "skewed": torch.tensor([0.5, 1e-6, 0.3, 1e-3, 0.1, 0.098999], dtype=torch.float64),
    "adversarial": (-REWARDS / BETA - REFERENCE).softmax(-1),  # rare where the optimum is likely
}


def total_variation(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum() / 2)


def optimum(reference: Tensor = REFERENCE, beta: float = BETA, rewards: Tensor = REWARDS) -> Tensor:
    """pi' exp(R / beta) / Z."""
    return (reference + rewards / beta).softmax(-1)


def batch_of(groups: Sequence[Sequence[int]], rewards: Tensor, reference: Tensor) -> Batch:
    """Groups of one-token completions, given by their atoms."""
    atoms = torch.tensor([atom for group in groups for atom in group])
    batch = make_batch(
        [g for g, group in enumerate(groups) for _ in group],
        rewards=rewards[atoms].tolist(),
        numbers={"reference": reference[atoms].unsqueeze(-1)},
    )
    return batch.with_totals()


def loss_of(
    logps: Tensor,
    groups: Sequence[Sequence[int]],
    rewards: Tensor = REWARDS,
    reference: Tensor = REFERENCE,
    algorithm: GVPO = ALGORITHM,
) -> Tensor:
    """GVPO.loss of sampled groups under a policy's log-probs per atom."""
    atoms = torch.tensor([atom for group in groups for atom in group])
    batch = batch_of(groups, rewards, reference)
    return algorithm.loss({"policy": logps[atoms].unsqueeze(-1)}, batch)


def expected_loss(
    sampler: Tensor,
    rewards: Tensor = REWARDS,
    reference: Tensor = REFERENCE,
    algorithm: GVPO = ALGORITHM,
) -> Callable[[Tensor], Tensor]:
    """Per-atom log-probs -> E[loss] over pairs drawn from `sampler`, exactly (a pair of twins has loss 0)."""
    pairs = [
        (2 * sampler[i] * sampler[j], torch.tensor([i, j]), batch_of([[i, j]], rewards, reference))
        for i, j in itertools.combinations(range(len(sampler)), 2)
        if sampler[i] > 0 and sampler[j] > 0
    ]

    def expectation(logps: Tensor) -> Tensor:
        terms = [
            weight * algorithm.loss({"policy": logps[atoms].unsqueeze(-1)}, batch) for weight, atoms, batch in pairs
        ]
        return torch.stack(terms).sum()

    return expectation


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    z = at.clone().requires_grad_()
    return torch.autograd.grad(function(z), z)[0]


def of_logits(function_of_logps: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: function_of_logps(z.log_softmax(-1))


def minimise(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """L-BFGS with strong Wolfe line search, run until nothing moves; restarts clear a stale curvature."""
    z = start.clone().requires_grad_()
    for _ in range(3):
        optimizer = torch.optim.LBFGS(
            [z],
            max_iter=300,
            tolerance_grad=1e-14,
            tolerance_change=1e-30,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023 - called inside this iteration only
            loss = function(z)
            loss.backward()
            return loss

        optimizer.step(closure)
    return z.detach()


class Trees:
    """Completions of several tokens: three tokens, the last one ends; at most three tokens."""

    LENGTH, VOCABULARY, END = 3, 3, 2

    @classmethod
    def leaves(cls) -> Leaves:
        """Every completion of the capped policy, the truncated ones (without an end) included."""
        ended = [
            (*prefix, cls.END) for n in range(cls.LENGTH) for prefix in itertools.product(range(cls.END), repeat=n)
        ]
        return ended + list(itertools.product(range(cls.END), repeat=cls.LENGTH))

    @classmethod
    def prefixes(cls) -> dict[tuple[int, ...], int]:
        nodes = [p for n in range(cls.LENGTH) for p in itertools.product(range(cls.END), repeat=n)]
        return {prefix: i for i, prefix in enumerate(nodes)}

    @classmethod
    def token_logps(cls, theta: Tensor, leaf: tuple[int, ...]) -> Tensor:
        """(T,) log-probs of a completion's tokens; theta is (prefixes, vocabulary)."""
        node = cls.prefixes()
        logps = theta.log_softmax(-1)
        return torch.stack([logps[node[leaf[:t]], token] for t, token in enumerate(leaf)])

    @classmethod
    def rows(cls, theta: Tensor, leaves: Leaves, fill: float = 0.0) -> Tensor:
        """(B, LENGTH) log-probs, `fill` after a completion's end."""
        rows = [cls.token_logps(theta, leaf) for leaf in leaves]
        return torch.stack([torch.cat([r, r.new_full((cls.LENGTH - len(r),), fill)]) for r in rows])

    @classmethod
    def batch(cls, leaves: Leaves, rewards: list[float], reference: Tensor) -> Batch:
        return make_batch(
            [0] * len(leaves),
            mask=[[True] * len(leaf) + [False] * (cls.LENGTH - len(leaf)) for leaf in leaves],
            rewards=rewards,
            numbers={"reference": cls.rows(reference, leaves)},
        ).with_totals()

    @classmethod
    def theta(cls, seed: int) -> Tensor:
        return logits(seed, len(cls.prefixes()) * cls.VOCABULARY).reshape(-1, cls.VOCABULARY)
