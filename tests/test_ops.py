"""Closed-form numbers of the shared reductions."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable

import beartype
import jaxtyping
import pytest
import torch
from torch import Tensor

from covary import ops
from tests.algorithms.helpers import on_ranks

INF = float("inf")
NAN = float("nan")


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestMasked:
    X = f64([[1.0, 2.0, NAN], [-INF, 4.0, INF], [NAN, NAN, NAN]])
    MASK = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])

    def test_sum(self) -> None:
        assert ops.masked_sum(self.X, self.MASK).tolist() == [3.0, 4.0, 0.0]

    def test_mean(self) -> None:
        assert ops.masked_mean(self.X, self.MASK).tolist() == [1.5, 4.0, 0.0]

    @pytest.mark.parametrize("reduce", [ops.masked_sum, ops.masked_mean])
    def test_gradient_is_zero_under_the_mask(self, reduce: Callable[..., Tensor]) -> None:
        x = self.X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(reduce(x, self.MASK).sum(), x)
        weight = 0.5 if reduce is ops.masked_mean else 1.0
        assert grad.tolist() == [[weight, weight, 0], [0, 1, 0], [0, 0, 0]]

    def test_log_ratio(self) -> None:
        policy, old = f64([[-1.0, -INF, NAN]]), f64([[-1.5, -INF, 0.0]])
        mask = torch.tensor([[True, False, False]])
        live = policy.requires_grad_()
        value = ops.log_ratio(live, old, mask)
        assert value.tolist() == [[0.5, 0.0, 0.0]]
        (grad,) = torch.autograd.grad(value.sum(), live)
        assert grad.tolist() == [[1.0, 0.0, 0.0]]


class TestGrouped:
    X = f64([1.0, 5.0, 2.0, 6.0, 7.0, 3.0])
    GROUP = torch.tensor([0, 2, 0, 1, 2, 0])

    def test_sum_and_size(self) -> None:
        assert ops.group_sum(self.X, self.GROUP).tolist() == [6.0, 6.0, 12.0]
        assert ops.group_size(self.GROUP).tolist() == [3, 1, 2]

    def test_center(self) -> None:
        assert ops.center(self.X, self.GROUP).tolist() == [-1.0, -1.0, 0.0, 0.0, 1.0, 1.0]

    def test_variance_is_unbiased_and_zero_for_one(self) -> None:
        expected = [statistics.variance([1, 2, 3]), 0.0, statistics.variance([5, 7])]
        assert ops.group_variance(self.X, self.GROUP).tolist() == expected

    def test_covariance_is_unbiased_and_zero_for_one(self) -> None:
        y = f64([2.0, 0.0, 5.0, 7.0, 3.0, -1.0])
        expected = [statistics.covariance([1, 2, 3], [2, 5, -1]), 0.0, statistics.covariance([5, 7], [0, 3])]
        torch.testing.assert_close(ops.group_covariance(self.X, y, self.GROUP), f64(expected))
        itself = ops.group_covariance(self.X, self.X, self.GROUP)
        assert torch.equal(itself, ops.group_variance(self.X, self.GROUP))

    def test_leave_one_out(self) -> None:
        # Group 0 is 1, 2, 3; group 2 is 5, 7; the 6 is alone.
        expected = [1 - 5 / 2, 5 - 7, 2 - 4 / 2, 0.0, 7 - 5, 3 - 3 / 2]
        torch.testing.assert_close(ops.leave_one_out(self.X, self.GROUP), f64(expected))

    def test_first_best(self) -> None:
        x = f64([3.0, 1.0, 3.0, -2.0, 0.0, 3.0, 1.0])
        group = torch.tensor([0, 2, 0, 1, 2, 0, 2])
        assert ops.first_best(x, group).tolist() == [True, True, False, True, False, False, False]
        assert ops.first_best(-x, group).tolist() == [True, False, False, True, True, False, False]
        infinite = f64([-INF, -INF, INF, 0.0])
        assert ops.first_best(infinite, torch.tensor([0, 0, 1, 1])).tolist() == [True, False, True, False]

    def test_nothing(self) -> None:
        x, group = self.X[:0], self.GROUP[:0]
        assert ops.group_sum(x, group).shape == (0,)
        assert ops.group_variance(x, group).shape == (0,)
        assert ops.group_covariance(x, x, group).shape == (0,)
        assert ops.all_equal(x, group).shape == (0,)
        assert ops.leave_one_out(x, group).shape == (0,)
        assert ops.first_best(x, group).shape == (0,)

    def test_all_equal_sees_through_rounding(self) -> None:
        """A mean of numbers that are almost equal may be one of them."""
        x, group = f64([0.7, 0.7, 0.7, 1.0, 1.0 + 1e-15, 3.0]), torch.tensor([0, 0, 0, 1, 1, 2])
        assert ops.all_equal(x, group).tolist() == [True, False, True]
        assert ops.standardise(x, group, eps=0.0)[[0, 1, 2, 5]].tolist() == [0.0] * 4

    def test_standardise(self) -> None:
        x, group = f64([1.0, 4.0, 0.0, 4.0]), torch.tensor([0, 1, 0, 1])
        std = statistics.stdev([1, 0])
        actual = ops.standardise(x, group, eps=0.1)
        expected = f64([0.5 / (std + 0.1), 0, -0.5 / (std + 0.1), 0])
        torch.testing.assert_close(actual, expected)


class TestWhiten:
    X = f64([[1.0, 1.0, NAN], [3.0, INF, 5.0]])
    MASK = torch.tensor([[True, True, False], [True, False, True]])

    def test_population_statistics_of_masked_entries(self) -> None:
        values = [1.0, 1.0, 3.0, 5.0]
        mean, std = statistics.mean(values), math.sqrt(statistics.pvariance(values) + 1e-8)
        expected = f64([[(1 - mean) / std, (1 - mean) / std, 0], [(3 - mean) / std, 0, (5 - mean) / std]])
        torch.testing.assert_close(ops.whiten(self.X, self.MASK, lambda x: x), expected)

    def test_statistics_are_those_of_all_ranks(self) -> None:
        whole = ops.whiten(self.X, self.MASK, lambda x: x)
        ranks = on_ranks([lambda reduce, i=i: ops.whiten(self.X[[i]], self.MASK[[i]], reduce) for i in (0, 1)])
        torch.testing.assert_close(torch.cat(ranks), whole)
        alone = ops.whiten(self.X[[1]], self.MASK[[1]], lambda x: x)  # negative control
        assert float((alone - whole[[1]]).abs().max()) > 0.1

    def test_equal_entries_and_no_entries(self) -> None:
        equal = ops.whiten(torch.full((2, 3), 0.7, dtype=torch.float64), self.MASK, lambda x: x)
        assert float(equal.abs().max()) < 1e-10
        assert (ops.whiten(self.X, torch.zeros_like(self.MASK), lambda x: x) == 0).all()

    def test_single_precision_keeps_its_digits(self) -> None:
        """A mean far from 0 in float32: statistics are taken in float64."""
        x = torch.tensor([[4096.0, 4096.25, 4096.5]])
        actual = ops.whiten(x, torch.ones_like(x, dtype=torch.bool), lambda x: x)
        assert actual.dtype == torch.float32
        assert actual.tolist() == [pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)], rel=1e-6)]


class TestClipping:
    RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 4.0)

    @pytest.mark.parametrize(
        ("advantage", "value", "slope"),
        [
            (1.0, [0.5, 0.9, 1.0, 1.1, 1.3, 1.3], [0.5, 0.9, 1.0, 1.1, 0.0, 0.0]),
            (-1.0, [-0.7, -0.9, -1.0, -1.1, -1.5, -4.0], [0.0, -0.9, -1.0, -1.1, -1.5, -4.0]),
            (0.0, [0.0] * 6, [0.0] * 6),
        ],
    )
    def test_clipped_surrogate(self, advantage: float, value: list[float], slope: list[float]) -> None:
        log_ratio = f64([list(self.RATIOS)]).log().requires_grad_()
        surrogate = ops.clipped_surrogate(log_ratio, f64([[advantage]]), 0.3, 0.3)
        torch.testing.assert_close(surrogate, f64([value]))
        (grad,) = torch.autograd.grad(surrogate.sum(), log_ratio)
        torch.testing.assert_close(grad, f64([slope]))

    @pytest.mark.parametrize("function", [ops.clipped_surrogate, ops.clipped])
    def test_advantages_of_rows_do_not_broadcast_over_tokens(self, function: Callable[..., Tensor]) -> None:
        with pytest.raises(ValueError, match="advantages of 1 dimension for log-ratios of 2"):
            function(torch.ones(3, 3), torch.ones(3), 0.2, 0.2)

    def test_two_sided_clip_range(self) -> None:
        log_ratio = f64([[1.5, 0.5], [1.5, 0.5]]).log()
        surrogate = ops.clipped_surrogate(log_ratio, f64([[1.0], [-1.0]]), low=0.2, high=0.28)
        torch.testing.assert_close(surrogate, f64([[1.28, 0.5], [-1.5, -0.8]]))

    def test_clip_fraction(self) -> None:
        log_ratio = f64([[1.5, 0.5, 1.0], [1.5, 0.5, 0.5]]).log()
        mask = torch.tensor([[True, True, True], [True, True, False]])
        share = ops.share(ops.clipped(log_ratio, f64([[1.0], [-1.0]]), 0.2, 0.2), mask)
        assert share == pytest.approx(2 / 5)  # 1.5 going up, 0.5 going down

    @pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
    def test_clipped_is_where_the_gradient_is_gone(self, advantage: float) -> None:
        """Of sequences and of tokens alike; without an advantage nothing is clipped."""
        log_ratio = f64(list(self.RATIOS)).log().requires_grad_()
        advantages = torch.full_like(log_ratio, advantage)
        (slope,) = torch.autograd.grad(ops.clipped_surrogate(log_ratio, advantages, 0.2, 0.3).sum(), log_ratio)
        held = ops.clipped(log_ratio, advantages, 0.2, 0.3)
        assert torch.equal(held, (slope == 0) & (advantages != 0))
        assert held.sum() == {1.0: 2, -1.0: 1, 0.0: 0}[advantage]
        tokens = ops.clipped(log_ratio.unsqueeze(-1), advantages.unsqueeze(-1), 0.2, 0.3)
        assert torch.equal(tokens.squeeze(-1), held)

    def test_share(self) -> None:
        where = torch.tensor([[True, True], [True, False]])
        assert ops.share(where, torch.tensor([[True, False], [True, True]])) == pytest.approx(2 / 3)
        assert ops.share(where, torch.zeros_like(where)) == 0.0

    def test_check_clip(self) -> None:
        ops.check_clip(0.2, 5.0)
        for low in (0.0, 1.0, -0.1, NAN):
            with pytest.raises(ValueError, match=f"lower clip takes a number between 0 and 1, got {low}"):
                ops.check_clip(low, 0.2)
        for high in (0.0, -1.0, NAN):
            with pytest.raises(ValueError, match=f"upper clip takes a number above 0, got {high}"):
                ops.check_clip(0.2, high)

    def test_ratio_is_finite_and_positive_everywhere(self) -> None:
        x = torch.tensor([-1e30, -1000.0, 0.0, 1.0, 1000.0, 1e30], requires_grad=True)
        r = ops.ratio(x)
        assert r.tolist() == pytest.approx([math.exp(-20), math.exp(-20), 1, math.e, math.exp(20), math.exp(20)])
        (grad,) = torch.autograd.grad(r.sum(), x)
        assert grad.tolist() == pytest.approx([0, 0, 1, math.e, 0, 0])


class TestK3:
    def test_values(self) -> None:
        d = f64([-1.0, 0.0, 2.0])
        expected = f64([math.e - 2, 0.0, math.exp(-2) + 1])
        torch.testing.assert_close(ops.k3(d), expected)

    def test_precise_near_zero_in_single_precision(self) -> None:
        d = torch.tensor([1e-5, -1e-5])
        assert (ops.k3(d) >= 0).all()
        assert ops.k3(d).tolist() == pytest.approx([5e-11, 5e-11], rel=1e-2)
        naive = (-d).exp() - 1 + d  # negative control
        assert naive.tolist() != pytest.approx([5e-11, 5e-11], rel=1e-2)

    def test_gradient_and_extremes(self) -> None:
        d = torch.tensor([-1e3, -1.0, 0.0, 2.0, 1e3], requires_grad=True)
        value = ops.k3(d)
        assert value.isfinite().all()
        (grad,) = torch.autograd.grad(value.sum(), d)
        assert grad.tolist() == pytest.approx([0, 1 - math.e, 0, 1 - math.exp(-2), 0])


class TestShapes:
    """The annotations are contracts: with a run-time checker, wrong shapes and dtypes raise."""

    @staticmethod
    def checked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return jaxtyping.jaxtyped(typechecker=beartype.beartype)(inspect.unwrap(function))

    @pytest.mark.parametrize(
        ("function", "arguments"),
        [
            (ops.masked_sum, (torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool))),
            (ops.masked_sum, (torch.ones(2, 3), torch.ones(3, dtype=torch.bool))),
            (ops.masked_mean, (torch.ones(2, 3), torch.ones(2, 3))),  # a mask of floats
            (ops.center, (torch.ones(3), torch.zeros(4, dtype=torch.long))),
            (ops.center, (torch.ones(3, 1), torch.zeros(3, dtype=torch.long))),
            (ops.center, (torch.ones(3), torch.zeros(3))),  # group ids of floats
            (
                ops.log_ratio,
                (torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3, dtype=torch.bool)),
            ),
        ],
    )
    def test_wrong_shapes_raise(self, function: Callable[..., Tensor], arguments: tuple[object, ...]) -> None:
        with pytest.raises(jaxtyping.TypeCheckError):
            self.checked(function)(*arguments)

    def test_right_shapes_pass(self) -> None:
        ones = torch.ones(2, 3)
        assert self.checked(ops.masked_sum)(ones, ones.bool()).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("value", [0.3, 0.1, 1e6 / 3])
def test_equal_rows_are_centred_to_exactly_zero(value: float) -> None:
    """Sums of ten such numbers round, and AdamW would make whole steps of what is left."""
    group = torch.tensor([0] * 3 + [1] * 10)
    x = torch.full((13,), value, requires_grad=True)
    assert (x - (ops.group_sum(x, group) / ops.group_size(group))[group]).abs().max() > 0
    assert ops.center(x, group).abs().max() == 0
    (ops.center(x, group) * torch.arange(13.0)).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.arange(13.0) - torch.tensor([1.0] * 3 + [7.5] * 10))
