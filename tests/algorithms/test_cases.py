"""Mistakes that other libraries made and fixed, with the right numbers.

Names are those of the shared collection: L (losses and their normalisation), K (KL), R (rollouts).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from covary import ops
from covary.algorithms import (
    CISPO,
    DPO,
    GMPO,
    GRPO,
    GSPO,
    GVPO,
    RLOO,
    SFT,
    DrGRPO,
    MiniLLM,
    ReinforcePP,
    ReinforcePPBaseline,
    ReMax,
)
from covary.batch import Algorithm, Batch, one_process
from covary.types import Example
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


def with_advantages(log_ratios: list[list[float]], advantages: list[float]) -> Batch:
    """An update of given advantages: the live log-probs are the log-ratios, the old ones 0."""
    rollout = make_batch(
        [0] * len(log_ratios),
        mask=[[True] * len(row) for row in log_ratios],
        numbers={"old": [[0.0] * len(row) for row in log_ratios], "advantage": advantages},
    )
    return rollout.with_totals()


class TestL02SequenceRatio:
    """GSPO with a clip that never acts: the ratio is the row's, and so is its weight."""

    LOG_RATIOS = torch.tensor([[0.2, 0.0, 0.0], [-0.3, 0.0, 0.0]], dtype=torch.float64)
    BATCH = with_advantages([[0.2, 0.0], [-0.3, 0.0, 0.0]], [1.0, -1.0])

    def test_every_row_counts_once(self) -> None:
        loss, grads = value_and_grad(GSPO(clip_low=0.99, clip_high=99.0), {"policy": self.LOG_RATIOS}, self.BATCH)
        assert float(loss) == pytest.approx(-0.100167, abs=1e-6)
        close(grads["policy"], [[-0.276293] * 2 + [0], [0.150806] * 3])  # s_i of 1.105171 and 0.904837

    def test_a_ratio_broadcast_over_tokens_is_wrong(self) -> None:
        """Negative control: five tokens with their row's ratio have a mean of the other sign."""
        lengths = self.BATCH.mask.sum(-1)
        ratios = (self.LOG_RATIOS.sum(-1) / lengths).exp()
        broadcast = -(lengths * ratios * self.BATCH["advantage"]).sum() / lengths.sum()
        assert float(broadcast) == pytest.approx(0.100834, abs=1e-6)


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

    def test_metrics(self) -> None:
        logged = GVPO(beta=0.1).metrics({"policy": self.NEW}, self.batch())
        assert logged["gvpo/max_implicit_reward"] == pytest.approx(0.2)
        # Centred: R .5 -.5 -.5 .5, l 3.5 .5 2.5 -6.5, l' 2.5 .5 4.5 -7.5; each product is divided by k - 1 = 3.
        assert logged["gvpo/advantage"] == pytest.approx(-0.1 * -3.0 / 3)
        assert logged["gvpo/covariance"] == pytest.approx(-0.01 * 69.0 / 3)
        assert logged["gvpo/variance"] == pytest.approx(0.01 / 2 * 61.0 / 3)
        # What does not depend on the policy: Var(l'), Var(R) and their covariance.
        constant = 0.01 / 2 * 83.0 / 3 + 1.0 / 3 / 2 + 0.1 * -5.0 / 3
        terms = sum(logged[f"gvpo/{name}"] for name in ("advantage", "covariance", "variance"))
        assert terms + constant == pytest.approx(0.11)


class TestL06ClipOfGeometricMeans:
    @pytest.mark.parametrize(
        ("advantage", "expected", "slopes"),
        [
            (1.0, -0.904837, [0.0, -0.452419]),  # 0.6 is cut to 0.4, -0.6 is not
            (-1.0, 1.105171, [0.552585, 0.0]),  # the other way round
            (0.0, 0.0, [0.0, 0.0]),
        ],
    )
    def test_one_sided_in_log_space(self, advantage: float, expected: float, slopes: list[float]) -> None:
        scores = {"policy": torch.tensor([[0.6, -0.6]], dtype=torch.float64)}
        loss, grads = value_and_grad(GMPO(clip=0.4), scores, with_advantages([[0.6, -0.6]], [advantage]))
        assert float(loss) == pytest.approx(expected, abs=1e-6)
        close(grads["policy"], [slopes])


class TestL07ClippedWeights:
    """CISPO caps the weight of a token and drops no gradient; small ratios are not lifted."""

    RATIOS, ADVANTAGES = (1.5, 0.3, 1.5), [1.0, 1.0, -1.0]

    def test_gradient_of_every_token(self) -> None:
        log_ratios = [[math.log(r)] for r in self.RATIOS]
        scores = {"policy": torch.tensor(log_ratios, dtype=torch.float64)}
        batch = with_advantages(log_ratios, self.ADVANTAGES)
        _, grads = value_and_grad(CISPO(clip_high=0.28), scores, batch)
        close(3 * grads["policy"], [[-1.28], [-0.3], [1.28]])
        # Negative control: PPO's clip has no gradient for the first, and no cap for the last.
        _, ppo = value_and_grad(DrGRPO(clip=0.28), scores, batch)
        close(3 * ppo["policy"], [[0.0], [-0.3], [1.5]])


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

    def test_leave_one_out(self) -> None:
        """k / (k - 1) times the centred reward: what a row gets for being one of the others' baseline."""
        rollout = make_batch([0] * 8, rewards=[1, 1, 1, 0, 0, 0, 0, 0])
        close(RLOO(kl_coef=0.0).prepare(rollout, one_process)["advantage"], [0.714286] * 3 + [-0.428571] * 5)
        interleaved = make_batch([0, 1] * 4, rewards=[1, 0, 1, 0, 1, 0, 0, 0])
        advantage = RLOO(kl_coef=0.0).prepare(interleaved, one_process)["advantage"]
        close(advantage, [4 / 3 * a for a in (0.25, 0, 0.25, 0, 0.25, 0, -0.75, 0)], 1e-12)

    @pytest.mark.parametrize("algorithm", [GVPO(), GRPO(), DrGRPO(), RLOO(kl_coef=0.0)], ids=lambda a: type(a).__name__)
    def test_one_id_per_completion_is_refused_and_harmless(self, algorithm: Algorithm) -> None:
        assert algorithm.min_group == 2
        rollout = make_batch([0], rewards=[0.7])
        assert algorithm.prepare(rollout, one_process).get("advantage", torch.zeros(1)) == 0


class TestL10WhiteningUnderTheMask:
    """Three tokens with 1, 1 and 3: mean 5/3, population variance 8/9, whatever the padding."""

    EXPECTED = ((-0.707107, -0.707107, 0, 0), (1.414214, 0, 0, 0))

    @pytest.mark.parametrize("padding", [0.0, 1e9, float("nan"), float("-inf")])
    @pytest.mark.parametrize("width", [4, 9])
    def test_padding_is_not_counted_and_stays_0(self, padding: float, width: int) -> None:
        x = torch.full((2, width), padding, dtype=torch.float64)
        x[0, :2], x[1, 0] = 1.0, 3.0
        mask = torch.zeros(2, width, dtype=torch.bool)
        mask[0, :2] = mask[1, 0] = True
        expected = torch.zeros(2, width, dtype=torch.float64)
        expected[:, :4] = torch.tensor(self.EXPECTED)
        torch.testing.assert_close(ops.whiten(x, mask, one_process), expected, rtol=0, atol=1e-6)

    def test_reinforce_pp_whitens_tokens(self) -> None:
        """A row counts once a token: rewards 1 (two tokens) and 3 (one)."""
        rollout = make_batch([0, 1], mask=[[True, True], [True]], rewards=[1.0, 3.0])
        advantage = ReinforcePP(kl_coef=0.0).prepare(rollout, one_process)["advantage"]
        close(advantage, [list(row[:2]) for row in self.EXPECTED])


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


class TestL13PreferencesAtTheStart:
    def test_the_loss_starts_at_ln_2_and_the_margin_at_0(self) -> None:
        """The policy is the initial one: sigmoid of 0 for every pair, and half of beta on either side."""
        start = torch.tensor([[-1.0, -2.0], [-0.5, 0.0], [-3.0, -1.0], [-2.0, -2.0]], dtype=torch.float64)
        rollout = make_batch(
            [0, 0, 1, 1],
            mask=[[True, True], [True], [True, True], [True, True]],
            rewards=[1, 0, 0, 1],
            numbers={"initial": start},
        )
        batch = prepared(DPO(beta=0.1), rollout)
        loss, grads = value_and_grad(DPO(beta=0.1), {"policy": start}, batch)
        assert float(loss) == pytest.approx(math.log(2), abs=1e-12)
        assert DPO(beta=0.1).metrics({"policy": start}, batch) == {"dpo/accuracy": 0.0, "dpo/margin": 0.0}
        step = 0.1 * 0.5 / 2  # beta, sigmoid(0), two pairs
        close(grads["policy"], [[-step, -step], [step, 0], [step, step], [-step, -step]], 1e-12)

    def test_half_a_pair_is_no_pair(self) -> None:
        """A row whose live score is not finite leaves the loss; the other row alone has no margin."""
        start = torch.tensor([[-1.0], [-0.5], [-2.0]], dtype=torch.float64)
        batch = prepared(DPO(), make_batch([0, 0, 0], rewards=[1, 0, 0.5], numbers={"initial": start}))
        for left in ([0, 2], [1, 2]):  # without the rejected row, without the chosen one
            _, grads = value_and_grad(DPO(), {"policy": start[left]}, batch.take(left))
            assert (grads["policy"] == 0).all()


class TestR05GreedyBaselines:
    """Two prompts, two samples each, and a greedy completion of each: k is three."""

    GROUP, LEARN = [0, 0, 0, 1, 1, 1], [True, True, False] * 2
    REWARDS = (1, 0, 1, 0, 1, 0)

    def test_one_greedy_completion_a_prompt_from_the_prompt_alone(self) -> None:
        plans = ReMax().plan([Example("a", "x"), Example("b", "y")], 3, np.random.default_rng(0))
        greedy = [request for plan in plans for request in plan if request.decoding == "greedy"]
        assert [(r.count, r.context, r.source, r.learn) for r in greedy] == [(1, "prompt", "policy", False)] * 2
        sampled = [request for plan in plans for request in plan if request.decoding == "sample"]
        assert [(r.count, r.learn) for r in sampled] == [(2, True)] * 2
        assert [sum(request.count for request in plan) for plan in plans] == [3, 3]

    def rollout(self, rewards: tuple[float, ...] = REWARDS) -> Batch:
        return make_batch(self.GROUP, mask=[[True, True]] * 6, rewards=rewards, learn=self.LEARN)

    def test_advantages_and_no_greedy_row_in_the_loss(self) -> None:
        batch = prepared(ReMax(), self.rollout())
        close(batch["advantage"], [0, -1, 0, 1], 0)
        assert batch.learn.all()
        assert batch.totals == {"groups": 2.0, "rows": 4.0, "tokens": 8.0}
        scores = {"policy": torch.full((4, 2), -1.5, dtype=torch.float64)}
        _, grads = value_and_grad(ReMax(), scores, batch)
        close(grads["policy"], [[0, 0], [0.25, 0.25], [0, 0], [-0.25, -0.25]], 0)

    def test_without_a_scored_greedy_row_there_is_no_advantage(self) -> None:
        """The row is not finite, so the loop takes it out; a baseline of 0 would push up whatever scored."""
        without = self.rollout().take([0, 1, 3, 4, 5])
        advantage = ReMax().prepare(without, one_process)["advantage"]
        assert advantage[:2].isnan().all()
        close(advantage[2:4], [0, 1], 0)

    def test_the_order_of_rows_does_not_matter(self) -> None:
        order = [5, 2, 0, 3, 1, 4]
        advantage = ReMax().prepare(self.rollout().take(order), one_process)["advantage"]
        close(advantage, [0, 0, 0, 0, -1, 1], 0)


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

    def k2_of_rows(self, rows: list[int], weights: Tensor | None = None) -> tuple[float, Tensor]:
        """REINFORCE++-baseline's loss over rows of these outcomes with equal rewards, per unit of kl_coef."""
        algorithm = ReinforcePPBaseline(kl_coef=0.25)
        z = self.P.log().requires_grad_()
        policy = z.log_softmax(-1)[rows].unsqueeze(-1)
        old = {"old": policy.detach(), "initial": self.INITIAL.log()[rows].unsqueeze(-1)}
        batch = prepared(algorithm, make_batch([0] * len(rows), numbers=old))
        if weights is None:
            loss = algorithm.loss({"policy": policy}, batch)
        else:
            per_row = [algorithm.loss({"policy": policy[[i]]}, batch.take([i])) for i in range(len(rows))]
            loss = (torch.stack(per_row) * weights[rows]).sum()
        return float(loss.detach()) / 0.25, torch.autograd.grad(loss, z)[0] / 0.25

    ON_POLICY, OFF_POLICY = (0,) * 7 + (1,) * 2 + (2,), (0,) * 5 + (1,) * 3 + (2,) * 2  # in proportion to P and OLD

    def test_k2_as_a_loss_has_the_gradient_of_the_kl(self) -> None:
        value, grad = self.k2_of_rows(list(self.ON_POLICY))
        assert value == pytest.approx(0.693602, abs=1e-6)  # not the KL itself, 0.583815
        close(grad, [0.4683, -0.3, -0.1682], 5e-5)

    def test_k2_off_policy_needs_the_ratio(self) -> None:
        _, plain = self.k2_of_rows(list(self.OFF_POLICY))
        close(plain, [0.5341, -0.3012, -0.2329], 5e-5)
        _, corrected = self.k2_of_rows(list(self.OFF_POLICY), weights=self.P / self.OLD)
        close(corrected, [0.4683, -0.3, -0.1682], 5e-5)


class TestX02DiscountedReturns:
    """Rewards 1, 1, 1, 1 with gamma 0.5: what follows a token counts from that token on, not from the beginning."""

    ONES, MASK = torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)

    def test_returns(self) -> None:
        after = ops.return_after(self.ONES, self.MASK, 0.5)
        close(self.ONES + 0.5 * after, [[1.875, 1.75, 1.5, 1.0]], 1e-12)
        faded = (0.5 ** torch.arange(4)) * (self.ONES + 0.5 * after)
        close(faded, [[1.875, 0.875, 0.375, 0.125]], 1e-12)  # the mistake

    def test_length_normalised_of_a_long_completion(self) -> None:
        ones, mask = torch.ones(1, 512), torch.ones(1, 512, dtype=torch.bool)
        after = ops.return_after(ones, mask, 0.9)
        weights = torch.tensor([[(1 - 0.9**n) / 0.1 for n in range(512, 0, -1)]])
        close((ones + 0.9 * after) / weights, [[1.0] * 512])
        rollout = make_batch(
            [0], mask=[[True] * 512], numbers={"teacher": ones.double() - 3, "old": -3 * ones.double()}
        )
        advantage = MiniLLM(gamma=0.9, whitening=False).prepare(rollout, one_process)["advantage"]
        close(advantage, [[1.0] * 511 + [0.0]], 1e-12)  # nothing follows the last token

    def test_masked_tokens_neither_count_nor_discount(self) -> None:
        x = torch.tensor([[1.0, float("nan"), 2.0, 4.0, float("-inf")]], dtype=torch.float64)
        mask = torch.tensor([[True, False, True, True, False]])
        after = ops.return_after(x, mask, 0.5)
        close(after[mask].unsqueeze(0), [[2.0 + 0.5 * 4.0, 4.0, 0.0]], 1e-12)
