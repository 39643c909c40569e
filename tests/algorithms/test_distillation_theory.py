"""Distillation's theorems, by exact enumeration on small softmax policies.

Names P16 to P20, P32 and P33 are those of the mathematical specification. Every loss here is an algorithm's own; what it
is compared with is written out in each test. A policy is six logits and a completion one token of a notional length, or
a tree of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covary.algorithms import GVPO, GVPOOPD, RLOO, MiniLLM, PGOPDSequence
from covary.batch import Batch, one_process
from covary.quantities import jsd, kl
from covary.types import Completion, Example, UserError
from tests.algorithms.helpers import make_batch, prepared
from tests.algorithms.policies import (
    ATOMS,
    SAMPLERS,
    Trees,
    gradient,
    logits,
    minimise,
    of_logits,
    total_variation,
)

TEACHER = logits(20).log_softmax(-1)
LENGTHS = torch.tensor([1.0, 4.0, 2.0, 9.0, 30.0, 3.0], dtype=torch.float64)
ONES = torch.ones(ATOMS, dtype=torch.float64)
WEIGHTS = {
    "1": ONES,
    "length^-0.25": LENGTHS**-0.25,
    "length^-0.75": LENGTHS**-0.75,
    "length^-1": 1 / LENGTHS,
    "anything": torch.tensor([0.1, 3.0, 0.7, 1.9, 0.4, 2.6], dtype=torch.float64),
}
GROUPS = ((0, 3, 1, 5), (2, 2, 4), (1, 0))
OPD = GVPOOPD(alpha=0.0)  # these tests give f themselves


def batch_of(groups: Sequence[Sequence[int]], teacher: Tensor, f: Tensor) -> Batch:
    """Groups of one-token completions, given by their atoms."""
    atoms = torch.tensor([atom for group in groups for atom in group])
    numbers = {"teacher": teacher[atoms], "f": f[atoms]}
    return make_batch([g for g, group in enumerate(groups) for _ in group], numbers=numbers).with_totals()


def loss_of(logps: Tensor, groups: Sequence[Sequence[int]], teacher: Tensor = TEACHER, f: Tensor = ONES) -> Tensor:
    """GVPOOPD.loss of sampled groups under a policy's log-probs per atom."""
    atoms = torch.tensor([atom for group in groups for atom in group])
    return OPD.loss({"policy": logps[atoms].unsqueeze(-1)}, batch_of(groups, teacher, f))


def expected_loss(sampler: Tensor, teacher: Tensor = TEACHER, f: Tensor = ONES) -> Callable[[Tensor], Tensor]:
    """Per-atom log-probs -> E[loss] over pairs drawn from `sampler`, exactly (a pair of twins has loss 0)."""
    pairs = list(itertools.combinations(range(len(sampler)), 2))
    weights = [2 * float(sampler[i] * sampler[j]) for i, j in pairs]

    def expectation(logps: Tensor) -> Tensor:
        terms = [w * loss_of(logps, [pair], teacher, f) for w, pair in zip(weights, pairs, strict=True)]
        return torch.stack(terms).sum()

    return expectation


def optimum(sampler: Tensor, teacher: Tensor = TEACHER, f: Tensor = ONES) -> Tensor:
    return minimise(of_logits(expected_loss(sampler, teacher, f)), logits(21)).softmax(-1)


def tilt(teacher: Tensor, f: Tensor, low: float, high: float) -> float:
    """The c in [low, high] with sum of exp(log teacher + c / f) = 1, by bisection."""
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if (teacher + c / f).exp().sum() < 1 else (low, c)
    return low


class TestP16PlainDistillation:
    def test_the_reference_cancels(self) -> None:
        """GVPO with the reward log(teacher / reference) has this gradient for any reference."""
        theta = logits(22)
        ours = gradient(of_logits(lambda logps: loss_of(logps, GROUPS)), theta)
        for seed in (23, 24):
            reference = logits(seed).log_softmax(-1)

            def gvpo(logps: Tensor, reference: Tensor = reference) -> Tensor:
                atoms = torch.tensor([atom for group in GROUPS for atom in group])
                batch = make_batch(
                    [g for g, group in enumerate(GROUPS) for _ in group],
                    rewards=(TEACHER - reference)[atoms].tolist(),
                    numbers={"reference": reference[atoms].unsqueeze(-1)},
                ).with_totals()
                return GVPO(beta=1.0).loss({"policy": logps[atoms].unsqueeze(-1)}, batch)

            torch.testing.assert_close(gradient(of_logits(gvpo), theta), ours, rtol=0, atol=1e-12)

    def test_on_policy_it_is_the_gradient_of_the_kl(self) -> None:
        theta = logits(22)
        sampler = theta.softmax(-1)
        reverse = gradient(of_logits(lambda logps: (logps.exp() * (logps - TEACHER)).sum()), theta)
        actual = gradient(of_logits(expected_loss(sampler)), theta)
        torch.testing.assert_close(actual, reverse, rtol=0, atol=1e-12)

        def live(z: Tensor) -> Tensor:  # negative control: the sampler is a constant
            logps = z.log_softmax(-1)
            g = logps - TEACHER
            return (logps.exp() * (g - (logps.exp() * g).sum()).square()).sum() / 2

        assert float((gradient(live, theta) - reverse).abs().max()) > 0.01
        elsewhere = gradient(of_logits(expected_loss(SAMPLERS["uniform"])), theta)
        assert float((elsewhere - reverse).abs().max()) > 0.01

    @pytest.mark.parametrize("kind", ["rloo", "pg_opd_sequence"])
    def test_it_is_leave_one_out_reinforce_with_the_live_log_ratio(self, kind: str) -> None:
        """On any sample set, on policy or not; so one update a rollout of either is the same."""
        theta = logits(22)
        atoms = torch.tensor([atom for group in GROUPS for atom in group])
        sizes = torch.tensor([len(group) for group in GROUPS for _ in group])
        now = theta.log_softmax(-1)[atoms]
        rollout = make_batch(
            [g for g, group in enumerate(GROUPS) for _ in group],
            numbers={"teacher": TEACHER[atoms], "old": now},
        )
        rewards = PGOPDSequence().reward(rollout)
        algorithm = RLOO(kl_coef=0.0) if kind == "rloo" else PGOPDSequence()
        batch = prepared(algorithm, replace(rollout, rewards=rewards))
        advantage = batch["advantage"] / sizes  # theirs is a mean over rows, ours over prompts
        batch = replace(batch, numbers={"advantage": advantage}, totals={"rows": len(GROUPS)})

        def reinforce(z: Tensor) -> Tensor:
            return algorithm.loss({"policy": z.log_softmax(-1)[atoms].unsqueeze(-1)}, batch)

        ours = gradient(of_logits(lambda logps: loss_of(logps, GROUPS)), theta)
        torch.testing.assert_close(gradient(reinforce, theta), ours, rtol=0, atol=1e-12)


class TestP17TheTeacherIsTheOptimum:
    @pytest.mark.parametrize("f", WEIGHTS.values(), ids=WEIGHTS)
    @pytest.mark.parametrize("sampler", ["uniform", "reference", "adversarial"])
    def test_for_any_positive_weight(self, f: Tensor, sampler: str) -> None:
        assert total_variation(optimum(SAMPLERS[sampler], f=f), TEACHER.exp()) < 1e-4

    @pytest.mark.parametrize("alpha", [0.0, 0.75, 1.0])
    def test_in_a_tree_with_truncated_completions(self, alpha: float) -> None:
        leaves, teacher = Trees.leaves(), Trees.theta(25)
        pairs = list(itertools.combinations(range(len(leaves)), 2))
        chosen = [i for pair in pairs for i in pair]
        batch = tree_batch([leaves[i] for i in chosen], teacher, alpha, [g for g in range(len(pairs)) for _ in "ab"])

        def loss(flat: Tensor) -> Tensor:
            rows = Trees.rows(flat.reshape(-1, Trees.VOCABULARY), leaves, fill=float("nan"))
            return OPD.loss({"policy": rows[chosen]}, batch)

        found = minimise(loss, Trees.theta(26).flatten()).reshape(-1, Trees.VOCABULARY)
        assert total_variation(tree_probabilities(found), tree_probabilities(teacher)) < 1e-4

    def test_p17b_the_teachers_own_length_misses_it(self) -> None:
        """Negative control: f of the student for the student's term, f of the teacher's length for the teacher's."""
        f, other = 1 / LENGTHS, 1 / torch.tensor([3.0, 2.0, 2.0, 12.0, 9.0, 8.0], dtype=torch.float64)
        missed = optimum(SAMPLERS["uniform"], teacher=TEACHER * other / f, f=f)
        assert total_variation(missed, TEACHER.exp()) > 0.01

    def test_p17c_from_sampled_groups(self) -> None:
        leaves, teacher = Trees.leaves(), Trees.theta(27)
        draw = torch.Generator().manual_seed(0)
        theta = Trees.theta(28).requires_grad_()
        optimizer = torch.optim.Adam([theta], lr=0.03)
        groups, k, steps = 32, 4, 800
        group = [g for g in range(groups) for _ in range(k)]
        every = tree_batch(leaves, teacher, 0.75, [0] * len(leaves))
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
            rows = Trees.rows(theta, leaves)
            sampler = rows.detach().sum(-1).exp()
            chosen = torch.multinomial(sampler, groups * k, replacement=True, generator=draw)
            batch = replace(every.take(chosen), group=torch.tensor(group)).with_totals()
            optimizer.zero_grad()
            OPD.loss({"policy": rows[chosen]}, batch).backward()
            optimizer.step()
        assert total_variation(tree_probabilities(theta.detach()), tree_probabilities(teacher)) < 1e-3


def tree_batch(leaves: Sequence[tuple[int, ...]], teacher: Tensor, alpha: float, group: list[int]) -> Batch:
    f = [GVPOOPD(alpha=alpha).features(Example("", ""), Completion(list(leaf), "", "eos"))["f"] for leaf in leaves]
    mask = [[True] * len(leaf) + [False] * (Trees.LENGTH - len(leaf)) for leaf in leaves]
    numbers = {"teacher": Trees.rows(teacher, leaves).sum(-1), "f": f}
    return make_batch(group, mask=mask, numbers=numbers).with_totals()


def tree_probabilities(theta: Tensor) -> Tensor:
    return Trees.rows(theta, Trees.leaves()).sum(-1).exp()


class TestP18SignsOfF:
    F = torch.tensor([1.0, -0.6, 0.5, 1.4, -0.9, 0.8], dtype=torch.float64)

    def test_with_changing_signs_a_policy_without_loss_is_not_the_teacher(self) -> None:
        """The normaliser of pi_t exp(c / f) is convex in c, 1 at c = 0, and here 1 once more."""

        def normaliser(c: float) -> float:
            return float((TEACHER + c / self.F).exp().sum())

        away = -1e-3 if normaliser(1e-3) > 1 else 1e-3  # where it falls first
        assert normaliser(away) < 1
        c, step = away, away
        while normaliser(c) < 1:
            c += step
        low, high = c - step, c
        for _ in range(100):
            c = (low + high) / 2
            low, high = (c, high) if normaliser(c) < 1 else (low, c)
        other = TEACHER + c / self.F
        assert float(other.logsumexp(0)) == pytest.approx(0, abs=1e-12)
        assert float(expected_loss(SAMPLERS["uniform"], f=self.F)(other)) < 1e-20
        assert total_variation(other.exp(), TEACHER.exp()) > 0.1

    def test_the_gradient_in_the_logits(self) -> None:
        """pi_s d f - pi S with d = g - E g and S = sum pi_s d f."""
        theta, sampler, f = logits(29), SAMPLERS["skewed"], WEIGHTS["anything"]
        g = f * (theta.log_softmax(-1) - TEACHER)
        d = g - (sampler * g).sum()
        expected = sampler * d * f - theta.softmax(-1) * (sampler * d * f).sum()
        actual = gradient(of_logits(expected_loss(sampler, f=f)), theta)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("f", [0.0, -1.0, math.inf, math.nan])
    def test_a_weight_that_is_no_positive_number_is_refused(self, f: float) -> None:
        algorithm = GVPOOPD(weighting=lambda example, completion: f)
        with pytest.raises(
            UserError, match=r"algorithm\.weighting: f takes a finite number above 0.*'e7'.*'some text'"
        ):
            algorithm.features(Example("e7", ""), Completion([1, 2], "some text", "eos"))

    def test_a_weighting_that_raises_names_the_row(self) -> None:
        algorithm = GVPOOPD(weighting=lambda example, completion: 1 / example.columns["steps"])
        with pytest.raises(UserError, match=r"algorithm\.weighting: KeyError: 'steps' for example 'e7'"):
            algorithm.features(Example("e7", ""), Completion([1, 2], "some text", "eos"))

    def test_a_row_without_tokens_is_not_weighed(self) -> None:
        algorithm = GVPOOPD(weighting=lambda example, completion: 1 / len(completion.tokens))
        assert math.isnan(algorithm.features(Example("", ""), Completion([], "", "length"))["f"])

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"alpha": -0.1}, "alpha takes a number from 0 on"),
            ({"length_ref": 0.0}, "length_ref takes a number above 0"),
            ({"alpha": 0.5, "weighting": lambda e, c: 1.0}, "stands in the place of alpha"),
        ],
    )
    def test_settings_out_of_range(self, settings: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            GVPOOPD(**settings)


def test_p19_ten_times_the_weight_is_a_hundred_times_the_gradient() -> None:
    leaves, teacher, theta = Trees.leaves(), Trees.theta(25), Trees.theta(26)
    f = {
        length_ref: [
            GVPOOPD(length_ref=length_ref).features(Example("", ""), Completion(list(leaf), "", "eos"))["f"]
            for leaf in leaves
        ]
        for length_ref in (1.0, 10.0)
    }
    assert f[1.0] == [1 / len(leaf) for leaf in leaves]
    batch = tree_batch(leaves, teacher, 1.0, [0] * len(leaves))
    one, ten = (
        gradient(
            lambda z, f=of_length: OPD.loss(
                {"policy": Trees.rows(z, leaves)},
                replace(batch, numbers={**batch.numbers, "f": torch.tensor(f, dtype=torch.float64)}),
            ),
            theta,
        )
        for of_length in f.values()
    )
    torch.testing.assert_close(ten, 100 * one, rtol=1e-9, atol=0)


class TestP20AnUnnormalisedTeacher:
    """Another tokenizer: the score is one tokenisation's, and what the student can say does not sum to one."""

    MISSING = TEACHER + torch.tensor([0.0, -0.4, -0.1, 0.0, -0.8, -0.2], dtype=torch.float64)

    def test_without_weight_its_normalisation(self) -> None:
        assert float(self.MISSING.logsumexp(0)) < -0.1
        found = optimum(SAMPLERS["uniform"], teacher=self.MISSING)
        assert total_variation(found, self.MISSING.softmax(-1)) < 1e-6

    def test_with_a_weight_it_is_tilted(self) -> None:
        f = LENGTHS**-0.75
        c = tilt(self.MISSING, f, 0.0, 9.0)
        expected = (self.MISSING + c / f).exp()
        found = optimum(SAMPLERS["uniform"], teacher=self.MISSING, f=f)
        assert total_variation(found, expected) < 1e-6
        assert total_variation(found, self.MISSING.softmax(-1)) > 0.01

    def test_the_run_is_told(self) -> None:
        assert GVPOOPD(alpha=0.0).teacher_note(same_tokens=False) is None
        assert GVPOOPD(alpha=0.5).teacher_note(same_tokens=True) is None
        assert "algorithm.alpha: 0" in (GVPOOPD(alpha=0.5).teacher_note(same_tokens=False) or "")
        assert "tilt" in (GVPOOPD(weighting=lambda e, c: 1.0).teacher_note(same_tokens=False) or "")


class TestP32GeneralisedJSD:
    T, S = (torch.tensor([p], dtype=torch.float64).log() for p in ([0.2, 0.5, 0.3], [0.7, 0.2, 0.1]))
    TOKENS = torch.zeros(1, dtype=torch.long)

    def at(self, beta: float) -> float:
        return float(jsd(beta, self.T, self.S, self.TOKENS))

    def test_limits_of_small_and_large_beta(self) -> None:
        """jsd / beta nears KL(t || s), jsd / (1 - beta) KL(s || t); jsd itself nears 0, and jumps at the ends."""
        forward, reverse = (float(kl(p, q, self.TOKENS)) for p, q in ((self.T, self.S), (self.S, self.T)))
        assert self.at(1e-4) / 1e-4 / forward == pytest.approx(1, abs=3e-4)
        assert self.at(1 - 1e-4) / 1e-4 / reverse == pytest.approx(1, abs=3e-4)
        assert (self.at(0.0), self.at(1.0)) == (forward, reverse)
        assert self.at(1e-9) < 1e-8 < forward

    @pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
    def test_it_is_symmetric_under_exchange(self, beta: float) -> None:
        assert self.at(beta) == pytest.approx(float(jsd(1 - beta, self.S, self.T, self.TOKENS)), abs=1e-15)
        wrong = beta * float(kl(self.S, self.T, self.TOKENS)) + (1 - beta) * float(kl(self.T, self.S, self.TOKENS))
        assert abs(self.at(beta) - wrong) > 0.1  # the mixture is no detail


class TestP33MiniLLM:
    """The exact gradient of the sequence's KL, in two parts."""

    EXACT = MiniLLM(teacher_mix=0.0, length_norm=False, whitening=False)
    LEAVES = Trees.leaves()
    TEACHER = Trees.theta(30)

    def step_kl(self, theta: Tensor) -> Tensor:
        """(B, T) exact KL of every token of every leaf."""
        node = Trees.prefixes()
        s, t = theta.log_softmax(-1), self.TEACHER.log_softmax(-1)
        of_node = (s.exp() * (s - t)).sum(-1)
        rows = [[of_node[node[leaf[:i]]] for i in range(len(leaf))] for leaf in self.LEAVES]
        zero = theta.new_zeros(())
        return torch.stack([torch.stack([*row, *[zero] * (Trees.LENGTH - len(row))]) for row in rows])

    def expected_gradient(self, algorithm: MiniLLM, theta: Tensor, sampler: Tensor, inclusive: bool = False) -> Tensor:
        """E of the summed loss over leaves drawn from `sampler`, and its gradient."""
        mask = [[True] * len(leaf) + [False] * (Trees.LENGTH - len(leaf)) for leaf in self.LEAVES]
        numbers = {"teacher": Trees.rows(self.TEACHER, self.LEAVES), "old": Trees.rows(theta, self.LEAVES)}
        rollout = make_batch(range(len(self.LEAVES)), mask=mask, numbers=numbers)
        made = algorithm.prepare(rollout, one_process)
        if inclusive:
            made["advantage"] = made["advantage"] + numbers["teacher"] - numbers["old"]
        batch = replace(rollout.with_numbers(made), totals={"tokens": 1})

        def expectation(z: Tensor) -> Tensor:
            scores = {"policy": Trees.rows(z, self.LEAVES), "kl": self.step_kl(z)}
            losses = [
                algorithm.loss({n: s[[i]] for n, s in scores.items()}, batch.take([i])) for i in range(len(batch))
            ]
            return (sampler * torch.stack(losses)).sum()

        return gradient(expectation, theta)

    def test_the_two_parts_are_the_gradient_of_the_kl(self) -> None:
        theta = Trees.theta(31)
        sampler = tree_probabilities(theta)

        def sequence_kl(z: Tensor) -> Tensor:
            p = Trees.rows(z, self.LEAVES).sum(-1)
            return (p.exp() * (p - Trees.rows(self.TEACHER, self.LEAVES).sum(-1))).sum()

        exact = gradient(sequence_kl, theta)
        torch.testing.assert_close(self.expected_gradient(self.EXACT, theta, sampler), exact, rtol=0, atol=1e-12)
        twice = self.expected_gradient(self.EXACT, theta, sampler, inclusive=True)
        assert float((twice - exact).abs().max()) > 0.01  # what the public codes do

    def test_in_the_mixture_every_token_has_its_own_ratio(self) -> None:
        """rho = pi / p per token: the surrogate's gradient is rho A grad log pi where the clip does not act."""
        theta, a = Trees.theta(31), 0.2
        algorithm = replace(self.EXACT, teacher_mix=a, clip=0.999)
        mask = [[True] * len(leaf) + [False] * (Trees.LENGTH - len(leaf)) for leaf in self.LEAVES]
        s, t = Trees.rows(theta, self.LEAVES), Trees.rows(self.TEACHER, self.LEAVES)
        rollout = make_batch(range(len(self.LEAVES)), mask=mask, numbers={"teacher": t, "old": s})
        batch = replace(rollout.with_numbers(algorithm.prepare(rollout, one_process)), totals={"tokens": 1})
        live = s.clone().requires_grad_()
        loss = algorithm.loss({"policy": live, "kl": torch.zeros_like(s)}, batch)
        (grad,) = torch.autograd.grad(loss, live)
        rho = s.exp() / (a * t.exp() + (1 - a) * s.exp())
        assert float(rho.min()) < 0.9
        assert float(rho.max()) <= 1 / (1 - a)
        for i, leaf in enumerate(self.LEAVES):
            later = [float((t - s)[i, j + 1 : len(leaf)].sum()) for j in range(len(leaf))]
            expected = [-float(rho[i, j]) * later[j] for j in range(len(leaf))]
            assert grad[i, : len(leaf)].tolist() == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"teacher_mix": 1.0}, "teacher_mix takes a number from 0 and below 1"),
            ({"gamma": 1.5}, "gamma takes a number from 0 to 1"),
            ({"clip": 0.0}, "clip takes a number"),
        ],
    )
    def test_settings_out_of_range(self, settings: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MiniLLM(**settings)
