"""What the objectives promise, by exact enumeration: optima, unbiasedness, the gradients of KL estimators.

Names P9, P27, ... are those of the mathematical specification. Policies are logits over a few atoms (one-token
completions), or over a small tree where a property needs several tokens.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from covary import ops
from covary.algorithms import (
    CISPO,
    DAPO,
    DPO,
    GMPO,
    GRPO,
    GSPO,
    GVPO,
    RLOO,
    DrGRPO,
    ReinforcePP,
    ReinforcePPBaseline,
    ReMax,
)
from covary.batch import Algorithm, Batch, one_process
from tests.algorithms.helpers import Layout, make_batch, prepared, problem, value_and_grad
from tests.algorithms.policies import (
    BETA,
    REFERENCE,
    REWARDS,
    Leaves,
    Trees,
    expected_loss,
    gradient,
    logits,
    minimise,
    of_logits,
    optimum,
    total_variation,
)


def f64(values: Sequence) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def farther(actual: Tensor, wrong: Tensor, distance: float) -> bool:
    return float((actual - wrong).abs().max()) > distance


def entropy(logps: Tensor) -> Tensor:
    return -(logps.exp() * logps).sum()


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probs."""
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GVPO(beta=0.0), "beta takes a number above 0, got 0.0"),
        (lambda: GVPO(terms=(), entropy_coef=-1.0), "entropy_coef takes a number from 0 on, got -1.0"),
        (lambda: GVPO(entropy_coef=0.1), "in place of the term variance"),
        (lambda: RLOO(kl_coef=-0.1), "kl_coef takes a number from 0 on, got -0.1"),
        (lambda: ReinforcePP(kl_coef=-0.1), "kl_coef takes a number from 0 on, got -0.1"),
        (lambda: ReinforcePP(clip=1.0), "lower clip takes a number between 0 and 1, got 1.0"),
        (lambda: ReinforcePPBaseline(kl_coef=-0.1), "kl_coef takes a number from 0 on, got -0.1"),
        (lambda: ReinforcePPBaseline(clip=0.0), "lower clip takes a number between 0 and 1, got 0.0"),
        (lambda: DAPO(clip_high=0.0), "upper clip takes a number above 0, got 0.0"),
        (lambda: DAPO(overlong_share=1.0), "overlong_share takes a number from 0 and below 1, got 1.0"),
        (lambda: GSPO(clip_low=1.5), "lower clip takes a number between 0 and 1, got 1.5"),
        (lambda: GMPO(clip=0.0), "clip takes a number above 0, got 0.0"),
        (lambda: CISPO(clip_high=0.0), "clip_high takes a number above 0, got 0.0"),
        (lambda: DPO(beta=-0.1), "beta takes a number above 0, got -0.1"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Algorithm], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_term_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="terms"):
        GVPO(terms=("variance", "variance"))


class TestP9Ablations:
    """What is left of GVPO without its terms (Table II), under samples of a fixed policy: each atom once."""

    def loss(self, *terms: str, entropy_coef: float = 0.0) -> Callable[[Tensor], Tensor]:
        algorithm = GVPO(beta=BETA, terms=terms, entropy_coef=entropy_coef)  # type: ignore[arg-type]
        n = len(REWARDS)
        rollout = make_batch([0] * n, rewards=REWARDS.tolist(), numbers={"reference": REFERENCE.unsqueeze(-1)})
        batch = prepared(algorithm, rollout)

        def of_logps(logps: Tensor) -> Tensor:
            # The entropy is that of the one prompt's next token, so it stands in every row.
            scores = {"policy": logps.unsqueeze(-1), "entropy": entropy(logps).expand(n).unsqueeze(-1)}
            return algorithm.loss(scores, batch)

        return of_logits(of_logps)

    def descend(self, loss: Callable[[Tensor], Tensor], steps: int = 400, lr: float = 50.0) -> Tensor:
        z = logits(1)
        for _ in range(steps):
            z = z - lr * gradient(loss, z)
        return z

    def test_without_covariance_the_reference_is_forgotten(self) -> None:
        reached = minimise(self.loss("variance"), logits(8)).softmax(-1)
        assert total_variation(reached, (REWARDS / BETA).softmax(-1)) < 1e-6
        assert total_variation(reached, optimum()) > 0.1

    @pytest.mark.parametrize("terms", [("covariance",), ()], ids=["drop-variance", "drop-both"])
    def test_without_variance_nothing_holds_the_policy(self, terms: tuple[str, ...]) -> None:
        loss = self.loss(*terms)
        values = [float(loss(self.descend(loss, steps))) for steps in (0, 100, 200, 400)]
        assert values[-1] < -10
        # A straight way down: twice the steps, twice the fall.
        assert values[3] - values[2] == pytest.approx(2 * (values[2] - values[1]), rel=1e-6)

    def test_the_full_loss_converges_under_the_same_steps(self) -> None:
        loss = self.loss("covariance", "variance")
        z = self.descend(loss)
        assert total_variation(z.softmax(-1), optimum()) < 1e-6
        assert float(loss(z)) < 1e-12

    @pytest.mark.parametrize("coef", [0.01, 0.1, 1.0, 10.0])
    def test_no_entropy_bonus_holds_it_either(self, coef: float) -> None:
        """Entropy lies between 0 and log n, the rest falls without end: no weight bounds the loss."""
        loss = self.loss("covariance", entropy_coef=coef)
        down = -gradient(self.loss("covariance"), logits(1))  # the rest is linear in the logits
        far = [float(loss(logits(1) + t * down)) for t in (1e4, 1e5, 1e6)]
        assert far[0] > far[1] > far[2]
        assert far[2] < -1e3

    def test_no_entropy_bonus_has_the_optimum_of_gvpo(self) -> None:
        """The gradient at GVPO's optimum is a + coef * b, and no coef makes it 0."""
        best = optimum().log()
        a = gradient(self.loss("covariance"), best)
        b = gradient(self.loss("covariance", entropy_coef=1.0), best) - a
        nearest = a - b * (a @ b) / (b @ b)
        assert float(nearest.norm()) > 0.2 * float(a.norm()) > 1e-3


class TestFiveTokens:
    """GVPO++ section IV-E: pi(a) = pi(b) = 0, pi(c) = pi(d) = pi(e) = 1/3. The numbers are those of the docs page."""

    EXAMPLE = f64([0, 0, 1 / 3, 1 / 3, 1 / 3])
    EQUAL = torch.ones(5, dtype=torch.float64)
    UNIFORM = torch.full((5,), 0.2, dtype=torch.float64)

    @staticmethod
    def rare(p: float) -> Tensor:
        """Log-probs: a and b have probability p each, the others share the rest evenly."""
        return f64([p, p, *[(1 - 2 * p) / 3] * 3]).log()

    def half_variance(self, sampler: Tensor) -> Callable[[Tensor], Tensor]:
        """1/2 Var(log pi) under a given sampler, as GVPO's variance term has it."""
        algorithm = GVPO(beta=1.0, terms=("variance",))
        return expected_loss(sampler, rewards=self.EQUAL, reference=self.UNIFORM.log(), algorithm=algorithm)

    def test_values(self) -> None:
        even = self.EXAMPLE.log()
        uneven = f64([0, 0, 0.8, 0.1, 0.1]).log()
        assert float(self.half_variance(self.EXAMPLE)(even)) == 0.0
        assert float(2 * self.half_variance(uneven.exp())(uneven)) == pytest.approx(0.6919, abs=5e-5)
        entropies = [float(entropy(self.rare(p))) for p in (0.2, 0.01, 1e-8)]
        assert entropies == pytest.approx([math.log(5), 1.1885, math.log(3)], abs=5e-5)
        # Under a sampler that covers all five, the example costs more the closer it comes.
        covering = [float(2 * self.half_variance(self.UNIFORM)(self.rare(p))) for p in (0.01, 1e-4, 1e-8)]
        assert covering == pytest.approx([2.9171, 15.7913, 72.0130], abs=5e-5)

    @pytest.mark.parametrize("group", [(2, 3, 4), (2, 2, 3), (4, 4)], ids=str)
    def test_a_group_sampled_from_it_is_at_rest(self, group: tuple[int, ...]) -> None:
        algorithm = GVPO(beta=0.1, terms=("variance",))
        policy = self.EXAMPLE.log()[list(group)].unsqueeze(-1)
        rollout = make_batch([0] * len(group), rewards=[1.0] * len(group), numbers={"reference": policy})
        loss, grads = value_and_grad(algorithm, {"policy": policy}, prepared(algorithm, rollout))
        assert loss == 0
        assert (grads["policy"] == 0).all()

    def test_samples_of_it_keep_the_survivors_even_and_leave_the_others(self) -> None:
        start = f64([0.01, 0.01, 0.5, 0.28, 0.2]).log()
        reached = minimise(of_logits(self.half_variance(self.EXAMPLE)), start)
        assert torch.equal(reached[:2], start[:2])
        close(reached[2:], reached[2].expand(3), 1e-7)

    def test_entropy_goes_to_uniform_or_to_one(self) -> None:
        """Raised, the dropped tokens come back; lowered, one survivor is left. The example is neither."""
        start = f64([0.01, 0.01, 0.34, 0.33, 0.31]).log()
        raised = minimise(of_logits(lambda logps: -entropy(logps)), start).softmax(-1)
        assert total_variation(raised, self.UNIFORM) < 1e-6
        z = start
        for _ in range(300):
            z = z - 2 * gradient(of_logits(entropy), z)
        assert float(z.softmax(-1)[2]) > 0.99
        # Along the even line the slope of entropy is log((1 - m) / m) + log(2 / 3), m the mass of a and b.
        m = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
        policy = torch.stack([m / 2, m / 2, *[(1 - m) / 3] * 3])
        (slope,) = torch.autograd.grad(entropy(policy.log()), m)
        assert float(slope) == pytest.approx(math.log(99) + math.log(2 / 3), abs=1e-12)

    @pytest.mark.parametrize(("p", "push"), [(0.1, 0.078466), (0.01, 0.034166), (1e-4, 0.000811)])
    def test_on_fresh_samples_the_gradient_is_that_of_entropy(self, p: float, push: float) -> None:
        """At the sampler's own parameters the term is an entropy bonus; it parts from one on older samples."""
        at = self.rare(p)
        of_entropy = gradient(of_logits(entropy), at)
        close(gradient(of_logits(self.half_variance(at.exp())), at), -of_entropy)
        assert float(of_entropy[0]) == pytest.approx(push, abs=1e-6)
        older = gradient(of_logits(self.half_variance(self.EXAMPLE)), at)
        assert float(older.abs().max()) < 1e-15


class TestP27TruncatedSampling:
    def test_a_top_2_sampler_misses_the_target(self) -> None:
        """Negative control of GVPO's optimum: of three tokens the two likeliest are sampled, at every step."""
        tree = Trees
        leaves, reference = tree.leaves(), tree.theta(2)
        kept = reference.topk(2).indices
        top = torch.full_like(reference, -torch.inf).scatter(-1, kept, reference.gather(-1, kept))

        def leaf_logps(theta: Tensor, some: Leaves) -> Tensor:
            return torch.stack([tree.token_logps(theta, leaf).sum() for leaf in some])

        covered = [leaf for leaf, logp in zip(leaves, leaf_logps(top, leaves), strict=True) if logp.isfinite()]
        assert len(covered) < len(leaves)
        rewards = f64([len(leaf) / 3 for leaf in leaves])
        of_covered = f64([len(leaf) / 3 for leaf in covered])
        expectation = expected_loss(leaf_logps(top, covered).exp(), of_covered, leaf_logps(reference, covered))
        z = minimise(lambda theta: expectation(leaf_logps(theta, covered)), tree.theta(3))

        reached = leaf_logps(z, leaves).softmax(-1)
        target = (leaf_logps(reference, leaves) + rewards / BETA).softmax(-1)
        assert total_variation(reached, target) > 0.1
        index = [leaves.index(leaf) for leaf in covered]
        conditional = [p[index] / p[index].sum() for p in (reached, target)]
        assert total_variation(*conditional) < 1e-6


class TestP29Baselines:
    """The expected gradient over all tuples of samples, against that of the expected reward."""

    ATOMS = 4
    R = REWARDS[:ATOMS]
    THETA, INITIAL = logits(5, ATOMS), logits(6, ATOMS)

    def expected(self, algorithm: Algorithm, k: int) -> Tensor:
        """Gradient of the logits, on policy."""
        z = self.THETA.clone().requires_grad_()
        logps = z.log_softmax(-1)
        old = logps.detach()
        total = logps.new_zeros(())
        for atoms in itertools.product(range(self.ATOMS), repeat=k):
            index = list(atoms)
            numbers = {"old": old[index].unsqueeze(-1), "initial": self.INITIAL.log_softmax(-1)[index].unsqueeze(-1)}
            rollout = make_batch([0] * k, rewards=self.R[index].tolist(), numbers=numbers)
            loss = algorithm.loss({"policy": logps[index].unsqueeze(-1)}, prepared(algorithm, rollout))
            total = total + old[index].sum().exp() * loss
        return torch.autograd.grad(total, z)[0]

    def exact(self, kl_coef: float = 0.0) -> Tensor:
        """Of -(E[R] - kl_coef * KL(pi || initial))."""

        def objective(logps: Tensor) -> Tensor:
            return (logps.exp() * self.R).sum() - kl_coef * kl(logps, self.INITIAL.log_softmax(-1))

        return -gradient(of_logits(objective), self.THETA)

    @pytest.mark.parametrize("k", [2, 3])
    def test_leave_one_out_is_unbiased(self, k: int) -> None:
        close(self.expected(RLOO(kl_coef=0.0), k), self.exact())

    def test_leave_one_out_with_kl_in_the_reward_is_unbiased(self) -> None:
        close(self.expected(RLOO(kl_coef=0.3), 2), self.exact(kl_coef=0.3))
        assert farther(self.exact(), self.exact(kl_coef=0.3), 0.01)

    @pytest.mark.parametrize("k", [2, 3])
    def test_the_mean_as_baseline_shrinks_the_gradient(self, k: int) -> None:
        """Dr. GRPO's advantage holds the row's own reward in its baseline: exactly (k - 1) / k."""
        close(self.expected(DrGRPO(), k), (k - 1) / k * self.exact())

    def test_standardised_advantages_are_no_gradient_of_the_reward(self) -> None:
        """Negative control: another direction, not only another length."""
        actual = self.expected(GRPO(kl_coef=0.0), 3)
        assert float(torch.cosine_similarity(actual, self.exact(), dim=0)) < 0.999

    def test_a_greedy_baseline_is_unbiased(self) -> None:
        """It does not depend on the sample. Two samples and the greedy row, whatever its reward."""
        z = self.THETA.clone().requires_grad_()
        logps = z.log_softmax(-1)
        total = logps.new_zeros(())
        greedy = float(self.R[logps.argmax()])
        for atoms in itertools.product(range(self.ATOMS), repeat=2):
            index = list(atoms)
            rewards = [*self.R[index].tolist(), greedy]
            batch = prepared(ReMax(), make_batch([0] * 3, rewards=rewards, learn=[True, True, False]))
            loss = ReMax().loss({"policy": logps[index].unsqueeze(-1)}, batch)
            total = total + logps.detach()[index].sum().exp() * loss
        close(torch.autograd.grad(total, z)[0], self.exact())


class TestP30Sequences:
    LAYOUT = Layout(
        group=[0, 1, 0, 1, 0],
        mask=[[True] * 3, [True], [True, False, True], [True] * 4, [True, True]],
        rewards=[1.0, 0.0, 0.0, 1.0, 0.5],
        seed=4,
    )

    @pytest.mark.parametrize("clip", [0.05, 0.9], ids=["clipped", "unclipped"])
    def test_gspo_per_token_has_the_same_gradient(self, clip: float) -> None:
        """The token form sg[s_i] * pi / sg[pi], averaged over a row's tokens, all with the row's advantage."""
        algorithm = GSPO(clip_low=clip, clip_high=clip)
        p = problem(algorithm, self.LAYOUT, (0.0, 0.1, 0.3))
        batch = prepared(algorithm, p.rollout)

        def token_form(policy: Tensor) -> Tensor:
            total = policy.new_zeros(())
            for i, row in enumerate(policy):
                kept = batch.mask[i]
                s = (row[kept] - batch["old"][i][kept]).mean().exp().detach()
                per_token = s * (row[kept] - row[kept].detach()).exp()
                a = batch["advantage"][i]
                terms = torch.minimum(per_token * a, per_token.clamp(1 - clip, 1 + clip) * a)
                total = total - terms.mean() / len(policy)
            return total

        loss, grads = value_and_grad(algorithm, p.scores, batch)
        close(grads["policy"], gradient(token_form, p.scores["policy"]))
        close(loss, token_form(p.scores["policy"]))
        assert (algorithm.metrics(p.scores, batch)["gspo/clip_fraction"] > 0) == (clip == 0.05)

    def test_gmpo_without_its_clip_is_gspo_without_its_clip(self) -> None:
        p = problem(GMPO(), self.LAYOUT, (0.0, 0.1, 0.6))
        unclipped = GMPO(clip=1e9), GSPO(clip_low=0.999999, clip_high=1e9)
        (a, of_a), (b, of_b) = (value_and_grad(x, p.scores, prepared(x, p.rollout)) for x in unclipped)
        close(a, b)
        close(of_a["policy"], of_b["policy"])
        _, clipped = value_and_grad(GMPO(clip=0.4), p.scores, prepared(GMPO(), p.rollout))
        assert farther(clipped["policy"], of_a["policy"], 1e-3)


def test_p31_verl_leaves_the_number_of_rows_out_of_dr_grpo() -> None:
    """Its aggregation divides the sum over all tokens by the constant length alone: B times ours."""
    layout = Layout([0, 0, 0, 1, 1, 1], [[True] * n for n in (1, 4, 2, 3, 3, 1)], [1, 0, 0, 0.5, 1, 0], seed=2)
    p = problem(DrGRPO(), layout, (0.05, 0.3))
    batch = prepared(DrGRPO(), p.rollout)
    d = ops.log_ratio(p.scores["policy"], batch["old"], batch.mask)
    surrogate = ops.clipped_surrogate(d, batch["advantage"].unsqueeze(-1), 0.2, 0.2)
    verl = -ops.masked_sum(surrogate, batch.mask).sum() / batch.max_tokens
    assert float(verl / DrGRPO().loss(p.scores, batch)) == pytest.approx(6.0, rel=1e-12)


class TestP34EstimatorsOfKL:
    """Expected gradients on samples of pi, exactly: as a loss, inside the reward, and as a loss with a live ratio."""

    P, Q = logits(21, 4), logits(22, 4).log_softmax(-1)
    ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {  # noqa: RUF012
        "k1": lambda d: d,
        "k2": lambda d: d.square() / 2,
        "k3": ops.k3,
    }

    def expected(self, estimator: str, form: str) -> Tensor:
        def expectation(logps: Tensor) -> Tensor:
            k = self.ESTIMATORS[estimator](logps - self.Q)
            per_atom = {
                "loss": k,
                "reward": k.detach() * logps,
                "ratio": (logps - logps.detach()).exp() * k,
            }[form]
            return (logps.detach().exp() * per_atom).sum()

        return gradient(of_logits(expectation), self.P)

    @pytest.mark.parametrize(
        ("estimator", "form", "result"),
        [
            ("k1", "loss", "nothing"),
            ("k1", "reward", "kl"),
            ("k1", "ratio", "kl"),
            ("k2", "loss", "kl"),
            ("k2", "reward", "neither"),
            ("k2", "ratio", "neither"),
            ("k3", "loss", "the other kl"),
            ("k3", "reward", "neither"),
            ("k3", "ratio", "kl"),
        ],
    )
    def test_one_token(self, estimator: str, form: str, result: str) -> None:
        right = {
            "nothing": torch.zeros_like(self.P),
            "kl": gradient(of_logits(lambda logps: kl(logps, self.Q)), self.P),
            "the other kl": gradient(of_logits(lambda logps: kl(self.Q, logps)), self.P),
        }
        actual = self.expected(estimator, form)
        same = [name for name, expected in right.items() if not farther(actual, expected, 1e-12)]
        assert same == ([] if result == "neither" else [result])
        assert all(farther(actual, expected, 1e-2) for name, expected in right.items() if name not in same)


class TestP34Sequences:
    """Two steps over three tokens: what the second token's prefix does to the gradient."""

    VOCABULARY = 3
    LEAVES = tuple(itertools.product(range(3), repeat=2))
    NODES = 1 + 3  # the root, and one for each first token
    THETA, INITIAL = logits(31, 12).reshape(4, 3), logits(32, 12).reshape(4, 3)
    R = logits(33, 9).tolist()

    def rows(self, theta: Tensor) -> Tensor:
        """(9, 2) log-probs of the tokens of every completion."""
        logps = theta.log_softmax(-1)
        return torch.stack([torch.stack([logps[0, a], logps[1 + a, b]]) for a, b in self.LEAVES])

    def exact(self, reward: float, kl_coef: float) -> Tensor:
        """Gradient of -(reward * E[R] - kl_coef * KL(pi || initial)) over whole completions."""
        initial = self.rows(self.INITIAL).sum(-1)

        def objective(theta: Tensor) -> Tensor:
            l = self.rows(theta).sum(-1)  # noqa: E741 - the specification's letter
            return reward * (l.exp() * f64(self.R)).sum() - kl_coef * kl(l, initial)

        return -gradient(objective, self.THETA)

    def batch(self, algorithm: Algorithm, rewards: Sequence[float]) -> Batch:
        """Every completion once, each a prompt of its own."""
        numbers = {"old": self.rows(self.THETA), "initial": self.rows(self.INITIAL)}
        return prepared(algorithm, make_batch(range(9), mask=[[True, True]] * 9, rewards=rewards, numbers=numbers))

    def expected(self, algorithm: Algorithm, batch: Batch, scale: float) -> Tensor:
        """Expected gradient on policy of a loss that adds rows, `scale` being what it divides by."""

        def expectation(theta: Tensor) -> Tensor:
            policy = self.rows(theta)
            losses = [algorithm.loss({"policy": policy[[i]]}, batch.take([i])) for i in range(9)]
            return (policy.sum(-1).exp().detach() * torch.stack(losses)).sum() * scale

        return gradient(expectation, self.THETA)

    def test_k2_of_the_sequence_is_exact(self) -> None:
        initial = self.rows(self.INITIAL).sum(-1)

        def expectation(theta: Tensor) -> Tensor:
            l = self.rows(theta).sum(-1)  # noqa: E741
            return (l.exp().detach() * (l - initial).square() / 2).sum()

        close(gradient(expectation, self.THETA), self.exact(0.0, 1.0))

    @pytest.mark.parametrize(
        ("algorithm", "scale"),
        [(ReinforcePPBaseline(kl_coef=1.0), 18.0), (GRPO(kl_coef=1.0), 18.0)],
        ids=["k2", "k3"],
    )
    def test_token_losses_forget_later_prefixes(self, algorithm: Algorithm, scale: float) -> None:
        """Only the last token's gradient is that of a KL of one token; the first misses what comes after it."""
        actual = self.expected(algorithm, self.batch(algorithm, [1.0] * 9), scale)
        exact = self.exact(0.0, 1.0)
        assert farther(actual[0], exact[0], 0.02)
        if isinstance(algorithm, ReinforcePPBaseline):
            close(actual[1:], exact[1:])

    def test_k1_in_the_return_is_exact(self) -> None:
        """REINFORCE++ up to the scale of its whitening, whose mean is a baseline."""
        algorithm = ReinforcePP(kl_coef=0.3)
        batch = self.batch(algorithm, self.R)
        d = self.rows(self.THETA) - self.rows(self.INITIAL)
        returns = f64(self.R).unsqueeze(-1) - 0.3 * torch.stack([d.sum(-1), d[:, 1]], dim=-1)
        deviation = (returns.var(correction=0) + 1e-8).sqrt()
        actual = self.expected(algorithm, batch, scale=18 * float(deviation))
        close(actual, self.exact(1.0, 0.3))
        assert farther(actual, self.exact(1.0, 0.0), 0.02)

    def test_k1_in_the_reward_is_exact(self) -> None:
        """RLOO, over all pairs of samples."""
        algorithm = RLOO(kl_coef=0.3)
        everything = {"old": self.rows(self.THETA), "initial": self.rows(self.INITIAL)}

        def expectation(theta: Tensor) -> Tensor:
            policy = self.rows(theta)
            total = policy.new_zeros(())
            for pair in itertools.product(range(9), repeat=2):
                index = list(pair)
                numbers = {name: value[index] for name, value in everything.items()}
                rewards = [self.R[i] for i in index]
                rollout = make_batch([0, 0], mask=[[True, True]] * 2, rewards=rewards, numbers=numbers)
                loss = algorithm.loss({"policy": policy[index]}, prepared(algorithm, rollout))
                total = total + policy[index].sum().exp().detach() * loss
            return total

        close(gradient(expectation, self.THETA), self.exact(1.0, 0.3))


class TestP35OverlongShaping:
    LENGTHS = torch.tensor([1, 16384, 18432, 20480, 20481])
    PENALTIES = (0.0, 0.0, -0.5, -1.0, -1.0)

    def test_the_papers_lengths(self) -> None:
        assert DAPO().overlong_penalty(self.LENGTHS, max_tokens=20480).tolist() == list(self.PENALTIES)

    def test_none(self) -> None:
        assert DAPO(overlong_share=0.0).overlong_penalty(self.LENGTHS, max_tokens=20480).tolist() == [0.0] * 5

    def test_it_moves_rewards_before_they_are_standardised(self) -> None:
        """Both right; the one at the limit (8 of 8, buffer 4) has a reward of 0, the other one keeps its 1."""
        rollout = make_batch([0, 0], mask=[[True] * 8, [True] * 4], rewards=[1.0, 1.0], max_tokens=8)
        advantage = DAPO(overlong_share=0.5).prepare(rollout, one_process)["advantage"]
        close(advantage, f64([-0.5, 0.5]) / (math.sqrt(0.5) + 1e-6))
        assert (DAPO(overlong_share=0.0).prepare(rollout, one_process)["advantage"] == 0).all()

    def test_it_does_not_decide_what_is_kept(self) -> None:
        """Selection looks at the task's rewards: lengths make no group of equal rewards differ."""
        rollout = make_batch(
            [0, 0, 1, 1],
            mask=[[True] * 8, [True], [True], [True]],
            rewards=[1.0, 1.0, 0.0, 1.0],
            max_tokens=8,
        )
        kept, state = DAPO(overlong_share=0.5).select(rollout, {"draws": 1.0})
        assert kept.tolist() == [False, True]
        assert state == {"draws": 1.0}


class TestP36SlopesOfTheClip:
    """d loss / d log r at eps 0.3, for every objective with PPO's surrogate; there is no dual clip."""

    RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 4.0)
    SLOPES = {1.0: (-0.5, -0.9, -1.0, -1.1, 0.0, 0.0), -1.0: (0.0, 0.9, 1.0, 1.1, 1.5, 4.0)}  # noqa: RUF012

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    @pytest.mark.parametrize(
        "algorithm",
        [
            GRPO(clip=0.3, kl_coef=0.0),
            DrGRPO(clip=0.3),
            DAPO(clip_low=0.3, clip_high=0.3),
            ReinforcePP(clip=0.3, kl_coef=0.0),
            ReinforcePPBaseline(clip=0.3, kl_coef=0.0),
            GSPO(clip_low=0.3, clip_high=0.3),
        ],
        ids=lambda a: type(a).__name__,
    )
    def test_slopes(self, algorithm: Algorithm, advantage: float) -> None:
        per_token = isinstance(algorithm, ReinforcePP | ReinforcePPBaseline)
        advantages = [[advantage]] * 6 if per_token else [advantage] * 6
        batch = make_batch([0] * 6, numbers={"old": [[0.0]] * 6, "advantage": advantages}).with_totals()
        policy = f64(self.RATIOS).log().unsqueeze(-1)
        _, grads = value_and_grad(algorithm, {"policy": policy}, batch)
        close(6 * grads["policy"].squeeze(-1), f64(self.SLOPES[advantage]))
        (held,) = algorithm.metrics({"policy": policy}, batch).values()
        assert held == pytest.approx({1.0: 2 / 6, -1.0: 1 / 6}[advantage])
