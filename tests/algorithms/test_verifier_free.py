"""Verifier-free baselines: gradients of their objectives by enumeration of all k-tuples of one-token traces, in float64.

Whatever is not a gradient of its objective is kept as a negative control.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covary.algorithms import JLB, JLBGRPO, RAVR, RLPR, LaTRO, LaTROGRPO, VeriFree, VeriFreeGRPO
from covary.batch import Algorithm, Batch, one_process
from covary.ops import added_to_bound, fill_with_least, group_logsumexp, likelihood
from tests.algorithms.helpers import make_batch
from tests.algorithms.policies import logits

ATOMS = 4
TRACES, ANSWERS, INITIAL = logits(21, ATOMS), logits(22, ATOMS), logits(23, ATOMS).log_softmax(-1)


def log_answer(answers: Tensor) -> Tensor:
    """log p(y|z) of each trace."""
    return torch.nn.functional.logsigmoid(answers)


def batch_of(algorithm: Algorithm, traces: tuple[int, ...], logp: Tensor, answer: Tensor) -> Batch:
    """One group of one-token traces, each with a one-token answer, as the loop makes it: scored, rewarded, prepared."""
    index = list(traces)
    early = {
        "old_answer": answer[index].tolist(),
        "old": [[x, 0.0] for x in logp[index].tolist()],
        "initial": [[x, 0.0] for x in INITIAL[index].tolist()],
    }
    batch = make_batch(
        [0] * len(index),
        mask=[[True, False]] * len(index),
        answer=[[False, True]] * len(index),
        numbers={score.name: early[score.name] for score in algorithm.frozen},
    )
    rewards = algorithm.reward(batch)
    assert rewards is not None
    batch = replace(batch, rewards=rewards)
    return batch.with_numbers(algorithm.prepare(batch, one_process)).with_totals(algorithm.normalisers)


def expected_gradient(algorithm: Algorithm, k: int, change: Callable[[Batch], Batch] = lambda b: b) -> list[Tensor]:
    """E over k traces of the loss's gradient in the logits of traces and answers."""
    traces, answers = (x.clone().requires_grad_() for x in (TRACES, ANSWERS))
    logp, answer = traces.log_softmax(-1), log_answer(answers)
    total = torch.zeros((), dtype=torch.float64)
    for chosen in itertools.product(range(ATOMS), repeat=k):
        index = list(chosen)
        batch = change(batch_of(algorithm, chosen, logp.detach(), answer.detach()))
        scores = {"policy": torch.nn.functional.pad(logp[index, None], (0, 1)), "answer": answer[index]}
        total = total + logp.detach()[index].sum().exp() * algorithm.loss(scores, batch)
    return list(torch.autograd.grad(total, (traces, answers)))


def gradient_of(objective: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Of minus an objective of (log p(z), log p(y|z))."""
    traces, answers = (x.clone().requires_grad_() for x in (TRACES, ANSWERS))
    return list(torch.autograd.grad(-objective(traces.log_softmax(-1), log_answer(answers)), (traces, answers)))


def bound(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """E log 1/n sum_j p(y|z_j)."""

    def value(logp: Tensor, answer: Tensor) -> Tensor:
        tuples = [list(t) for t in itertools.product(range(ATOMS), repeat=n)]
        terms = [logp[t].sum().exp() * (answer[t].logsumexp(0) - math.log(n)) for t in tuples]
        return torch.stack(terms).sum()

    return value


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12)


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_latro_is_the_gradient_of_its_objective(kl_coef: float) -> None:
    def objective(logp: Tensor, answer: Tensor) -> Tensor:
        return (logp.exp() * (answer - kl_coef * (logp - INITIAL))).sum()

    exact = gradient_of(objective)
    assert_close(expected_gradient(LaTRO(kl_coef=kl_coef), 2), exact)
    # Without the answer's own gradient (the official default) it is another.
    assert distance(expected_gradient(LaTRO(kl_coef=kl_coef, answer_coef=0.0), 2), exact) > 1e-2


@pytest.mark.parametrize("n", [2, 3])
def test_jlb_is_the_gradient_of_its_bound(n: int) -> None:
    exact = gradient_of(bound(n))
    assert_close(expected_gradient(JLB(), n), exact)

    def centred(batch: Batch) -> Batch:
        advantage = batch["advantage"]
        return replace(batch, numbers={**batch.numbers, "advantage": advantage - advantage.mean()})

    assert distance(expected_gradient(JLB(), n, centred), exact) > 1e-3


def test_the_bounds_rise_towards_the_evidence() -> None:
    logp, answer = TRACES.log_softmax(-1), log_answer(ANSWERS)
    values = [float(bound(n)(logp, answer)) for n in (1, 2, 3, 4)]
    assert values == sorted(values)
    assert values[-1] < float((logp + answer).logsumexp(0))


def test_verifree_is_the_gradient_of_the_marginal() -> None:
    exact = gradient_of(lambda logp, answer: (logp + answer).exp().sum())
    assert_close(expected_gradient(VeriFree(), 3), exact)

    def advantages_for_the_answer(batch: Batch) -> Batch:
        return replace(batch, rewards=batch["advantage"])

    assert distance(expected_gradient(VeriFree(), 3, advantages_for_the_answer), exact) > 1e-2


def test_what_a_trace_adds_to_the_bound_when_another_dominates() -> None:
    s, group = torch.tensor([-1.0, -100.0, -3.0, 0.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    whole = math.log((math.exp(-1) + math.exp(-3)) / 3)
    without_first, without_second = math.log(math.exp(-3) / 2), math.log((math.exp(-1) + math.exp(-3)) / 2)
    added = added_to_bound(s, group)
    assert added[:2].tolist() == pytest.approx([whole - without_first, whole - without_second], abs=1e-12)
    assert added[3] == 0
    pair = added_to_bound(torch.tensor([-1.0, -800.0], dtype=torch.float64), torch.tensor([0, 0]))
    assert pair.tolist() == pytest.approx([799 - math.log(2), -math.log(2)])
    assert group_logsumexp(torch.tensor([-800.0, -801.0]), torch.tensor([0, 0])).item() == pytest.approx(
        -799.6867, abs=1e-3
    )


def test_likelihoods_by_hand() -> None:
    logps = torch.tensor([[math.log(0.5), math.log(0.2), 7.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    expected = {"sum": math.log(0.1), "mean": math.log(0.1) / 2, "prob": 0.1, "geo": math.sqrt(0.1), "mean_prob": 0.35}
    for kind, value in expected.items():
        found = likelihood(logps, mask, kind)  # pyright: ignore[reportArgumentType]
        assert found[0].item() == pytest.approx(value, abs=1e-12)
        assert found[1].isnan()


def unclosed(algorithm: Algorithm, **numbers: list) -> list[float]:
    """Rewards of two closed traces and one that never was, with p(y) = e^-1, e^-3."""
    early = {"old_answer": [-1.0, -3.0, 0.0]} | numbers
    wanted = {score.name for score in algorithm.frozen if score.early} | {"valid"}
    batch = make_batch(
        [0] * 3, mask=[[True, False]] * 3, answer=[[False, True], [False, True], [False, False]],
        numbers={name: value for name, value in early.items() if name in wanted},
    )  # fmt: skip
    rewards = algorithm.reward(batch)
    assert rewards is not None
    return rewards.tolist()


def test_rewards_of_traces_that_were_never_closed() -> None:
    for algorithm in (LaTRO(kl_coef=0.0), LaTROGRPO(kl_coef=0.0), JLB(), JLBGRPO()):
        assert unclosed(algorithm) == [-1.0, -3.0, -3.0]
    for algorithm in (VeriFree(), VeriFreeGRPO()):
        assert unclosed(algorithm) == pytest.approx([math.exp(-1), math.exp(-3), 0.0])
    streams: dict[str, list] = {
        "old": [[-1.0, 9.0], [-2.0, 9.0], [-2.0, 9.0]],
        "initial": [[-2.0, 0], [-2.0, 0], [-1.0, 0]],
    }
    for algorithm in (LaTRO(kl_coef=0.1), LaTROGRPO(kl_coef=0.1)):
        assert unclosed(algorithm, **streams) == pytest.approx([-1.1, -3.0, -2.9])


def test_least_of_the_group_and_of_all() -> None:
    nan = math.nan
    x = torch.tensor([1.0, nan, 3.0, nan, nan])
    group = torch.tensor([0, 0, 0, 1, 1])
    assert fill_with_least(x, group).tolist() == [1.0, 1.0, 3.0, 1.0, 1.0]
    assert fill_with_least(x[3:], group[3:] - 1).isnan().all()
    assert fill_with_least(x[:0], group[:0]).shape == (0,)


# -- RLPR ----------------------------------------------------------------------------------------------------


def test_rlprs_reward_by_hand() -> None:
    """Mean probabilities 0.8, 0.5, 0.2 and one never closed, above a base of 0.4; the third one is empty."""
    batch = make_batch(
        [0] * 4,
        mask=[[True, False, False]] * 4,
        answer=[[False, True, True]] * 3 + [[False] * 3],
        numbers={"old_answer": [1.6, 1.0, 0.4, 0.0], "base": [0.8] * 4, "valid": [1.0, 1.0, 0.0, 0.0]},
    )
    assert RLPR().reward(batch).tolist() == pytest.approx([0.9 * 0.4 + 0.1, 0.9 * 0.1 + 0.1, 0.0, 0.0])
    assert RLPR(format_share=0.0).reward(batch).tolist() == pytest.approx([0.4, 0.1, 0.0, 0.0])
    # Without an answer there is no base either, which counts for nothing.
    assert RLPR().reward(replace(batch, numbers={**batch.numbers, "base": torch.full((4,), math.nan)}))[3] == 0


def test_rlpr_filters_by_a_moving_average_from_the_eleventh_draw_on() -> None:
    def drawn(*spreads: float) -> Batch:
        """Pairs of rewards with these standard deviations."""
        rewards = [r for s in spreads for r in (0.0, s * math.sqrt(2))]
        return make_batch([g for g in range(len(spreads)) for _ in range(2)], rewards=rewards)

    algorithm, state = RLPR(), {}
    for draw in range(1, 11):
        keep, state = algorithm.select(drawn(0.1 * draw, 0.1 * draw), state)
        assert keep is None
    average = 0.6
    for draw in (7, 8, 9, 10):
        average = 0.99 * average + 0.01 * 0.1 * draw
    assert state == {"draws": 10, "average": pytest.approx(average)}
    keep, state = algorithm.select(drawn(0.5 * average + 0.01, 0.5 * average - 0.01, 0.0), state)
    assert keep is not None
    assert keep.tolist() == [True, False, False]
    assert state["draws"] == 11


def test_rlpr_ignores_differences_below_a_millionth() -> None:
    batch = make_batch([0, 0, 1, 1], rewards=[0.5, 0.5 + 1e-8, 0.0, 1.0])
    advantage = RLPR().prepare(batch, one_process)["advantage"]
    assert advantage[:2].tolist() == [0.0, 0.0]
    assert advantage[3] > 0.7


# -- RAVR ----------------------------------------------------------------------------------------------------


def test_ravrs_utility_by_hand() -> None:
    """Posterior traces with mean log-probs -1, -3, never closed; prior ones with -2 and never closed; another group's never."""
    batch = make_batch(
        [0, 0, 0, 0, 0, 1, 1],
        mask=[[True, False, False]] * 7,
        answer=[[False, True, True]] * 2
        + [[False] * 3, [False, True, True], [False] * 3, [False, True, True], [False] * 3],
        numbers={"old_answer": [-2.0, -6.0, 0.0, -4.0, 0.0, -2.0, 0.0]},
        learn=[True, True, True, False, False, True, False],
    )
    rewards = RAVR().reward(batch)
    assert rewards[:4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert rewards[5].isnan()
    kept = batch.take([0, 1, 2, 3, 4])
    kept = replace(kept, rewards=rewards[:5])
    advantage = RAVR().prepare(kept, one_process)["advantage"]
    expected = [(r - 1 / 3) / (math.sqrt(1 / 3) + 1e-6) for r in (1.0, 0.0, 0.0)]
    assert advantage.tolist() == pytest.approx([*expected, 0.0, 0.0])


def test_ravr_plans_as_many_prior_traces_as_posterior_ones() -> None:
    import numpy as np

    from covary.types import Example, Request

    (plan,) = RAVR().plan([Example("", "")], 8, np.random.default_rng(0))
    assert plan == [Request(4, context="posterior"), Request(4, learn=False)]
