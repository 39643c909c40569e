"""CoVRL's mathematics on small softmax policies, by exact expectations in float64: one or two tokens, every trace enumerated."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covary.algorithms import CoVRL, CoVRLJSD
from covary.algorithms.covrl import log_denominator
from covary.ops import importance_k3, likelihood, log_mixture, standardise
from tests.algorithms.helpers import make_batch
from tests.algorithms.policies import logits

WEIGHTS = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
ATOMS = 6
PRIOR, POSTERIOR = logits(1, ATOMS), logits(2, ATOMS)


def exact_kl(prior: Tensor, posterior: Tensor, a: float) -> Tensor:
    """KL(p' || p) of logits, over the vocabulary."""
    p, q = prior.log_softmax(-1), posterior.log_softmax(-1)
    composite = log_mixture(p, q, a)
    return (composite.exp() * (composite - p)).sum(-1)


def gradients(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True, allow_unused=True))


def leaves(*values: Tensor) -> list[Tensor]:
    return [value.clone().requires_grad_() for value in values]


# -- the KL estimator (P21, P22) -----------------------------------------------------------------------------


@pytest.mark.parametrize("a", WEIGHTS)
@pytest.mark.parametrize("source", ["prior", "posterior", "hybrid"])
def test_the_kl_estimator_is_unbiased_under_every_source_and_never_negative(a: float, source: str) -> None:
    p, q = PRIOR.log_softmax(-1), POSTERIOR.log_softmax(-1)
    den = {"prior": p, "posterior": q, "hybrid": log_mixture(p, q, 0.3)}[source]
    values = importance_k3(log_mixture(p, q, a), p, den)
    assert values.min() >= 0
    torch.testing.assert_close((den.exp() * values).sum(), exact_kl(PRIOR, POSTERIOR, a), rtol=0, atol=1e-10)


@pytest.mark.parametrize("a", WEIGHTS)
def test_the_kl_estimator_is_the_papers_two_forms_with_the_right_coefficient(a: float) -> None:
    gap = torch.linspace(-12, 12, 1001, dtype=torch.float64)  # log q - log p
    p = torch.full_like(gap, -1.0)
    q = p + gap
    composite = log_mixture(p, q, a)
    w_prior, w_posterior = (composite - p).exp(), (composite - q).exp()
    ours = importance_k3(composite, p, p)
    torch.testing.assert_close(ours, w_prior * (composite - p) - (w_prior - 1), rtol=1e-9, atol=1e-9)
    theirs = w_posterior * (composite - p) + (1 - a) / a * (w_posterior - 1)
    torch.testing.assert_close(importance_k3(composite, p, q), theirs, rtol=1e-9, atol=1e-8)
    assert ours.min() >= -1e-12
    # The appendix prints coefficient 1 for posterior traces: not negative for a = 1/2 alone.
    printed = w_posterior * (composite - p) + (w_posterior - 1)
    assert (printed.min() < -1e-3) == (a != 0.5)


@pytest.mark.parametrize("source", ["prior", "posterior"])
def test_the_kl_estimator_by_monte_carlo(source: str) -> None:
    p, q = PRIOR.log_softmax(-1), POSTERIOR.log_softmax(-1)
    den = {"prior": p, "posterior": q}[source]
    drawn = torch.multinomial(den.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    values = importance_k3(log_mixture(p, q, 0.3), p, den)[drawn]
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - exact_kl(PRIOR, POSTERIOR, 0.3)) < 4 * error


@pytest.mark.parametrize("a", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("source", ["prior", "posterior"])
def test_the_kls_gradient_is_exact_with_a_detached_denominator_only(a: float, source: str) -> None:
    def expectation(prior: Tensor, posterior: Tensor, detached: bool) -> Tensor:
        p, q = prior.log_softmax(-1), posterior.log_softmax(-1)
        den = p if source == "prior" else q
        values = importance_k3(log_mixture(p, q, a), p, den.detach() if detached else den)
        return (den.detach().exp() * values).sum()

    at = leaves(PRIOR, POSTERIOR)
    expected = gradients(exact_kl(*at, a), *at)
    for actual, exact in zip(gradients(expectation(*at, detached=True), *at), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=0, atol=1e-12)
    wrong = gradients(expectation(*at, detached=False), *at)
    assert max(float((w - e).abs().max()) for w, e in zip(wrong, expected, strict=True)) > 1e-2


def test_the_kl_is_stable() -> None:
    """Finite for log-probs down to -1000, and not 0 near u = 1 in float32."""
    for p, q in itertools.product((-1000.0, -30.0, -1e-4), repeat=2):
        pair = leaves(torch.tensor([p]), torch.tensor([q]))
        for den in (p, q):
            value = importance_k3(log_mixture(*pair, 1e-3), pair[0], torch.tensor([den]))
            assert value.isfinite().all()
            assert all(g.isfinite().all() for g in gradients(value.sum(), *pair))
    near = importance_k3(torch.tensor([0.0]), torch.tensor([-1e-5]), torch.tensor([0.0]))
    assert near.item() == pytest.approx(5e-11, rel=1e-3)
    naive = torch.tensor([-1e-5]).exp() - 1 + 1e-5
    assert abs(naive.item() - 5e-11) > 4e-11


@pytest.mark.parametrize("sigma", [3.0, 1.0])
@pytest.mark.parametrize("a", [0.9, 0.5, 0.1])
def test_the_hybrid_denominator_has_the_smaller_variance(a: float, sigma: float) -> None:
    """Exact standard deviations, mean over policies: heavy tails of the source's weights."""
    spread: dict[str, list[float]] = {"source": [], "hybrid": []}
    for seed in range(40):
        p, q = ((sigma * logits(1000 * k + seed, 12)).log_softmax(-1) for k in (1, 2))
        composite = log_mixture(p, q, a)
        hybrid = log_mixture(p, q, 0.5)
        by_source = [importance_k3(composite, p, den) for den in (p, q)]
        second = (0.5 * p.exp() * by_source[0] ** 2 + 0.5 * q.exp() * by_source[1] ** 2).sum()
        kl = (composite.exp() * (composite - p)).sum()
        spread["source"].append(float((second - kl**2).sqrt()))
        own = importance_k3(composite, p, hybrid)
        spread["hybrid"].append(float(((hybrid.exp() * own**2).sum() - kl**2).sqrt()))
    assert sum(spread["hybrid"]) < sum(spread["source"])


# -- ratios (P23, P24) ---------------------------------------------------------------------------------------


def test_the_composites_gradient_mixes_by_responsibility() -> None:
    p, q = leaves(torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64))
    a = 0.3
    composite = log_mixture(p, q, a)
    of_p, of_q = gradients(composite.sum(), p, q)
    rho = a * (p - composite).exp()
    torch.testing.assert_close(of_p, rho, rtol=0, atol=1e-12)
    torch.testing.assert_close(of_q, 1 - rho, rtol=0, atol=1e-12)


def test_which_denominators_are_unbiased_given_a_prefix() -> None:
    """E[r f(z_2) | z_1] under traces of one source each, against E_p'[f]: the token hybrid is off, the others are not."""
    share, a, n = 0.3, 0.5, 4
    p1, q1 = logits(3, n).log_softmax(-1), logits(4, n).log_softmax(-1)
    p2, q2 = logits(5, n * n).reshape(n, n).log_softmax(-1), logits(6, n * n).reshape(n, n).log_softmax(-1)
    f = torch.tensor([0.0, 1.0, -2.0, 5.0], dtype=torch.float64)
    errors: dict[str, float] = {}
    for kind in ("source", "hybrid", "hybrid_exact"):
        worst = 0.0
        for first in range(n):
            old_p = torch.stack([p1[first].expand(n), p2[first]], dim=-1)
            old_q = torch.stack([q1[first].expand(n), q2[first]], dim=-1)
            total, mass = torch.tensor(0.0, dtype=torch.float64), 0.0
            for prior, weight, one, two in ((True, share, p1, p2), (False, 1 - share, q1, q2)):
                den = log_denominator(kind, old_p, old_q, torch.full((n,), prior), share)  # pyright: ignore
                ratio = (log_mixture(p2[first], q2[first], a) - den[:, 1]).exp()
                reach = weight * one[first].exp()
                total, mass = total + reach * (two[first].exp() * ratio * f).sum(), mass + float(reach)
            exact = (log_mixture(p2[first], q2[first], a).exp() * f).sum()
            worst = max(worst, abs(float(total / mass - exact)))
        errors[kind] = worst
    assert errors["source"] < 1e-12
    assert errors["hybrid_exact"] < 1e-12
    assert errors["hybrid"] > 0.1


def test_the_hybrid_ratio_is_one_at_first_and_bounded_by_the_shares() -> None:
    p, q = ((3 * logits(seed, 12)).log_softmax(-1)[None] for seed in (1, 2))
    for a, share in ((0.5, 0.5), (0.2, 0.7)):
        log_ratio = log_mixture(p, q, a) - log_denominator("hybrid", p, q, torch.tensor([True]), share)
        bounds = (a / share, (1 - a) / (1 - share))
        assert min(bounds) - 1e-12 <= log_ratio.exp().min()
        assert log_ratio.exp().max() <= max(bounds) + 1e-12
        if a == share:
            assert log_ratio.abs().max() < 1e-12
    # Of the source alone it is not, already at the first update.
    source = log_mixture(p, q, 0.5) - log_denominator("source", p, q, torch.tensor([True]), 0.5)
    assert float(p.exp()[((source.exp() - 1).abs() > 0.3)].sum()) > 0.3


# -- rewards (P25) -------------------------------------------------------------------------------------------


def test_standardised_advantages_of_sum_and_mean_are_the_same_and_of_prob_are_not() -> None:
    logps = -torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    mask, group = torch.ones(5, 3, dtype=torch.bool), torch.zeros(5, dtype=torch.long)
    of = {kind: standardise(likelihood(logps, mask, kind), group, 0.0) for kind in ("sum", "mean", "prob")}
    torch.testing.assert_close(of["sum"], of["mean"], rtol=0, atol=1e-12)
    assert float((of["sum"] - of["prob"]).abs().max()) > 0.05


# -- the ELBO (P25b, P25c) -----------------------------------------------------------------------------------

QUESTIONS = (logits(11, 3), logits(12, 3) * 0.5)  # close to each other: no weight reaches its cut
ANSWERS = logits(13, 3)  # log p(y|z) as a function of z


def elbo(prior: Tensor, posterior: Tensor, answer: Tensor, a: float) -> Tensor:
    """E_p'[log p(y|z)] - KL(p' || p) of one-token traces."""
    p, q = prior.log_softmax(-1), posterior.log_softmax(-1)
    composite = log_mixture(p, q, a)
    return (composite.exp() * (torch.nn.functional.logsigmoid(answer) - (composite - p))).sum()


@pytest.mark.parametrize(("a", "share"), [(0.5, 0.5), (0.5, 0.4), (0.3, 0.6)])
@pytest.mark.parametrize("denominator", ["hybrid", "source"])
def test_the_loss_has_the_elbos_gradient_for_one_token_traces(a: float, share: float, denominator: str) -> None:
    """`CoVRL.loss` itself, in expectation over sources and traces, with uncentred rewards as advantages."""
    algorithm = CoVRL(
        composite_weight=a, prior_share=share, ratio=denominator, kl_denominator=denominator, clip=0.99,
        nll_select="is_weighted", preset="elbo",
    )  # fmt: skip
    at = leaves(QUESTIONS[0] * 0.3, QUESTIONS[1] * 0.3, ANSWERS)
    p, q = (x.log_softmax(-1) for x in at[:2])
    rewards = torch.nn.functional.logsigmoid(at[2])
    old_p, old_q, fixed = (x.detach().tolist() for x in (p, q, rewards))
    loss = torch.zeros((), dtype=torch.float64)
    for prior, law, weight in ((1.0, p, share), (0.0, q, 1 - share)):
        for z in range(3):
            batch = make_batch(
                [0],
                mask=[[True, False]],
                answer=[[False, True]],
                rewards=[fixed[z]],
                numbers={
                    "old": [[old_p[z]]],
                    "old_posterior": [[old_q[z]]],
                    "from_prior": [prior],
                    "valid": [1.0],
                },
            )
            batch = batch.with_numbers(algorithm.prepare(batch, lambda x: x))
            batch = replace(batch, numbers={**batch.numbers, "advantage": batch.rewards})
            batch = batch.with_totals(algorithm.normalisers)
            scores = {"answer": rewards[z : z + 1]}
            for name, x in (("policy", p), ("posterior", q)):
                scores[name] = torch.stack([x[z], torch.zeros_like(x[z])])[None]
            loss = loss + weight * law[z].detach().exp() * algorithm.loss(scores, batch)
    expected = gradients(-elbo(*at, a), *at)
    for actual, exact in zip(gradients(loss, *at), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=0, atol=1e-12)


def test_the_elbo_is_a_bound_that_ascent_closes() -> None:
    def evidence(prior: Tensor, answer: Tensor) -> float:
        return float((prior.log_softmax(-1) + torch.nn.functional.logsigmoid(answer)).logsumexp(-1))

    for seed in range(20):
        prior, posterior, answer = (logits(100 * k + seed, ATOMS) for k in (1, 2, 3))
        assert float(elbo(prior, posterior, answer, 0.5)) <= evidence(prior, answer) + 1e-12
    # Equal where p' is the true posterior of z, which it can be where that is at least a p.
    prior, answer, a = torch.zeros(ATOMS, dtype=torch.float64), logits(3, ATOMS) * 0.3, 0.1
    target = (prior.log_softmax(-1) + torch.nn.functional.logsigmoid(answer)).softmax(-1)
    posterior = ((target - a * prior.softmax(-1)) / (1 - a)).log()
    assert float(elbo(prior, posterior, answer, a)) == pytest.approx(evidence(prior, answer), abs=1e-12)
    # Ascent on prior, posterior and answer together raises log p(y|x).
    at = leaves(QUESTIONS[0], QUESTIONS[1], ANSWERS)
    before = evidence(at[0].detach(), at[2].detach())
    optimizer = torch.optim.Adam(at, lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        (-elbo(*at, 0.5)).backward()
        optimizer.step()
    assert evidence(at[0].detach(), at[2].detach()) > max(before, -0.05)


# -- the JSD form (P26) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [0.1, 0.5, 0.7])
def test_the_jsd_estimator_its_bounds_and_its_gradient(a: float) -> None:
    def jsd(prior: Tensor, posterior: Tensor) -> Tensor:
        p, q = prior.log_softmax(-1), posterior.log_softmax(-1)
        composite = log_mixture(p, q, a)
        return a * (p.exp() * (p - composite)).sum() + (1 - a) * (q.exp() * (q - composite)).sum()

    at = leaves(PRIOR, POSTERIOR)
    p, q = (x.log_softmax(-1) for x in at)
    composite = log_mixture(p, q, a)

    def entropy(x: Tensor) -> Tensor:
        return -(x.exp() * x).sum()

    exact = jsd(*at)
    assert float(exact.detach()) == pytest.approx(
        float((entropy(composite) - a * entropy(p) - (1 - a) * entropy(q)).detach()), abs=1e-12
    )
    assert 0 <= float(exact.detach()) <= -a * math.log(a) - (1 - a) * math.log(1 - a)
    laws = ((p, a), (q, 1 - a))
    corrected = torch.stack(
        [w * (s.detach().exp() * importance_k3(s, composite, s.detach())).sum() for s, w in laws]
    ).sum()
    plain = torch.stack(
        [w * (s.detach().exp() * (torch.expm1(composite - s) - (composite - s))).sum() for s, w in laws]
    ).sum()
    assert float(corrected.detach()) == pytest.approx(float(exact.detach()), abs=1e-12)
    assert float(plain.detach()) == pytest.approx(float(exact.detach()), abs=1e-12)
    expected = gradients(exact, *at)
    for actual, right in zip(gradients(corrected, *at), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=0, atol=1e-12)
    assert max(float((w - e).abs().max()) for w, e in zip(gradients(plain, *at), expected, strict=True)) > 1e-2


def test_the_jsd_of_sequences_is_not_bounded_by_log_two() -> None:
    """A sum over tokens under a token-level composite: three deterministic, opposite tokens have 3 log 2."""
    algorithm = CoVRLJSD()
    batch = make_batch(
        [0], mask=[[True] * 3], numbers={"old": [[0.0] * 3], "old_posterior": [[-50.0] * 3], "from_prior": [1.0]}
    )
    scores = {"policy": torch.zeros(1, 3, dtype=torch.float64), "posterior": torch.full((1, 3), -50.0).double()}
    per_token = algorithm._jsd(scores, batch)
    assert per_token.sum().item() == pytest.approx(3 * (math.log(2) - 0.5), abs=1e-9)  # k3: u - 1 - log u at u = 1/2


# -- selection, truncation, degenerate cases ---------------------------------------------------------------


def rollout(**changes: list) -> dict:
    """Four traces of one question: prior, prior, posterior, and one of the prior that was cut off."""
    facts: dict = {
        "mask": [
            [True, True, False, False],
            [True, False, False, False],
            [True, True, False, False],
            [True] * 3 + [False],
        ],
        "answer": [[False] * 3 + [True], [False, True, True, False], [False] * 2 + [True] * 2, [False] * 4],
        "truncated": [False, False, False, True],
        "rewards": [0.0, -3.0, -1.0, -3.0],
        "from_prior": [1.0, 1.0, 0.0, 1.0],
        "valid": [1.0, 1.0, 1.0, 0.0],
    }
    return facts | changes


def prepared(algorithm: CoVRL, **changes: list) -> dict[str, Tensor]:
    facts = rollout(**changes)
    numbers = {name: facts.pop(name) for name in ("from_prior", "valid")}
    return algorithm.prepare(make_batch([0] * 4, numbers=numbers, **facts), lambda x: x)


@pytest.mark.parametrize(
    ("select", "chosen"),
    [
        ("prior_valid_posadv", [1, 0, 0, 0]),
        ("posadv", [1, 0, 1, 0]),
        ("all", [1, 1, 1, 0]),
        ("is_weighted", [1, 1, 1, 0]),
        ("none", [0, 0, 0, 0]),
    ],
)
def test_which_answers_are_learned(select: str, chosen: list[int]) -> None:
    numbers = prepared(CoVRL(nll_select=select))  # pyright: ignore[reportArgumentType]
    assert numbers["selected"].tolist() == chosen
    assert numbers["nll_tokens"].tolist() == [n * c for n, c in zip([1, 2, 2, 0], chosen, strict=True)]
    assert numbers["advantage"].tolist() == [1.75, -1.25, 0.75, -1.25]


def test_an_empty_trace_is_no_valid_one_and_a_truncated_one_has_no_kl() -> None:
    numbers = prepared(CoVRL(), valid=[0.0, 1.0, 1.0, 0.0])
    assert numbers["selected"].tolist() == [0, 0, 0, 0]
    assert numbers["kl_tokens"].tolist() == [2, 1, 2, 0]
    assert prepared(CoVRL(kl_truncated=True))["kl_tokens"].tolist() == [2, 1, 2, 3]


def test_advantages_among_traces_of_one_source() -> None:
    numbers = prepared(CoVRL(per_source=True))
    assert numbers["advantage"].tolist() == [2.0, -1.0, 0.0, -1.0]
    assert prepared(CoVRL(), rewards=[-2.0] * 4)["advantage"].tolist() == [0.0] * 4
    assert prepared(CoVRL(advantage_std=True), rewards=[-0.1] * 4)["advantage"].tolist() == [0.0] * 4


def test_the_reward_of_a_trace_that_was_never_closed_is_the_least_of_its_group() -> None:
    logps = torch.tensor([[0.0, -1.0], [0.0, -4.0], [9.0, 9.0], [9.0, 9.0], [0.0, -7.0]], dtype=torch.float64)
    batch = make_batch(
        [0, 0, 0, 1, 2], mask=[[True, False]] * 5, numbers={"old_answer": logps},
        answer=[[False, True], [False, True], [False, False], [False, False], [False, True]],
    )  # fmt: skip
    # A group that closed none gets the least of all: its rows are equal, so that nothing is learned from them.
    assert CoVRL().reward(batch).tolist() == [-1.0, -4.0, -4.0, -7.0, -7.0]
    assert CoVRL(likelihood="prob").reward(batch)[:3].tolist() == pytest.approx([math.exp(-1)] + [math.exp(-4)] * 2)
    none = replace(batch, answer_mask=torch.zeros_like(batch.answer_mask))
    assert CoVRL().reward(none).isnan().all()


def test_the_plan_draws_a_source_per_rollout_or_per_question() -> None:
    import numpy as np

    from covary.types import Example

    prompts = [Example(str(i), "") for i in range(2000)]
    for draw, mixed in (("rollout", 1 - 0.3**4 - 0.7**4), ("question", 0.0)):
        plans = CoVRL(prior_share=0.3, source_draw=draw).plan(prompts, 4, np.random.default_rng(0))  # pyright: ignore
        assert all(sum(r.count for r in plan) == 4 for plan in plans)
        assert all(r.count > 0 for plan in plans for r in plan)
        prior = sum(r.count for plan in plans for r in plan if r.context == "prompt")
        assert prior / 8000 == pytest.approx(0.3, abs=0.03)
        assert sum(len(plan) == 2 for plan in plans) / 2000 == pytest.approx(mixed, abs=0.04)


@pytest.mark.parametrize(
    ("field", "value"),
    [("composite_weight", 0.0), ("composite_weight", 1.0), ("prior_share", 1.1), ("kl_coef", -1.0), ("clip", 1.0)],
)
def test_fields_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field if field != "clip" else "clip"):
        CoVRL(**{field: value})
    with pytest.raises(ValueError, match="kl_grad"):
        CoVRL(kl_denominator="full", kl_grad="prior_only")
