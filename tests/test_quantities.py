"""Closed-form numbers of the quantities over the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covary.quantities import QUANTITIES, entropy, jsd, kl, logp, mixture_kl, prob, tempered_kl

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


CASE_X01 = {0.0: 0.537176, 0.1: 0.047864, 0.5: 0.132918, 0.9: 0.050995, 1.0: 0.583815}


@pytest.mark.parametrize(("beta", "expected"), CASE_X01.items())
def test_jsd_case_x01(beta: float, expected: float) -> None:
    """0 is KL(teacher || student), 1 is KL(student || teacher); between them the mixture has beta of the teacher."""
    teacher, student = logs([0.2, 0.5, 0.3]), logs([0.7, 0.2, 0.1])
    assert jsd(beta, teacher, student, tokens(1)).item() == pytest.approx(expected, abs=1e-6)
    if 0 < beta < 1:
        assert jsd(beta, student, teacher, tokens(1)).item() != pytest.approx(expected, abs=1e-3) or beta == 0.5


def test_jsd_of_disjoint_distributions_is_bounded() -> None:
    """All of p's mass is where m = beta p, all of q's where m = (1 - beta) q."""
    p, q = logs([0.5, 0.5, 0.0]), logs([0.0, 0.0, 1.0])
    for beta in (0.3, 0.5):
        expected = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert jsd(beta, p, q, tokens(1)).item() == pytest.approx(expected, abs=1e-12)
    assert jsd(0.0, p, q, tokens(1)).item() == INF


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_of_equal_distributions_is_0_with_its_gradient(beta: float) -> None:
    z = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    teacher = z.log_softmax(-1)
    z.requires_grad_()
    value = jsd(beta, teacher, z.log_softmax(-1), tokens(2))
    assert value.abs().max().item() < 1e-15
    (grad,) = torch.autograd.grad(value.sum(), z)
    assert grad.abs().max().item() < 1e-15


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_jsd_where_tokens_are_impossible(beta: float) -> None:
    """Impossible for both: the numbers and gradients without that token."""
    z = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    other = z.flip(1)
    gone = torch.tensor([False, True, False, False, True, False])

    def run(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        student = student.clone().requires_grad_()
        value = jsd(beta, teacher.log_softmax(-1), student.log_softmax(-1), tokens(2))
        return value.detach(), torch.autograd.grad(value.sum(), student)[0]

    value, grad = run(z.masked_fill(gone, -INF), other.masked_fill(gone, -INF))
    expected, expected_grad = run(z[:, ~gone], other[:, ~gone])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad[:, ~gone], expected_grad)
    assert (grad[:, gone] == 0).all()
    # Impossible for the teacher alone: the reverse KL alone is infinite then.
    if 0 < beta < 1:
        assert all(x.isfinite().all() for x in run(z, other.masked_fill(gone, -INF)))


def test_jsd_and_tempered_kl_gradients() -> None:
    z = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = z.flip(1).log_softmax(-1)
    z.requires_grad_()
    for beta in (0.0, 0.1, 0.5, 0.999, 1.0):
        assert torch.autograd.gradcheck(lambda x, beta=beta: jsd(beta, p, x.log_softmax(-1), tokens(2)), z)
    assert torch.autograd.gradcheck(lambda x: tempered_kl(2.0, p, x.log_softmax(-1), tokens(2)), z)


def test_tempered_kl_is_the_kl_of_tempered_distributions() -> None:
    z = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p, q = z, z.flip(1)
    expected = kl((p / 2.5).log_softmax(-1), (q / 2.5).log_softmax(-1), tokens(2))
    actual = tempered_kl(2.5, p.log_softmax(-1), q.log_softmax(-1), tokens(2))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        tempered_kl(1.0, p.log_softmax(-1), q.log_softmax(-1), tokens(2)),
        kl(p.log_softmax(-1), q.log_softmax(-1), tokens(2)),
    )


def test_float32_far_apart() -> None:
    """Log-probs to -1000, whose mass is 0: no NaN, and the value of disjoint distributions."""
    p = torch.tensor([[0.0, -1000.0, -1000.0]])
    q = torch.tensor([[-1000.0, 0.0, -900.0]])
    value = jsd(0.5, p, q, tokens(1))
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)


def test_names() -> None:
    assert QUANTITIES["logp"] is logp
    assert QUANTITIES["entropy"] is entropy
    assert QUANTITIES["kl"] is kl
    assert QUANTITIES["jsd"] is jsd
    assert QUANTITIES["tempered_kl"] is tempered_kl


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
