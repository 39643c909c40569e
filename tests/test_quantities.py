"""Closed-form numbers of the quantities over the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covary.quantities import QUANTITIES, entropy, kl, logp, mixture_kl, prob

INF = float("inf")


def logs(*rows: list[float]) -> Tensor:
    """Log-probs of distributions; log 0 is -inf."""
    return torch.tensor(rows, dtype=torch.float64).log()


def tokens(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.long)


def test_logp_picks_the_token() -> None:
    chunk = logs([0.7, 0.2, 0.1], [0.5, 0.0, 0.5])
    picked = logp(chunk, torch.tensor([2, 1]))
    assert picked.tolist() == pytest.approx([math.log(0.1), -INF])


def test_logp_gradient_is_one_at_the_token() -> None:
    chunk = logs([0.7, 0.2, 0.1]).requires_grad_()
    (grad,) = torch.autograd.grad(logp(chunk, torch.tensor([1])).sum(), chunk)
    assert grad.tolist() == [[0.0, 1.0, 0.0]]


def test_entropy() -> None:
    chunk = logs([0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.7, 0.2, 0.1, 0.0])
    expected = [math.log(4), 0.0, math.log(2), 0.8018185525433373]
    assert entropy(chunk, tokens(4)).tolist() == pytest.approx(expected, abs=1e-12)


def test_kl() -> None:
    p, q = logs([0.7, 0.2, 0.1], [0.5, 0.5, 0.0]), logs([0.2, 0.5, 0.3], [0.25, 0.25, 0.5])
    assert kl(p, q, tokens(2)).tolist() == pytest.approx([0.583815, math.log(2)], abs=1e-6)
    assert kl(q[:1], p[:1], tokens(1)).item() == pytest.approx(
        0.2 * math.log(2 / 7) + 0.5 * math.log(2.5) + 0.3 * math.log(3), abs=1e-12
    )
    assert kl(p, p, tokens(2)).tolist() == [0.0, 0.0]


def test_kl_is_infinite_where_q_lacks_a_token() -> None:
    p, q = logs([0.5, 0.5], [0.5, 0.5]), logs([1.0, 0.0], [0.5, 0.5])
    assert kl(p, q, tokens(2)).tolist() == [INF, 0.0]


def test_kl_where_the_mass_of_a_missing_token_underflows() -> None:
    p = torch.tensor([[0.0, -200.0]])
    q = torch.tensor([[0.0, -INF]])
    assert not kl(p, q, tokens(1)).isnan().any()


def test_impossible_tokens_have_finite_gradients() -> None:
    """Masked with -inf before the softmax or absent from the start: the same numbers."""
    logits = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = logits.flip(0).log_softmax(-1)
    gone = torch.tensor([False, True, False, False, True, False])

    def run(z: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        z = z.clone().requires_grad_()
        p = z.log_softmax(-1)
        value = entropy(p, tokens(3)) + kl(p, q, tokens(3))
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    value, grad = run(logits.masked_fill(gone, -INF), other)
    sliced_value, sliced_grad = run(logits[:, ~gone], other[:, ~gone])
    torch.testing.assert_close(value, sliced_value)
    torch.testing.assert_close(grad[:, ~gone], sliced_grad)
    assert (grad[:, gone] == 0).all()

    both = run(logits.masked_fill(gone, -INF), other.masked_fill(gone, -INF))
    torch.testing.assert_close(both[0], sliced_value)
    torch.testing.assert_close(both[1][:, ~gone], sliced_grad)


def test_gradients() -> None:
    z = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q = z.flip(1).log_softmax(-1)
    picked = torch.tensor([4, 0])
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logp(x.log_softmax(-1), picked), z)
    assert torch.autograd.gradcheck(lambda x: entropy(x.log_softmax(-1), picked), z)
    assert torch.autograd.gradcheck(lambda x: kl(x.log_softmax(-1), q, picked), z)


def test_names() -> None:
    assert QUANTITIES["logp"] is logp
    assert QUANTITIES["entropy"] is entropy
    assert QUANTITIES["kl"] is kl


def test_prob_is_the_tokens_probability() -> None:
    assert prob(logs([0.7, 0.2, 0.1]), torch.tensor([1])).item() == pytest.approx(0.2)


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_mixture_kl(weight: float) -> None:
    p, q = logs([0.7, 0.2, 0.1], [0.5, 0.5, 0.0]), logs([0.2, 0.5, 0.3], [0.1, 0.9, 0.0])
    mixture = (weight * p.exp() + (1 - weight) * q.exp()).log()
    torch.testing.assert_close(mixture_kl(weight, p, q, tokens(2)), kl(mixture, p, tokens(2)), rtol=0, atol=1e-12)
    assert mixture_kl(weight, p, p, tokens(2)).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    leaves = [x.clone().requires_grad_() for x in (p, q)]
    grads = torch.autograd.grad(mixture_kl(weight, *leaves, tokens(2)).sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)  # a token that neither can produce


def test_mixture_kl_is_infinite_where_the_prior_lacks_a_token() -> None:
    assert mixture_kl(0.5, logs([1.0, 0.0]), logs([0.5, 0.5]), tokens(1)).item() == INF
