"""GVPO's theorems, by exact enumeration on small softmax policies.

Names P1, P2, ... are those of the mathematical specification. Every loss here is `GVPO.loss`; what it is
compared with is written out in each test. A policy is six logits, a completion one token, unless the
property needs longer ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from covary.algorithms import GVPO
from tests.algorithms.helpers import make_batch
from tests.algorithms.policies import (
    ALGORITHM,
    ATOMS,
    BETA,
    REFERENCE,
    REWARDS,
    SAMPLERS,
    Trees,
    batch_of,
    expected_loss,
    gradient,
    logits,
    loss_of,
    minimise,
    of_logits,
    optimum,
    total_variation,
)


def half_variance(logps: Tensor, sampler: Tensor, reference: Tensor = REFERENCE) -> Tensor:
    """1/2 Var of a = beta * Delta - R under a fixed sampler."""
    a = BETA * (logps - reference) - REWARDS
    return (sampler * (a - (sampler * a).sum()).square()).sum() / 2


def covariance(sampler: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (sampler * x * y).sum() - (sampler * x).sum() * (sampler * y).sum()


class TestGradient:
    GROUPS = ((0, 3, 1, 5), (2, 2, 4), (1, 0))

    def test_p1_live_mean_detached_mean_and_weights_agree(self) -> None:
        theta = logits(1)

        def detached_mean(z: Tensor) -> Tensor:
            total = z.new_zeros(())
            for group in self.GROUPS:
                atoms = list(group)
                delta = z.log_softmax(-1)[atoms] - REFERENCE[atoms]
                r = REWARDS[atoms]
                residual = BETA * (delta - delta.mean().detach()) - (r - r.mean())
                total = total + residual.square().sum() / (2 * (len(atoms) - 1))
            return total / len(self.GROUPS)

        def weights(z: Tensor) -> Tensor:
            total = z.new_zeros(())
            for group in self.GROUPS:
                atoms = list(group)
                logp = z.log_softmax(-1)[atoms]
                delta, r = logp - REFERENCE[atoms], REWARDS[atoms]
                w = ((r - r.mean()) - BETA * (delta - delta.mean())).detach()
                assert abs(float(w.sum())) < 1e-15
                total = total - BETA * (w * logp).sum() / (len(atoms) - 1)
            return total / len(self.GROUPS)

        ours = of_logits(lambda logps: loss_of(logps, self.GROUPS))
        expected = gradient(ours, theta)
        torch.testing.assert_close(gradient(detached_mean, theta), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient(weights, theta), expected, rtol=0, atol=1e-12)

        step = 1e-5
        for atom in range(ATOMS):
            e = torch.zeros_like(theta)
            e[atom] = step
            slope = (ours(theta + e) - ours(theta - e)) / (2 * step)
            assert float(slope) == pytest.approx(float(expected[atom]), abs=1e-8)

    def test_p4_gradient_of_the_logits(self) -> None:
        theta = logits(2)
        for sampler in SAMPLERS.values():
            a = BETA * (theta.log_softmax(-1) - REFERENCE) - REWARDS
            expected = BETA * sampler * (a - (sampler * a).sum())
            actual = gradient(of_logits(expected_loss(sampler)), theta)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("seed", [None, 3], ids=["P12-at-the-reference", "P12b-anywhere"])
    def test_p12_is_beta_times_rloo_with_the_kl_in_the_reward(self, seed: int | None) -> None:
        """Reward R - beta * Delta, leave-one-out baseline, no ratio; any sample set, on policy or not."""
        theta = REFERENCE.clone() if seed is None else logits(seed)

        def rloo(z: Tensor) -> Tensor:
            logp = z.log_softmax(-1)
            rewards = (REWARDS - BETA * (logp.detach() - REFERENCE)).tolist()
            total = z.new_zeros(())
            for group in self.GROUPS:
                reward = [rewards[i] for i in group]
                for i, atom in enumerate(group):
                    others = reward[:i] + reward[i + 1 :]
                    advantage = reward[i] - sum(others) / len(others)
                    total = total - advantage * logp[atom] / len(group)
            return total / len(self.GROUPS)

        actual = gradient(of_logits(lambda logps: loss_of(logps, self.GROUPS)), theta)
        torch.testing.assert_close(actual, BETA * gradient(rloo, theta), rtol=0, atol=1e-12)

    def test_p12_needs_the_kl_away_from_the_reference(self) -> None:
        """Negative control: two different references give different gradients unless Delta is 0."""
        theta = logits(3)
        near = gradient(of_logits(lambda p: loss_of(p, self.GROUPS)), theta)
        plain = gradient(of_logits(lambda p: loss_of(p, self.GROUPS, reference=theta.log_softmax(-1))), theta)
        assert float((near - plain).abs().max()) > 1e-3


class TestExpectation:
    @pytest.mark.parametrize("k", [2, 3])
    def test_p2_unbiased_over_all_tuples(self, k: int) -> None:
        sampler, theta = SAMPLERS["skewed"], logits(4)

        def expectation(z: Tensor) -> Tensor:
            logps = z.log_softmax(-1)
            terms = [
                sampler[list(atoms)].prod() * loss_of(logps, [atoms])
                for atoms in itertools.product(range(ATOMS), repeat=k)
            ]
            return torch.stack(terms).sum()

        def exact(z: Tensor) -> Tensor:
            return half_variance(z.log_softmax(-1), sampler)

        torch.testing.assert_close(expectation(theta), exact(theta), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient(expectation, theta), gradient(exact, theta), rtol=0, atol=1e-12)
        biased = (k - 1) / k * exact(theta)  # what 1 / k in place of 1 / (k - 1) would give
        assert abs(float(expectation(theta) - biased)) > 1e-3

    def test_p8_decomposition(self) -> None:
        """Advantage, covariance with the reference, variance of the policy, and a constant."""
        sampler, theta = SAMPLERS["skewed"], logits(5)

        def parts(z: Tensor) -> Tensor:
            logp = z.log_softmax(-1)
            return (
                -BETA * covariance(sampler, REWARDS, logp)
                - BETA**2 * covariance(sampler, logp, REFERENCE)
                + BETA**2 / 2 * covariance(sampler, logp, logp)
            )

        constant = (
            BETA**2 / 2 * covariance(sampler, REFERENCE, REFERENCE)
            + covariance(sampler, REWARDS, REWARDS) / 2
            + BETA * covariance(sampler, REFERENCE, REWARDS)
        )
        ours = of_logits(expected_loss(sampler))
        torch.testing.assert_close(ours(theta), parts(theta) + constant, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient(ours, theta), gradient(parts, theta), rtol=0, atol=1e-12)

    def test_p11_pairwise_identity(self) -> None:
        theta = logits(6).log_softmax(-1)
        a = (BETA * (theta - REFERENCE) - REWARDS).tolist()
        group = [0, 4, 2, 5, 1]
        k = len(group)
        pairs = sum((a[i] - a[j]) ** 2 for i, j in itertools.combinations(group, 2))
        expected = pairs / k / (2 * (k - 1))
        assert float(loss_of(theta, [group])) == pytest.approx(expected, abs=1e-12)
        two = (a[3] - a[1]) ** 2 / 4
        assert float(loss_of(theta, [[3, 1]])) == pytest.approx(two, abs=1e-12)

    def test_p5_invariances(self) -> None:
        theta = logits(7)
        groups = [[0, 3, 1, 5], [2, 4, 4]]

        def gradient_of(groups: list[list[int]], rewards: Tensor, reference: Tensor) -> Tensor:
            return gradient(of_logits(lambda p: loss_of(p, groups, rewards, reference)), theta)

        expected = gradient_of(groups, REWARDS, REFERENCE)
        for groups_, rewards, reference in [
            (groups, REWARDS + 17.0, REFERENCE),
            ([[5, 0, 1, 3], [4, 2, 4]], REWARDS, REFERENCE),
            (groups[::-1], REWARDS, REFERENCE),
            (groups, REWARDS, REFERENCE - 4.2),  # log Z, or an unnormalised reference
        ]:
            actual = gradient_of(groups_, rewards, reference)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        tilted = gradient_of(groups, REWARDS, REFERENCE + REWARDS)  # negative control
        assert float((tilted - expected).abs().max()) > 1e-3


class TestOptimum:
    @pytest.mark.parametrize("name", list(SAMPLERS))
    def test_p3_the_same_for_every_sampler_that_covers(self, name: str) -> None:
        z = minimise(of_logits(expected_loss(SAMPLERS[name])), logits(8))
        assert total_variation(z.softmax(-1), optimum()) < 1e-4
        assert total_variation(REFERENCE.exp(), optimum()) > 0.1  # there was a way to go

    def test_p3b_from_sampled_groups(self) -> None:
        """The noise of a group vanishes at the optimum, so a constant step size converges."""
        generator = torch.Generator().manual_seed(9)
        steps, k = 3000, 5
        drawn = torch.multinomial(SAMPLERS["uniform"], steps * k, True, generator=generator)
        rollout = batch_of(drawn.reshape(steps, k).tolist(), REWARDS, REFERENCE)
        z = logits(9).requires_grad_()
        optimizer = torch.optim.Adam([z], lr=0.03)
        for rows in torch.arange(steps * k).split(k):
            batch = rollout.take(rows).with_totals()
            optimizer.zero_grad()
            ALGORITHM.loss({"policy": z.log_softmax(-1)[drawn[rows], None]}, batch).backward()
            optimizer.step()
        assert total_variation(z.detach().softmax(-1), optimum()) < 1e-4
        # Every group is at rest, not only their mean.
        final = of_logits(lambda p: loss_of(p, [[0, 1, 2, 3, 4]]))
        assert float(gradient(final, z.detach()).abs().max()) < 1e-4

    def test_p6_iterations_multiply(self) -> None:
        """n exact steps, each with the last policy as reference, are one with beta / n."""
        n, beta = 4, 0.6
        algorithm = GVPO(beta=beta)
        logps = REFERENCE
        for _ in range(n):
            expectation = expected_loss(SAMPLERS["uniform"], reference=logps, algorithm=algorithm)
            logps = minimise(of_logits(expectation), logps).log_softmax(-1)
        assert total_variation(logps.exp(), optimum(beta=beta / n)) < 1e-6

        def objective(z: Tensor) -> Tensor:
            p = z.log_softmax(-1)
            return -(p.exp() * (REWARDS - beta / n * (p - REFERENCE))).sum()

        best = minimise(objective, REFERENCE).softmax(-1)
        assert total_variation(logps.exp(), best) < 1e-6
        assert total_variation(logps.exp(), optimum(beta=beta)) > 0.01  # one step is not enough

    def test_p7_an_atom_that_is_never_sampled_is_not_determined(self) -> None:
        """Negative control of P3: without support the minimiser is not unique."""
        sampler = torch.tensor([0.25, 0.25, 0.0, 0.2, 0.1, 0.2], dtype=torch.float64)
        seen = sampler > 0
        expectation = of_logits(expected_loss(sampler))
        conditional = optimum()[seen] / optimum()[seen].sum()

        def policy(mass_of_unseen: float) -> Tensor:
            p = torch.empty(ATOMS, dtype=torch.float64)
            p[~seen] = mass_of_unseen
            p[seen] = (1 - mass_of_unseen) * conditional
            return p

        few, many = policy(0.1), policy(0.4)
        assert total_variation(few, many) > 0.1
        for p in (few, many):
            assert float(gradient(expectation, p.log()).abs().max()) < 1e-12

        reached = minimise(expectation, logits(10)).softmax(-1)
        law = reached[seen] / reached[seen].sum()
        assert total_variation(law, conditional) < 1e-10

    def test_p15_groups_without_differences(self) -> None:
        """Equal rewards still pull towards the reference; at the reference, and for k = 1, nothing does."""
        rewards, theta = torch.ones(ATOMS, dtype=torch.float64), logits(11)

        def gradient_of(group: list[int], at: Tensor) -> Tensor:
            return gradient(of_logits(lambda p: loss_of(p, [group], rewards)), at)

        pull = gradient_of([0, 1, 2, 3], theta)
        assert float(pull.abs().max()) > 1e-3
        away = REFERENCE - theta.log_softmax(-1)
        centred = away[:4] - away[:4].mean()
        assert torch.equal(pull[:4].sign(), -centred.sign())  # down the loss is towards the reference
        assert float(gradient_of([0, 1, 2, 3], REFERENCE).abs().max()) <= 1e-16
        assert (gradient_of([4], theta) == 0).all()
        assert loss_of(theta.log_softmax(-1), [[4]]) == 0


class TestTrees(Trees):
    def test_p13_one_row_at_a_time(self) -> None:
        """dloss/dscores of the whole group, then any order of one-row passes: the same gradient."""
        leaves = [self.leaves()[i] for i in (0, 9, 3, 12, 6)]
        theta, reference = self.theta(1), self.theta(2)
        batch = self.batch(leaves, [1.0, 0.0, 0.5, 0.0, 1.0], reference)
        full = gradient(lambda th: ALGORITHM.loss({"policy": self.rows(th, leaves)}, batch), theta)
        weights = gradient(lambda scores: ALGORITHM.loss({"policy": scores}, batch), self.rows(theta, leaves))
        z = theta.clone().requires_grad_()
        for i in (3, 0, 4, 1, 2):
            logps = self.token_logps(z, leaves[i])
            (logps * weights[i, : len(logps)]).sum().backward()
        assert z.grad is not None
        torch.testing.assert_close(z.grad, full, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("fill", [-1e9, float("-inf"), float("nan")])
    def test_p13_whatever_stands_under_the_mask(self, fill: float) -> None:
        leaves = [self.leaves()[i] for i in (0, 9, 3)]
        theta, reference = self.theta(1), self.theta(2)
        batch = self.batch(leaves, [1.0, 0.0, 0.5], reference)

        def loss(th: Tensor, fill: float) -> Tensor:
            return ALGORITHM.loss({"policy": self.rows(th, leaves, fill)}, batch)

        torch.testing.assert_close(loss(theta, fill), loss(theta, 0.0), rtol=0, atol=1e-12)
        torch.testing.assert_close(
            gradient(lambda th: loss(th, fill), theta),
            gradient(lambda th: loss(th, 0.0), theta),
            rtol=0,
            atol=1e-12,
        )
        # Negative control: a mask that multiplies lets infinities through.
        multiplied = (self.rows(theta, leaves, fill) * batch.mask).sum()
        assert bool(multiplied.isfinite()) == (fill == -1e9)

    def test_p14_truncated_completions_are_leaves(self) -> None:
        theta, reference = self.theta(3), self.theta(4)
        leaves = self.leaves()
        mass = torch.stack([self.token_logps(theta, leaf).sum().exp() for leaf in leaves])
        truncated = torch.tensor([leaf[-1] != self.END for leaf in leaves])
        assert float(mass.sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(mass[~truncated].sum()) < 0.99

        # Each leaf once is the uniform sampler (up to a factor), truncated ones with reward 0.
        rewards = [0.0 if cut else len(leaf) / 3 for leaf, cut in zip(leaves, truncated, strict=True)]
        start = torch.stack([self.token_logps(reference, leaf).sum() for leaf in leaves])
        target = (start + torch.tensor(rewards) / BETA).softmax(-1)

        def reached(kept: list[int]) -> Tensor:
            some = [leaves[i] for i in kept]
            batch = self.batch(some, [rewards[i] for i in kept], reference)
            z = minimise(lambda th: ALGORITHM.loss({"policy": self.rows(th, some)}, batch), theta)
            return torch.stack([self.token_logps(z, leaf).sum().exp() for leaf in leaves])

        everything = list(range(len(leaves)))
        assert total_variation(reached(everything), target) < 1e-6
        # Negative control: without truncated rows their mass is whatever it happens to be.
        ended = [i for i in everything if not truncated[i]]
        assert total_variation(reached(ended), target) > 0.01


class TestOfficialCode:
    @pytest.mark.parametrize(("rows_per_micro_batch", "factor"), [(3, 1.0), (6, 2.0)])
    def test_p13b_official_scale(self, rows_per_micro_batch: int, factor: float) -> None:
        """The official code sums a micro-batch's rows and averages micro-batches: (rows / k) times ours."""
        k, groups = 3, [[0, 1, 2], [3, 4, 5], [1, 1, 4], [5, 0, 3]]
        theta = logits(12)

        def official(z: Tensor) -> Tensor:
            logps = z.log_softmax(-1)
            terms = []  # per row, with the group's mean of implicit rewards detached
            for group in groups:
                implicit = BETA * (logps[group] - REFERENCE[group])
                advantage = REWARDS[group] - REWARDS[group].mean()
                centred = implicit - implicit.mean().detach()
                terms.extend(0.5 * (advantage - centred).square() / (k - 1))
            micro_batches = [
                torch.stack(terms[i : i + rows_per_micro_batch]).sum()
                for i in range(0, len(terms), rows_per_micro_batch)
            ]
            return torch.stack(micro_batches).mean()

        ours = of_logits(lambda p: loss_of(p, groups))
        assert float(official(theta) / ours(theta)) == pytest.approx(factor, abs=1e-9)
        ratio = gradient(official, theta) / gradient(ours, theta)
        torch.testing.assert_close(ratio, torch.full_like(ratio, factor), rtol=0, atol=1e-9)


class TestP10Replay:
    """Portfolios h:f: h completions without replacement from a prompt's past, f fresh ones, one mean over all k."""

    OLD = REFERENCE.exp()  # the policy at the start of this rollout, GVPO's reference
    PAST = logits(4).log_softmax(-1)  # the policy that sampled the past

    def pair(self, logps: Tensor, i: int, j: int, reference: Sequence[Tensor]) -> Tensor:
        """(a_i - a_j)^2 / 4: GVPO.loss of a group of two, each with its own reference log-probs."""
        numbers = torch.stack([reference[0][i], reference[1][j]]).unsqueeze(-1)
        batch = make_batch([0, 0], rewards=REWARDS[[i, j]].tolist(), numbers={"reference": numbers}).with_totals()
        return ALGORITHM.loss({"policy": logps[[i, j]].unsqueeze(-1)}, batch)

    def expected(self, past_reference: Tensor, h: int = 2, f: int = 6) -> Callable[[Tensor], Tensor]:
        """E[loss] of a group of h past and f fresh completions, over all its pairs (P11)."""
        fresh, past = (self.OLD, REFERENCE), (self.PAST.exp(), past_reference)
        kinds = [(f * (f - 1) / 2, fresh, fresh), (h * (h - 1) / 2, past, past), (f * h, fresh, past)]

        def expectation(logps: Tensor) -> Tensor:
            total = logps.new_zeros(())
            for count, (p, p_reference), (q, q_reference) in kinds:
                for i, j in itertools.product(range(ATOMS), repeat=2):
                    total = total + count * p[i] * q[j] * self.pair(logps, i, j, (p_reference, q_reference))
            return 2 * total / ((h + f) * (h + f - 1))

        return of_logits(expectation)

    def test_reference_of_the_current_old_policy_gives_the_optimum(self) -> None:
        assert total_variation(minimise(self.expected(REFERENCE), logits(8)).softmax(-1), optimum()) < 1e-6

    def test_log_probs_stored_when_sampled_give_another(self) -> None:
        assert total_variation(minimise(self.expected(self.PAST), logits(8)).softmax(-1), optimum()) > 1e-3

    def test_stratified_loss_by_enumeration(self) -> None:
        history, h, f = (1, 4, 4, 2), 2, 2  # as stored: a past completion may occur twice
        n, k = len(history), h + f
        logps = logits(5).log_softmax(-1)
        enumerated = torch.zeros((), dtype=torch.float64)
        draws = list(itertools.combinations(history, h))
        for fresh in itertools.product(range(ATOMS), repeat=f):
            weight = self.OLD[list(fresh)].prod() / len(draws)
            for past in draws:
                enumerated = enumerated + weight * loss_of(logps, [[*fresh, *past]])

        a = BETA * (logps - REFERENCE) - REWARDS
        mean, var = (self.OLD * a).sum(), covariance(self.OLD, a, a)
        mean_h, var_h = a[list(history)].mean(), a[list(history)].var(correction=0)

        def formula(correction: float) -> Tensor:
            cross = f * h * (var + var_h + (mean - mean_h).square())
            within = f * (f - 1) * var + h * (h - 1) * var_h * correction
            return (within + cross) / (2 * k * (k - 1))

        torch.testing.assert_close(enumerated, formula(n / (n - 1)), rtol=0, atol=1e-12)
        assert abs(float(enumerated - formula(1.0))) > 1e-3  # as if drawn with replacement
