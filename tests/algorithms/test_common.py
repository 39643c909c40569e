"""What must hold for every algorithm, on ragged batches that hypothesis makes.

A new algorithm needs one row in CASES and one loop in reference.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from covary.algorithms import ALGORITHMS
from covary.batch import Algorithm, Reduce, Scores
from tests.algorithms import reference
from tests.algorithms.helpers import (
    Layout,
    on_ranks,
    prepared,
    problem,
    value_and_grad,
    value_and_grad_in_parts,
)

NEAR = (0.0, 0.05, 0.15)  # nats from the frozen score: inside every clip range
FEATURES = ("from_prior", "valid")
MIXED = (0.05, 0.15, 0.3, 0.6, 1.5)  # on both sides of the clips, never at a kink


@dataclass(frozen=True)
class Case:
    """One setting of one algorithm.

    Attributes:
        name: key of ALGORITHMS.
        reference: the slow loop.
        shift: to all rewards of what a constant may be added without effect.
        regularised: has a term that does not depend on rewards, so that a group of one still counts.
        breaks_ties: takes the first of several rows with the same reward.
        stops_gradient: the loss is no function whose derivative the gradient is: it holds detached live scores.
        kwargs: hyper-parameters.
    """

    name: str
    reference: Callable[[Any, list[reference.Row], int], Tensor]
    shift: Literal["group", "rollout", "nothing"] = "group"
    regularised: bool = False
    breaks_ties: bool = False
    stops_gradient: bool = False
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.name](**dict(self.kwargs))


def case(name: str, loop: Callable[[Any, list[reference.Row], int], Tensor], kwargs: Any = None, **facts: Any) -> Case:
    """A Case with its hyper-parameters as a dict."""
    return Case(name, loop, kwargs=tuple((kwargs or {}).items()), **facts)


CASES = [
    case("gvpo", reference.gvpo, {"beta": 0.3}),
    case("gvpo", reference.gvpo_terms, {"beta": 0.3, "terms": ("covariance",)}),
    case("gvpo", reference.gvpo_terms, {"beta": 0.3, "terms": ("variance",)}),
    case("gvpo", reference.gvpo_terms, {"beta": 0.3, "terms": ()}),
    case(
        "gvpo",
        reference.gvpo_terms,
        {"beta": 0.3, "terms": ("covariance",), "entropy_coef": 0.2},
        regularised=True,
    ),
    case("grpo", reference.grpo, regularised=True),
    case("grpo", reference.grpo, {"kl_coef": 0.0, "clip": 0.25}),
    case("dr_grpo", reference.dr_grpo),
    case("dapo", reference.dapo, {"clip_low": 0.1, "clip_high": 0.4, "overlong_share": 0.7}),
    case("dapo", reference.dapo, {"overlong_share": 0.0}),
    case("rloo", reference.rloo, {"kl_coef": 0.0}),
    case("rloo", reference.rloo, {"kl_coef": 0.3}),
    case("remax", reference.remax),
    case("reinforce_pp", reference.reinforce_pp, {"kl_coef": 0.0}, shift="rollout"),
    case("reinforce_pp", reference.reinforce_pp, {"kl_coef": 0.3}, shift="rollout"),
    case("reinforce_pp_baseline", reference.reinforce_pp_baseline, {"kl_coef": 0.0}),
    case("reinforce_pp_baseline", reference.reinforce_pp_baseline, {"kl_coef": 0.2}, regularised=True),
    case("gspo", reference.gspo, {"clip_low": 0.1, "clip_high": 0.3}),
    case("gmpo", reference.gmpo),
    case("gpg", reference.gpg),
    case("cispo", reference.cispo, {"clip_high": 0.28}, stops_gradient=True),
    case("raft", reference.raft, breaks_ties=True),
    case("raft", reference.raft, {"keep": "correct"}, shift="nothing"),
    case("dpo", reference.dpo, {"beta": 0.5}, breaks_ties=True),
    case("sft", reference.sft, shift="nothing"),
    case("gvpo_opd", reference.gvpo_opd),
    case("gvpo_opd", reference.gvpo_opd, {"alpha": 0.0}),
    case("gvpo_opd", reference.gvpo_opd, {"alpha": 0.75, "length_ref": 8.0}),
    case("seqkd", reference.seqkd, shift="nothing"),
    case("supervised_kd", reference.supervised_kd, shift="nothing"),
    case("supervised_kd", reference.supervised_kd, {"data": "teacher", "temperature": 2.0}, shift="nothing"),
    case("gkd", reference.gkd, shift="nothing"),
    case("minillm", reference.minillm, shift="nothing"),
    case(
        "minillm",
        reference.minillm,
        {"teacher_mix": 0.0, "length_norm": False, "gamma": 0.9, "whitening": False},
        shift="nothing",
    ),
    case("pg_opd_sequence", reference.pg_opd_sequence),
    case("pg_opd_sequence", reference.pg_opd_sequence, {"baseline": "mean"}),
    case("pg_opd_sequence", reference.pg_opd_sequence, {"baseline": "grpo_std"}),
    case("pg_opd_sequence", reference.pg_opd_sequence, {"baseline": "none"}, shift="nothing"),
    case("pg_opd_token", reference.pg_opd_token, shift="nothing"),
    case("covrl", reference.covrl),
    case(
        "covrl",
        reference.covrl,
        {
            "ratio": "source",
            "kl_denominator": "hybrid_exact",
            "nll_select": "all",
            "preset": "elbo",
            "prior_share": 0.3,
        },
    ),
    case(
        "covrl",
        reference.covrl,
        {
            "ratio": "hybrid_exact",
            "kl_denominator": "hybrid",
            "nll_select": "is_weighted",
            "composite_weight": 0.2,
            "advantage_std": True,
            "kl_truncated": True,
        },
    ),
    case("covrl", reference.covrl, {"kl_denominator": "full", "nll_select": "posadv", "kl_coef": 0.3, "nll_coef": 0.5}),
    case("covrl", reference.covrl, {"kl_grad": "prior_only", "nll_select": "none"}, stops_gradient=True),
    case("covrl", reference.covrl, {"kl_grad": "posterior_only", "composite_weight": 0.8}, stops_gradient=True),
    case("covrl_jsd", reference.covrl_jsd, {"composite_weight": 0.4, "jsd_coef": 0.7, "nll_coef": 0.5}),
    case("latro", reference.latro, {"answer_coef": 0.7}, regularised=True),
    case("latro_grpo", reference.rewards_in_grpo, {"kl_coef": 0.0}),
    case("jlb", reference.jlb, regularised=True),
    case("jlb_grpo", reference.jlb_grpo),
    case("verifree", reference.verifree, shift="nothing"),
    case("verifree_grpo", reference.rewards_in_grpo),
    case("rlpr", reference.rlpr),
    case("ravr", reference.ravr, {"kl_coef": 0.4, "nll_coef": 0.6}, shift="nothing"),
    case("ravr_grpo", reference.ravr),
]


def identity(case: Case) -> str:
    def text(value: Any) -> str:
        return "+".join(value) if isinstance(value, tuple) else str(value)

    return "-".join([case.name, *(f"{key}={text(value)}" for key, value in case.kwargs)])


def named(cases: list[Case], broken: Mapping[str, str] | None = None) -> Any:
    """Parametrises `case`. `broken` names algorithms that fail, and why."""
    marks = {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in (broken or {}).items()}
    return pytest.mark.parametrize(
        "case", [pytest.param(c, id=identity(c), marks=marks.get(identity(c), ())) for c in cases]
    )


every_case = named(CASES)
battery = settings(max_examples=15, deadline=None, derandomize=True)


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


@named(
    CASES,
)
@battery
@given(layouts())
def test_equals_the_loop_of_its_equation(case: Case, layout: Layout) -> None:
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    leaves = {name: score.clone().requires_grad_() for name, score in p.scores.items()}

    def of_row(x: Tensor, row: int, mask: Tensor) -> Any:
        return x[row] if x.dim() == 1 else x[row][mask[row]]

    everything, learned = p.rollout, iter(range(len(batch)))
    rows = []
    for i in range(len(everything)):
        learn = bool(everything.learn[i])
        position = next(learned) if learn else None
        rows.append(
            reference.Row(
                group=int(everything.group[i]),
                reward=float(everything.rewards[i]),
                live={}
                if position is None
                else {n: list(of_row(x, position, batch.mask).reshape(-1)) for n, x in leaves.items()},
                frozen={s.name: of_row(everything[s.name], i, everything.mask).tolist() for s in case.algorithm.frozen},
                learn=learn,
                answer_length=int(everything.answer_mask[i].sum()),
                truncated=bool(everything.truncated[i]),
                features={n: float(x[i]) for n, x in everything.numbers.items() if n in FEATURES},
            )
        )
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
    rollout = p.rollout
    if case.breaks_ties:
        rollout = replace(rollout, rewards=rollout.rewards + 1e-3 * torch.arange(len(rollout)))
    loss, grads = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, rollout))

    order = torch.tensor(rng.sample(range(len(rollout)), len(rollout)))
    names = torch.tensor(rng.sample(range(rollout.num_groups), rollout.num_groups))
    shuffled = rollout.take(order)
    shuffled = replace(shuffled, group=names[shuffled.group])
    # Scores belong to the rows to learn from: where those went.
    learned = (rollout.learn.cumsum(0) - 1)[order][shuffled.learn]
    actual = value_and_grad(case.algorithm, take(p.scores, learned), prepared(case.algorithm, shuffled))
    assert_same(actual, (loss, take(grads, learned)))


@every_case
@settings(battery, max_examples=30)
@given(layouts(), st.sampled_from([-2.0, -6.0, 1e300, float("-inf"), float("inf"), float("nan")]))
def test_tokens_that_were_not_sampled_have_no_effect(case: Case, layout: Layout, garbage: float) -> None:
    p = problem(case.algorithm, layout, MIXED)
    mask, learned_mask = p.rollout.mask, p.rollout.mask[p.rollout.learn]
    expected = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))

    numbers = {name: fill_masked(x, mask, garbage) for name, x in p.rollout.numbers.items()}
    scores = {name: fill_masked(x, learned_mask, garbage) for name, x in p.scores.items()}
    batch = prepared(case.algorithm, replace(p.rollout, numbers=numbers))
    loss, grads = value_and_grad(case.algorithm, scores, batch)

    assert_same((loss, grads), expected)
    for grad in grads.values():
        if grad.dim() == 2:
            assert (grad[~learned_mask] == 0).all()
    logged = case.algorithm.metrics(scores, batch)
    assert logged == pytest.approx(case.algorithm.metrics(p.scores, prepared(case.algorithm, p.rollout)))


@every_case
@battery
@given(layouts(), st.randoms(use_true_random=False))
def test_micro_batches_of_whole_groups_sum_to_the_whole(case: Case, layout: Layout, rng: random.Random) -> None:
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    part_of = [rng.randrange(3) for _ in range(batch.num_groups)]
    parts = [[i for i, g in enumerate(batch.group.tolist()) if part_of[g] == n] for n in range(3)]
    parts = [rng.sample(rows, len(rows)) for rows in parts if rows]
    actual = value_and_grad_in_parts(case.algorithm, p.scores, batch, parts)
    assert_same(actual, value_and_grad(case.algorithm, p.scores, batch))


@every_case
@settings(battery, max_examples=10)
@given(layouts(), st.randoms(use_true_random=False))
def test_ranks_sum_to_the_whole(case: Case, layout: Layout, rng: random.Random) -> None:
    """Each of two ranks prepares its own groups; whitening and totals are those of both."""
    p = problem(case.algorithm, layout, MIXED)
    if p.rollout.num_groups == 1:
        return
    ids = rng.sample(range(p.rollout.num_groups), p.rollout.num_groups)
    of_rank = [torch.isin(p.rollout.group, torch.tensor(part)) for part in (ids[:1], ids[1:])]
    learned = [rows[p.rollout.learn] for rows in of_rank]

    def work(rank: int) -> Callable[[Reduce], Tensor]:
        def run(reduce: Reduce) -> Tensor:
            batch = prepared(case.algorithm, p.rollout.take(of_rank[rank]), reduce)
            return case.algorithm.loss(take(p.scores, learned[rank]), batch)

        return run

    losses = on_ranks([work(0), work(1)])
    expected = case.algorithm.loss(p.scores, prepared(case.algorithm, p.rollout))
    torch.testing.assert_close(sum(losses), expected, rtol=1e-12, atol=1e-12)


@named([c for c in CASES if not ALGORITHMS[c.name].coupled])
@battery
@given(layouts(), st.randoms(use_true_random=False))
def test_uncoupled_micro_batches_may_split_groups(case: Case, layout: Layout, rng: random.Random) -> None:
    p = problem(case.algorithm, layout, MIXED)
    batch = prepared(case.algorithm, p.rollout)
    part_of = [rng.randrange(3) for _ in range(len(batch))]
    parts = [[i for i, part in enumerate(part_of) if part == n] for n in range(3)]
    actual = value_and_grad_in_parts(case.algorithm, p.scores, batch, [r for r in parts if r])
    assert_same(actual, value_and_grad(case.algorithm, p.scores, batch))


@named([c for c in CASES if ALGORITHMS[c.name].coupled])
def test_coupled_micro_batches_must_not_split_groups(case: Case) -> None:
    """Negative control: if this were equal, `coupled` would be declared for nothing."""
    layout = Layout([0, 0, 0, 0, 1, 1], [[True] * 3] * 6, [1, 0.5, 0.2, 0, 1, 0], seed=3)
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
    for row in range(len(batch)):
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


@named([c for c in CASES if not c.stops_gradient])
@pytest.mark.parametrize("distances", [NEAR, MIXED], ids=["near", "mixed"])
@settings(battery, max_examples=5)
@given(layouts())
def test_gradient_is_the_derivative(case: Case, distances: tuple[float, ...], layout: Layout) -> None:
    p = problem(case.algorithm, layout, distances)
    batch = prepared(case.algorithm, p.rollout)
    names = list(p.scores)

    def loss(*scores: Tensor) -> Tensor:
        return case.algorithm.loss(dict(zip(names, scores, strict=True)), batch)

    inputs = tuple(p.scores[name].clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(loss, inputs)


@named([c for c in CASES if c.shift != "nothing"])
@battery
@given(layouts(), st.lists(st.floats(-10, 10), min_size=3, max_size=3))
def test_a_constant_added_to_rewards_moves_nothing(case: Case, layout: Layout, constants: list[float]) -> None:
    p = problem(case.algorithm, layout, MIXED)
    of_group = torch.tensor(constants if case.shift == "group" else constants[:1] * 3, dtype=torch.float64)
    shifted = replace(p.rollout, rewards=p.rollout.rewards + of_group[p.rollout.group])
    _, expected = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))
    _, actual = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, shifted))
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-10, atol=1e-10)


@named([c for c in CASES if c.shift != "group" and c.algorithm.needs_reward])
def test_a_constant_added_to_one_group_matters_where_the_case_says_so(case: Case) -> None:
    """Negative control of `shift`."""
    layout = Layout([0, 0, 1, 1], [[True] * 2] * 4, [1, 0, 0, 1], seed=1)
    p = problem(case.algorithm, layout, NEAR)
    shifted = replace(p.rollout, rewards=p.rollout.rewards + (p.rollout.group == 0))
    _, expected = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, p.rollout))
    _, actual = value_and_grad(case.algorithm, p.scores, prepared(case.algorithm, shifted))
    assert any(float((actual[name] - grad).abs().max()) > 1e-3 for name, grad in expected.items())


@named([c for c in CASES if c.breaks_ties])
def test_of_rows_with_the_same_reward_the_first_counts(case: Case) -> None:
    """Negative control of `breaks_ties`: rows in another order, another row."""
    p = problem(case.algorithm, Layout([0, 0, 0, 0], [[True] * 2] * 4, [1, 1, 0, 0], seed=1), NEAR)
    pairs = [
        value_and_grad(case.algorithm, take(p.scores, order), prepared(case.algorithm, p.rollout.take(order)))[1]
        for order in (torch.arange(4), torch.tensor([1, 0, 3, 2]))
    ]
    for grads in pairs:
        assert (grads["policy"][0] != 0).all()
        assert (grads["policy"][1] == 0).all()


@named([c for c in CASES if c.shift == "group" and c.algorithm.min_group > 1])
@battery
@given(layouts(max_group=1))
def test_a_group_of_one_teaches_nothing(case: Case, layout: Layout) -> None:
    # The loop takes such groups out; the loss agrees.
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
