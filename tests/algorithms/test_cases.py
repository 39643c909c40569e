"""Mistakes that other libraries made and fixed, with the right numbers: L01, L03, L04, L09, L12, K01."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covary import ops
from covary.algorithms import GRPO, GVPO, SFT, DrGRPO
from covary.batch import Batch, one_process
from tests.algorithms.helpers import (
    make_batch,
    prepared,
    value_and_grad,
    value_and_grad_in_parts,
)


def close(actual: Tensor, expected: list[float] | list[list[float]], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=tolerance)


class TestL01TokenMeansUnderAccumulation:
    """8 tokens: 2 with loss 1 and 6 with loss 3. Their mean is 2.5, however they are batched."""

    MASK = ([True] * 2, [True] * 3, [True] * 3)
    SCORES = torch.tensor([[-1, -1, 0], [-3, -3, -3], [-3, -3, -3]], dtype=torch.float64)

    @pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1, 2]], [[0], [1], [2]], [[2, 0], [1]]], ids=str)
    def test_any_split(self, parts: list[list[int]]) -> None:
        batch = prepared(SFT(), make_batch([0, 1, 1], mask=self.MASK))
        loss, grads = value_and_grad_in_parts(SFT(), {"policy": self.SCORES}, batch, parts)
        assert float(loss) == pytest.approx(2.5)
        close(grads["policy"], [[-0.125, -0.125, 0], [-0.125] * 3, [-0.125] * 3])

    def test_totals_of_a_micro_batch_are_wrong(self) -> None:
        """Negative control: a mean of micro-batch means is 2.0."""
        batch = make_batch([0, 1, 1], mask=self.MASK)
        means = [
            float(SFT().loss({"policy": self.SCORES[rows]}, batch.take(rows).with_totals())) for rows in ([0], [1, 2])
        ]
        assert sum(means) / 2 == pytest.approx(2.0)

    def test_two_ranks(self) -> None:
        """Totals are sums over ranks, so the losses of two ranks add up to the mean over both."""
        whole = make_batch([0, 1, 1], mask=self.MASK)
        ranks = [[0], [1, 2]]
        own = [torch.tensor(list(whole.take(rows).with_totals().totals.values())) for rows in ranks]
        losses = []
        for rows in ranks:
            batch = whole.take(rows).with_totals(reduce=lambda _: own[0] + own[1])
            assert batch.totals == {"groups": 2.0, "rows": 3.0, "tokens": 8.0}
            losses.append(float(SFT().loss({"policy": self.SCORES[rows]}, batch)))
        assert losses == pytest.approx([0.25, 2.25])


class TestL03MaskedPositions:
    @pytest.mark.parametrize("masked", [-2.0, -6.0, float("-inf"), float("nan")])
    def test_token_mean(self, masked: float) -> None:
        batch = prepared(SFT(), make_batch([0], mask=[[True, True, False]]))
        scores = {"policy": torch.tensor([[-1.0, -2.0, masked]], dtype=torch.float64)}
        loss, grads = value_and_grad(SFT(), scores, batch)
        assert float(loss) == 1.5
        close(grads["policy"], [[-0.5, -0.5, 0]], 0)

    @pytest.mark.parametrize("masked", [-2.0, -6.0, float("-inf"), float("nan")])
    @pytest.mark.parametrize("algorithm", [GVPO(), GRPO(), DrGRPO()], ids=lambda a: type(a).__name__)
    def test_log_ratios(self, algorithm: GVPO | GRPO | DrGRPO, masked: float) -> None:
        def run(value: float) -> tuple[Tensor, dict[str, Tensor]]:
            start = [[-1.0, -2.0, -1.0], [-1.5, -0.5, -0.3]]
            rollout = make_batch(
                [0, 0],
                mask=[[True, True, False], [True, True, True]],
                rewards=[1.0, 0.0],
                numbers={score.name: start for score in algorithm.frozen},
            )
            policy = torch.tensor([[-1.1, -1.9, value], [-1.6, -0.4, -0.3]], dtype=torch.float64)
            return value_and_grad(algorithm, {"policy": policy}, prepared(algorithm, rollout))

        loss, grads = run(masked)
        expected_loss, expected = run(-1.0)
        assert loss == expected_loss
        assert torch.equal(grads["policy"], expected["policy"])
        assert grads["policy"][0, 2] == 0


class TestL04GroupMeanOverTheWholeGroup:
    OLD = (-10.0, -12.0, -8.0, -20.0)
    NEW = torch.tensor([[-9.0], [-12.0], [-10.0], [-19.0]], dtype=torch.float64)
    RESIDUALS = (-0.4, 0.5, 0.3, -0.4)

    def batch(self) -> Batch:
        rollout = make_batch([0] * 4, rewards=[1, 0, 0, 1], numbers={"reference": [[x] for x in self.OLD]})
        return prepared(GVPO(beta=0.1), rollout)

    def test_whole_group(self) -> None:
        loss, grads = value_and_grad(GVPO(beta=0.1), {"policy": self.NEW}, self.batch())
        assert float(loss) == pytest.approx(0.11)  # half the sum of squares, 0.33, over k - 1
        close(grads["policy"], [[0.1 * residual / 3] for residual in self.RESIDUALS], 1e-12)

    def test_means_of_parts_are_wrong(self) -> None:
        """Negative control: parts of a group give 0.325 and another gradient. Hence `coupled`."""
        assert GVPO.coupled
        loss, grads = value_and_grad_in_parts(GVPO(beta=0.1), {"policy": self.NEW}, self.batch(), [[0, 1], [2, 3]])
        assert float(loss) == pytest.approx(0.325)
        close(grads["policy"], [[-0.045], [0.045], [0.035], [-0.035]], 1e-12)

    def test_metric(self) -> None:
        logged = GVPO(beta=0.1).metrics({"policy": self.NEW}, self.batch())
        assert logged == {"gvpo/max_implicit_reward": pytest.approx(0.2)}


class TestL09Membership:
    def test_interleaved_groups(self) -> None:
        rollout = make_batch([0, 1] * 4, rewards=[1, 0, 1, 0, 1, 0, 0, 0])
        advantage = DrGRPO().prepare(rollout, one_process)["advantage"]
        close(advantage, [0.25, 0, 0.25, 0, 0.25, 0, -0.75, 0])
        order = [7, 6, 0, 3, 1, 2, 5, 4]
        again = DrGRPO().prepare(rollout.take(order), one_process)["advantage"]
        assert torch.equal(again, advantage[order])

    def test_standardised_with_the_unbiased_deviation(self) -> None:
        rollout = make_batch([0] * 8, rewards=[1, 1, 1, 0, 0, 0, 0, 0])
        advantage = GRPO().prepare(rollout, one_process)["advantage"]
        close(advantage, [1.207612] * 3 + [-0.724567] * 5, 5e-6)

    @pytest.mark.parametrize("algorithm", [GVPO, GRPO, DrGRPO])
    def test_one_id_per_completion_is_refused_and_harmless(self, algorithm: type[GVPO | GRPO | DrGRPO]) -> None:
        assert algorithm.min_group == 2
        rollout = make_batch([0], rewards=[0.7])
        assert algorithm().prepare(rollout, one_process).get("advantage", torch.zeros(1)) == 0


class TestL12UnscorableRows:
    """Rewards 1, unknown, 0, 1: the row leaves its group before anything is computed."""

    REWARDS = (1.0, float("nan"), 0.0, 1.0)

    def valid(self, name: str) -> Batch:
        rollout = make_batch([0] * 4, rewards=self.REWARDS, numbers={name: [[-1.0], [-2.0], [-3.0], [-4.0]]})
        return rollout.take(rollout.rewards.isfinite().nonzero().flatten())

    def test_baseline(self) -> None:
        batch = prepared(DrGRPO(), self.valid("old"))
        close(batch["advantage"], [0.333333, -0.666667, 0.333333])
        assert batch.total("rows") == 3

    def test_gvpo_weights(self) -> None:
        batch = prepared(GVPO(beta=0.1), self.valid("reference"))
        _, grads = value_and_grad(GVPO(beta=0.1), {"policy": batch["reference"]}, batch)
        close(grads["policy"], [[-0.1 / 6], [0.1 / 3], [-0.1 / 6]], 1e-12)

    def test_a_zero_in_its_place_is_wrong(self) -> None:
        """Negative control: the failed sample would be pushed down by half a reward."""
        poisoned = make_batch([0] * 4, rewards=[1, 0, 0, 1])
        close(DrGRPO().prepare(poisoned, one_process)["advantage"], [0.5, -0.5, -0.5, 0.5])


class TestK01EstimatorsOfKL:
    """Exact expectations over three outcomes, as functions of the logits of p."""

    P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    INITIAL = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    OLD = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    KL = 0.583815

    def expectation(self, sampler: Tensor, ratio: bool) -> tuple[Tensor, Tensor]:
        z = self.P.log().requires_grad_()
        logps = z.log_softmax(-1)
        terms = ops.k3(logps - self.INITIAL.log())
        if ratio:
            terms = ops.ratio(logps - sampler.log()) * terms
        value = (sampler * terms).sum()
        return value.detach(), torch.autograd.grad(value, z)[0]

    def test_on_policy_value_is_the_kl_and_gradient_the_other_one(self) -> None:
        value, grad = self.expectation(self.P, ratio=False)
        assert float(value) == pytest.approx(self.KL, abs=1e-6)
        close(grad, [0.5, -0.3, -0.2])  # of KL(initial || p); that of KL(p || initial) is below

    @pytest.mark.parametrize("sampler", [P, OLD], ids=["on-policy", "off-policy"])
    def test_with_a_live_ratio_the_gradient_is_the_kls(self, sampler: Tensor) -> None:
        value, grad = self.expectation(sampler, ratio=True)
        assert float(value) == pytest.approx(self.KL, abs=1e-6)
        close(grad, [0.4683, -0.3, -0.1682], 5e-5)

    def test_off_policy_without_a_ratio(self) -> None:
        _, grad = self.expectation(self.OLD, ratio=False)
        close(grad, [0.7021, -0.3514, -0.3507], 5e-5)

    def test_grpo_has_k3_as_a_loss(self) -> None:
        """Ten rows in the proportions of p, equal rewards: only the KL term is left."""
        outcomes = [0] * 7 + [1] * 2 + [2]
        z = self.P.log().requires_grad_()
        policy = z.log_softmax(-1)[outcomes].unsqueeze(-1)
        rollout = make_batch(
            [0] * 10,
            numbers={
                "old": self.P.log()[outcomes].unsqueeze(-1),
                "initial": self.INITIAL.log()[outcomes].unsqueeze(-1),
            },
        )
        algorithm = GRPO(kl_coef=0.04)
        loss = algorithm.loss({"policy": policy}, prepared(algorithm, rollout))
        assert loss.item() == pytest.approx(0.04 * self.KL, abs=1e-7)
        (grad,) = torch.autograd.grad(loss, z)
        close(grad / 0.04, [0.5, -0.3, -0.2])
