"""What must hold for every algorithm, on ragged batches that hypothesis makes.

A new algorithm needs one row in CASES and one loop in reference.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covary.algorithms import ALGORITHMS
from covary.batch import Algorithm, Scores
from tests.algorithms import reference
from tests.algorithms.helpers import (
    Layout,
    prepared,
    problem,
    value_and_grad,
    value_and_grad_in_parts,
)

NEAR = (0.0, 0.05, 0.15)  # nats from the frozen score: inside every clip range
MIXED = (0.05, 0.15, 0.3, 0.6, 1.5)  # on both sides of the clips, never at a kink


@dataclass(frozen=True)
class Case:
    """One setting of one algorithm.

    Attributes:
        name: key of ALGORITHMS.
        reference: the slow loop.
        group_relative: only differences of rewards within a group count.
        regularised: has a term that does not depend on rewards, so that a group of one still counts.
        kwargs: hyper-parameters.
    """

    name: str
    reference: Callable[[Any, list[reference.Row], int], Tensor]
    group_relative: bool
    regularised: bool = False
    kwargs: tuple[tuple[str, float], ...] = ()

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.name](**dict(self.kwargs))


CASES = [
    Case("gvpo", reference.gvpo, group_relative=True, kwargs=(("beta", 0.3),)),
    Case("grpo", reference.grpo, group_relative=True, regularised=True),
    Case("grpo", reference.grpo, group_relative=True, kwargs=(("kl_coef", 0.0), ("clip", 0.25))),
    Case("dr_grpo", reference.dr_grpo, group_relative=True),
    Case("sft", reference.sft, group_relative=False),
]


def named(cases: list[Case]) -> Any:
    ids = ["-".join([c.name, *(f"{key}={value}" for key, value in c.kwargs)]) for c in cases]
    return pytest.mark.parametrize("case", cases, ids=ids)


every_case = named(CASES)
group_relative_cases = named([c for c in CASES if c.group_relative])
battery = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def layouts(draw: st.DrawFn, max_group: int = 4) -> Layout:
    """1 to 3 groups of ragged size in any row order; lengths 1 to 5; tokens that are not sampled anywhere."""
    sizes = draw(st.lists(st.integers(1, max_group), min_size=1, max_size=3))
    group = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    # The first token is sampled (a row without one is invalid and never reaches a loss).
    tails = st.lists(st.booleans(), max_size=4)
    mask = [[True, *draw(tails)] for _ in group]
    rewards = [draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0])) for _ in group]
    return Layout(list(group), mask, rewards, draw(st.integers(0, 10**6)))


def assert_same(
    actual: tuple[Tensor, dict[str, Tensor]],
    expected: tuple[Tensor, dict[str, Tensor]],
    tolerance: float = 1e-12,
) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, grad in expected[1].items():
        torch.testing.assert_close(actual[1][name], grad, rtol=tolerance, atol=tolerance)


def is_finite(loss: Tensor, grads: dict[str, Tensor]) -> bool:
    return bool(loss.isfinite()) and all(bool(grad.isfinite().all()) for grad in grads.values())


def fill_masked(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """`value` at every token that was not sampled; numbers per row stay."""
    return x if x.dim() == 1 else torch.where(mask, x, value)


def take(scores: Scores, rows: Tensor) -> Scores:
    return {name: score[rows] for name, score in scores.items()}


def test_every_algorithm_is_in_the_battery() -> None:
    missing = set(ALGORITHMS) - {case.name for case in CASES}
    assert not missing, f"no row in CASES (tests/algorithms/test_common.py) for {sorted(missing)}"
    assert {case.name for case in CASES} <= set(ALGORITHMS)


@every_case
@battery
@given(layouts())
def test_equals_the_loop_of_its_equation(case: Case, layout: Layout) -> None:
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    leaves = {name: score.clone().requires_grad_() for name, score in p.scores.items()}

    def of_row(x: Tensor, row: int) -> Any:
        return x[row] if x.dim() == 1 else x[row][batch.mask[row]]

    rows = [
        reference.Row(
            group=layout.group[i],
            reward=layout.rewards[i],
            live={name: list(of_row(score, i)) for name, score in leaves.items()},
            frozen={s.name: of_row(batch[s.name], i).tolist() for s in case.algorithm.frozen},
        )
        for i in range(len(layout.group))
    ]
    loss = case.reference(case.algorithm, rows, batch.max_tokens)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    expected = (loss.detach(), dict(zip(leaves, grads, strict=True)))
    assert_same(value_and_grad(case.algorithm, p.scores, batch), expected, 1e-10)


@every_case
@battery
@given(
    layouts(),
    st.integers(1, 4),
    st.sampled_from([-2.0, 7e5, float("-inf"), float("inf"), float("nan")]),
)
def test_more_padding_changes_nothing(case: Case, layout: Layout, columns: int, garbage: float) -> None:
    p = problem(case.algorithm, layout, MIXED)
    expected = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))

    def wider(x: Tensor, value: float) -> Tensor:
        if x.dim() == 1:
            return x
        return torch.cat([x, x.new_full((len(x), columns), value)], dim=1)

    b = p.rollout
    rollout = replace(
        b,
        tokens=wider(b.tokens, 31),
        mask=wider(b.mask, False),
        answer_mask=wider(b.answer_mask, False),
        numbers={name: wider(value, garbage) for name, value in b.numbers.items()},
    )
    scores = {name: wider(score, garbage) for name, score in p.scores.items()}
    loss, grads = value_and_grad(case.algorithm, scores, prepared(case.algorithm, rollout))
    width = b.tokens.shape[1]
    narrow = {name: g if g.dim() == 1 else g[:, :width] for name, g in grads.items()}
    assert_same((loss, narrow), expected)
    assert all(bool((g[:, width:] == 0).all()) for g in grads.values() if g.dim() == 2)


@every_case
@battery
@given(layouts(), st.randoms(use_true_random=False))
def test_order_of_rows_and_groups_does_not_matter(case: Case, layout: Layout, rng: random.Random) -> None:
    p = problem(case.algorithm, layout, MIXED)
    loss, grads = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))

    order = torch.tensor(rng.sample(range(len(layout.group)), len(layout.group)))
    names = torch.tensor(rng.sample(range(p.rollout.num_groups), p.rollout.num_groups))
    shuffled = p.rollout.take(order)
    shuffled = replace(shuffled, group=names[shuffled.group])
    actual = value_and_grad(case.algorithm, take(p.scores, order), prepared(case.algorithm, shuffled))
    assert_same(actual, (loss, take(grads, order)))


@every_case
@pytest.mark.parametrize("garbage", [-2.0, -6.0, 1e300, float("-inf"), float("inf"), float("nan")])
@settings(battery, max_examples=10)
@given(layouts())
def test_tokens_that_were_not_sampled_have_no_effect(case: Case, garbage: float, layout: Layout) -> None:
    p = problem(case.algorithm, layout, MIXED)
    mask = p.rollout.mask
    expected = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))

    numbers = {name: fill_masked(x, mask, garbage) for name, x in p.rollout.numbers.items()}
    scores = {name: fill_masked(x, mask, garbage) for name, x in p.scores.items()}
    batch = prepared(case.algorithm, replace(p.rollout, numbers=numbers))
    loss, grads = value_and_grad(case.algorithm, scores, batch)

    assert_same((loss, grads), expected)
    for grad in grads.values():
        if grad.dim() == 2:
            assert (grad[~mask] == 0).all()
    logged = case.algorithm.metrics(scores, batch)
    assert logged == pytest.approx(case.algorithm.metrics(p.scores, prepared(case.algorithm, p.rollout)))


@every_case
@battery
@given(layouts(), st.randoms(use_true_random=False))
def test_micro_batches_of_whole_groups_sum_to_the_whole(case: Case, layout: Layout, rng: random.Random) -> None:
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    part_of = [rng.randrange(3) for _ in range(batch.num_groups)]
    parts = [[i for i, g in enumerate(layout.group) if part_of[g] == n] for n in range(3)]
    parts = [rng.sample(rows, len(rows)) for rows in parts if rows]
    actual = value_and_grad_in_parts(case.algorithm, p.scores, batch, parts)
    assert_same(actual, value_and_grad(case.algorithm, p.scores, batch))


@named([c for c in CASES if not ALGORITHMS[c.name].coupled])
@battery
@given(layouts(), st.randoms(use_true_random=False))
def test_uncoupled_micro_batches_may_split_groups(case: Case, layout: Layout, rng: random.Random) -> None:
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    part_of = [rng.randrange(3) for _ in layout.group]
    parts = [[i for i, part in enumerate(part_of) if part == n] for n in range(3)]
    actual = value_and_grad_in_parts(case.algorithm, p.scores, batch, [r for r in parts if r])
    assert_same(actual, value_and_grad(case.algorithm, p.scores, batch))


@named([c for c in CASES if ALGORITHMS[c.name].coupled])
def test_coupled_micro_batches_must_not_split_groups(case: Case) -> None:
    """Negative control: if this were equal, `coupled` would be declared for nothing."""
    layout = Layout([0, 0, 0, 0, 1, 1], [[True] * 3] * 6, [1, 0, 0, 0.5, 1, 0], seed=3)
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    whole = value_and_grad(case.algorithm, p.scores, batch)
    halves = value_and_grad_in_parts(case.algorithm, p.scores, batch, [[0, 1], [2, 3], [4, 5]])
    assert abs(float(whole[0] - halves[0])) > 1e-3
    assert any(float((whole[1][n] - halves[1][n]).abs().max()) > 1e-3 for n in whole[1])


@every_case
@battery
@given(layouts())
def test_coupled_groups_in_two_passes(case: Case, layout: Layout) -> None:
    """Pass 1 gives dloss/dscores of whole groups; rows weighted with it, one by one, have the same gradient."""
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    _, weights = value_and_grad(case.algorithm, p.scores, batch)

    def model(theta: Tensor) -> Scores:  # any differentiable map from parameters to scores
        return {n: s + theta[0] * s.sin() + theta[1] * s for n, s in p.scores.items()}

    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(case.algorithm.loss(model(theta), batch), theta)
    actual = torch.zeros(2, dtype=torch.float64)
    for row in range(len(layout.group)):
        weighted = sum((model(theta)[n][row] * weights[n][row]).sum() for n in weights)
        actual += torch.autograd.grad(weighted, theta)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@battery
@given(layouts())
def test_extreme_log_ratios_stay_finite(case: Case, dtype: torch.dtype, layout: Layout) -> None:
    p = problem(case.algorithm, layout, (0.0, 1.0, 30.0, 1e3))
    b = p.rollout
    b = replace(b, rewards=b.rewards.to(dtype), numbers={n: x.to(dtype) for n, x in b.numbers.items()})
    batch = prepared(case.algorithm, b)
    scores = {name: score.to(dtype) for name, score in p.scores.items()}
    assert is_finite(*value_and_grad(case.algorithm, scores, batch))
    logged = case.algorithm.metrics(scores, batch)
    assert torch.tensor(list(logged.values())).isfinite().all()


@every_case
@pytest.mark.parametrize("distances", [NEAR, MIXED], ids=["near", "mixed"])
@settings(battery, max_examples=10)
@given(layouts())
def test_gradient_is_the_derivative(case: Case, distances: tuple[float, ...], layout: Layout) -> None:
    p = problem(case.algorithm, layout, distances)
    batch = prepared(case.algorithm, p.rollout)
    names = list(p.scores)

    def loss(*scores: Tensor) -> Tensor:
        return case.algorithm.loss(dict(zip(names, scores, strict=True)), batch)

    inputs = tuple(p.scores[name].clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(loss, inputs)


@group_relative_cases
@battery
@given(layouts(), st.floats(-10, 10))
def test_a_constant_added_to_rewards_moves_nothing(case: Case, layout: Layout, constant: float) -> None:
    p = problem(case.algorithm, layout, MIXED)
    shifted = replace(p.rollout, rewards=p.rollout.rewards + constant)
    _, expected = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))
    _, actual = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, shifted))
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-10, atol=1e-10)


@group_relative_cases
@battery
@given(layouts(max_group=1))
def test_a_group_of_one_teaches_nothing(case: Case, layout: Layout) -> None:
    assert case.algorithm.min_group >= 2  # the loop takes such groups out; the loss agrees
    p = problem(case.algorithm, layout, MIXED)
    loss, grads = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))
    if case.regularised:
        other = replace(p.rollout, rewards=p.rollout.rewards * 3 + 1)
        assert_same(
            value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, other)),
            (loss, grads),
            0.0,
        )
    else:
        assert loss == 0
        assert all(bool((grad == 0).all()) for grad in grads.values())


@every_case
def test_rewards_matter_exactly_where_the_algorithm_says_so(case: Case) -> None:
    layout = Layout([0, 0, 1, 1], [[True] * 2] * 4, [1, 0, 0, 1], seed=1)
    p = problem(case.algorithm, layout, NEAR)
    swapped = replace(p.rollout, rewards=1 - p.rollout.rewards)
    _, a = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))
    _, b = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, swapped))
    same = all(bool((a[name] == b[name]).all()) for name in a)
    assert same != case.algorithm.needs_reward


@every_case
def test_declared_names(case: Case) -> None:
    """Metrics live under the algorithm's own name; no number of the batch has two origins."""
    layout = Layout([0, 0], [[True]] * 2, [1, 0], seed=1)
    p = problem(case.algorithm, layout, NEAR)
    batch = prepared(case.algorithm, p.rollout)  # raises where `prepare` reuses a frozen name
    logged = case.algorithm.metrics(p.scores, batch)
    assert all(name.startswith(f"{case.name}/") for name in logged)
    assert set(case.algorithm.normalisers) <= set(batch.numbers)


@every_case
def test_hyper_parameters_are_frozen(case: Case) -> None:
    assert case.algorithm == ALGORITHMS[case.name](**dict(case.kwargs))
    with pytest.raises(AttributeError):
        case.algorithm.something = 1  # type: ignore[attr-defined]
