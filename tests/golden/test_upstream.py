"""covary's objectives against numbers that verl and TRL gave for the same inputs.

`scripts/record_golden.py` ran their functions and wrote upstream.json, which names versions and functions. Where
covary differs on purpose, what lies between the two is asserted; nothing is hidden in a tolerance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from covary import ops
from covary.algorithms import (
    CISPO,
    DAPO,
    DPO,
    GKD,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    RLOO,
    SFT,
    DrGRPO,
    ReinforcePP,
    ReinforcePPBaseline,
    ReMax,
)
from covary.batch import Algorithm, Batch
from covary.quantities import QUANTITIES
from tests.algorithms.helpers import make_batch, prepared, value_and_grad

GOLDEN = json.loads(Path(__file__).with_name("upstream.json").read_text())
VERL = 1e-7  # it adds 1e-8 to the token counts that it divides by
TRL = 1e-12
TRL_STD = 1e-7  # its Bessel correction is a float32


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def case(name: str) -> dict[str, Any]:
    return GOLDEN["cases"][name]


def data_of(name: str) -> dict[str, Any]:
    return GOLDEN["inputs"]["pairs" if name == "trl/dpo" else "ragged" if name.startswith("verl") else "even"]


def policy_of(name: str) -> Tensor:
    return tensor(data_of(name)["policy"])


def rollout_of(name: str, rewards: Sequence[float] | None = None) -> Batch:
    """The inputs of a case as a batch."""
    data = data_of(name)
    return make_batch(
        data["group"],
        mask=data["mask"],
        rewards=data["rewards"] if rewards is None else rewards,
        numbers={"old": data["old"], "initial": data["initial"]},
        max_tokens=data.get("max_tokens"),
    )


def with_advantage(rollout: Batch, advantage: list[float]) -> Batch:
    """The batch as `prepare` would have left it with upstream's advantages."""
    return rollout.with_numbers({"advantage": tensor(advantage)}).with_totals()


def loss_and_grad(algorithm: Algorithm, batch: Batch, policy: Tensor) -> tuple[Tensor, Tensor]:
    loss, grads = value_and_grad(algorithm, {"policy": policy}, batch)
    return loss, grads["policy"]


def close(name: str, actual: Tensor, upstream: Any, tolerance: float | None = None) -> None:
    """Equality with what the named library gave."""
    tolerance = tolerance or (VERL if name.startswith("verl") else TRL)
    expected = upstream if isinstance(upstream, Tensor) else tensor(upstream)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def spread(advantage: Tensor, batch: Batch) -> Tensor:
    """Advantages per row as upstream gives them: on every token, 0 where masked."""
    return torch.where(batch.mask, advantage if advantage.dim() == 2 else advantage.unsqueeze(-1), 0.0)


def std_of(batch: Batch) -> Tensor:
    return ops.group_variance(batch.rewards, batch.group).sqrt()[batch.group]


NO_KL = GRPO(kl_coef=0.0)
PLAIN_DAPO = DAPO(overlong_share=0.0)


class TestEqual:
    """The same number: upstream's advantage and loss against `prepare` and `loss`."""

    @pytest.mark.parametrize(
        ("name", "algorithm"),
        [
            ("verl/loss/grpo", NO_KL),
            ("verl/loss/grpo_k3", GRPO(kl_coef=0.04)),
            ("verl/loss/dapo", PLAIN_DAPO),
            ("verl/loss/dr_grpo", DrGRPO()),
            ("verl/loss/gspo", GSPO()),
            ("verl/loss/gspo_wide", GSPO(clip_low=0.2, clip_high=0.3)),
            ("verl/loss/gmpo", GMPO()),
            ("verl/loss/gmpo_default_clip", GMPO(clip=0.2)),
            ("verl/loss/cispo", CISPO(clip_high=1.0)),
            ("trl/dr_grpo", DrGRPO()),
            ("trl/dpo", DPO()),
        ],
    )
    def test_whole_objective(self, name: str, algorithm: Algorithm) -> None:
        loss, grad = loss_and_grad(algorithm, prepared(algorithm, rollout_of(name)), policy_of(name))
        close(name, loss, case(name)["loss"])
        close(name, grad, case(name)["gradient"])

    @pytest.mark.parametrize(
        ("name", "algorithm"),
        [
            ("trl/grpo", NO_KL),
            ("trl/grpo_kl", GRPO(kl_coef=0.04)),
            ("trl/dapo", PLAIN_DAPO),
            ("trl/cispo", CISPO()),  # TRL's epsilon_high = 5 is the cap itself, covary's clip_high = 4 relative to 1
            ("trl/gspo", GSPO()),
            ("trl/gspo_wide", GSPO(clip_low=0.2, clip_high=0.3)),
            ("trl/gmpo", GMPO()),
        ],
    )
    def test_loss_at_the_same_advantages(self, name: str, algorithm: Algorithm) -> None:
        """TRL's advantages differ by the eps of the standard deviation (below), its losses do not."""
        batch = with_advantage(rollout_of(name), case(name)["advantage"])
        loss, grad = loss_and_grad(algorithm, batch, policy_of(name))
        close(name, loss, case(name)["loss"])
        close(name, grad, case(name)["gradient"])

    @pytest.mark.parametrize(
        ("name", "algorithm"),
        [
            ("verl/advantage/grpo", NO_KL),
            ("verl/advantage/grpo_without_std", DrGRPO()),
            ("verl/advantage/rloo", RLOO(kl_coef=0.0)),
            ("trl/dr_grpo", DrGRPO()),
            ("trl/rloo", RLOO(kl_coef=0.05)),
        ],
    )
    def test_advantage(self, name: str, algorithm: Algorithm) -> None:
        batch = prepared(algorithm, rollout_of(name))
        upstream = tensor(case(name)["advantage"])
        ours = batch["advantage"]
        close(name, spread(ours, batch) if upstream.dim() == 2 else ours, upstream)

    def test_remax_advantage(self) -> None:
        """verl gets the greedy rewards as a tensor, covary as rows that are not learned from."""
        data = data_of("verl")
        groups = len(data["greedy"])
        rollout = make_batch(
            [*data["group"], *range(groups)],
            mask=[*data["mask"], *[[1] * 6] * groups],
            rewards=[*data["rewards"], *data["greedy"]],
        )
        rows = len(data["group"])
        rollout = replace(rollout, learn=torch.arange(rows + groups) < rows)
        batch = prepared(ReMax(), rollout).take(rollout.learn)
        upstream = spread(tensor(case("verl/advantage/remax")["advantage"]), batch)  # not masked inside a row
        close("verl", spread(batch["advantage"], batch), upstream)

        # verl's loss for it is PPO's; at the old policy its gradient is REINFORCE's.
        batch = batch.with_totals()
        _, grad = loss_and_grad(ReMax(), batch, tensor(data["old"]))
        close("verl", grad, case("verl/loss/remax_at_old")["gradient"])

    @pytest.mark.parametrize(
        ("name", "algorithm"), [("verl/loss/rloo_at_old", RLOO(kl_coef=0.0)), ("trl/rloo_at_old", RLOO())]
    )
    def test_rloo_gradient_at_the_old_policy(self, name: str, algorithm: RLOO) -> None:
        """Off the old policy they differ: verl has PPO's token ratio, TRL a sequence ratio, the paper none."""
        rollout = rollout_of(name)
        _, grad = loss_and_grad(algorithm, prepared(algorithm, rollout), rollout["old"])
        close(name, grad, case(name)["gradient"])

    def test_overlong_penalty(self) -> None:
        """verl has no floor: it punishes by more than 1 what is longer than `max_tokens`, which cannot happen here."""
        verl, trl = case("verl/overlong"), case("trl/overlong")
        algorithm = DAPO(overlong_share=trl["buffer"] / trl["max_tokens"])
        length = tensor(trl["lengths"])
        ours = algorithm.overlong_penalty(length, trl["max_tokens"])
        close("trl", ours, trl["penalty"])
        possible = length <= verl["max_tokens"]
        close("verl", ours[possible], tensor(verl["penalty"])[possible])
        assert verl["penalty"][-1] == pytest.approx(-1.05)


class TestAggregation:
    def test_modes(self) -> None:
        """verl's names for the reductions that covary's objectives are made of."""
        rollout = rollout_of("verl")
        nll = -policy_of("verl")
        by_token = SFT().loss({"policy": policy_of("verl")}, prepared(SFT(), rollout))
        sums = ops.masked_sum(nll, rollout.mask)
        upstream = case("verl/agg_loss")["values"]
        close("verl", by_token, upstream["token-mean"])
        close("verl", ops.masked_mean(nll, rollout.mask).mean(), upstream["seq-mean-token-mean"])
        close("verl", sums.mean(), upstream["seq-mean-token-sum"])
        close("verl", sums.mean() / rollout.max_tokens, upstream["seq-mean-token-sum-norm"])

    def test_dr_grpo_normaliser_of_older_verl(self) -> None:
        """Up to verl 0.7.0 "seq-mean-token-sum-norm" was the token sum over the constant length: B times as large."""
        upstream = case("verl/agg_loss")
        older = upstream["values"]["token-sum"] / upstream["settings"]["loss_scale_factor"]
        rows = len(rollout_of("verl"))
        assert older == pytest.approx(rows * upstream["values"]["seq-mean-token-sum-norm"], rel=1e-12)

    def test_gmpo_plain_mean_of_micro_batches(self) -> None:
        """verl's geo_mean divides by the rows of the micro-batch; weighted by rows, the parts are covary's loss."""
        parts = case("verl/loss/gmpo_parts")
        rollout = rollout_of("verl")
        batch = prepared(GMPO(), rollout)
        for rows, upstream in zip(parts["parts"], parts["losses"], strict=True):
            ours = GMPO().loss({"policy": policy_of("verl")[rows]}, batch.take(rows))
            close("verl", ours, upstream * len(rows) / len(rollout))
        whole = case("verl/loss/gmpo")["loss"]
        assert abs(sum(parts["losses"]) / len(parts["parts"]) - whole) > 0.01

    @pytest.mark.parametrize("kind", ["dapo", "bnpo", "grpo"])
    def test_trl_micro_batches(self, kind: str) -> None:
        """TRL's dapo divides by the tokens of all micro-batches, as covary does; bnpo and grpo by each one's own count."""
        upstream = case(f"trl/parts/{kind}")
        algorithm = NO_KL if kind == "grpo" else DAPO(clip_high=0.2, overlong_share=0.0)
        batch = with_advantage(rollout_of("trl"), upstream["advantage"])
        policy = policy_of("trl")
        for rows, loss in zip(upstream["parts"], upstream["losses"], strict=True):
            part = batch.take(rows)
            unit = "rows" if kind == "grpo" else "tokens"
            own = part.with_totals().total(unit) * len(upstream["parts"])
            factor = 1.0 if kind == "dapo" else batch.total(unit) / own
            close("trl", factor * algorithm.loss({"policy": policy[rows]}, part), loss)
        whole = float(algorithm.loss({"policy": policy}, batch))
        assert (sum(upstream["losses"]) == pytest.approx(whole, rel=1e-12)) == (kind == "dapo")


class TestAdvantagesThatDiffer:
    @pytest.mark.parametrize("name", ["trl/grpo", "trl/dapo", "trl/gspo", "trl/gmpo", "trl/cispo"])
    def test_eps_of_the_standard_deviation(self, name: str) -> None:
        """covary 1e-6 (as verl), TRL 1e-4."""
        batch = prepared(NO_KL, rollout_of(name))
        factor = (std_of(batch) + 1e-6) / (std_of(batch) + 1e-4)
        close(name, factor * batch["advantage"], case(name)["advantage"], TRL_STD)

    @pytest.mark.parametrize(
        ("name", "algorithm"),
        [
            ("reinforce_pp", ReinforcePP(kl_coef=0.0)),
            ("reinforce_pp_kl", ReinforcePP(kl_coef=0.05)),
            ("reinforce_pp_baseline", ReinforcePPBaseline(kl_coef=0.0)),
        ],
    )
    def test_whitening_with_the_population_variance(self, name: str, algorithm: Algorithm) -> None:
        """verl's variance is unbiased: its advantages, loss and gradient are sqrt((n - 1) / n) of covary's, n tokens."""
        batch = prepared(algorithm, rollout_of("verl"))
        factor = math.sqrt(1 - 1 / batch.total("tokens"))
        close("verl", factor * spread(batch["advantage"], batch), case(f"verl/advantage/{name}")["advantage"])
        loss, grad = loss_and_grad(algorithm, batch, policy_of("verl"))
        close("verl", factor * loss, case(f"verl/loss/{name}")["loss"])
        close("verl", factor * grad, case(f"verl/loss/{name}")["gradient"])

    def test_gpg_alpha(self) -> None:
        """covary's alpha counts rows of groups that differ (the paper), verl's rows with a reward that is not 0."""
        batch = prepared(GPG(), rollout_of("verl"))
        differs = (~ops.all_equal(batch.rewards, batch.group))[batch.group]
        factor = float(differs.sum() / (batch.rewards != 0).sum())
        assert factor == pytest.approx(6 / 7)
        close("verl", factor * spread(batch["advantage"], batch), case("verl/advantage/gpg")["advantage"])
        loss, grad = loss_and_grad(GPG(), batch, policy_of("verl"))
        close("verl", factor * loss, case("verl/loss/gpg")["loss"])
        close("verl", factor * grad, case("verl/loss/gpg")["gradient"])

    def test_groups_of_one(self) -> None:
        """covary drops them; asked all the same, its advantage is 0. verl's is the reward itself, or 0 (vectorised)."""
        single = make_batch([0], rewards=[0.7])
        for algorithm in (NO_KL, RLOO(kl_coef=0.0)):
            assert algorithm.min_group == 2
            assert float(prepared(algorithm, single)["advantage"]) == 0
        close("verl", tensor([[0.7 / (1 + 1e-6)]]), case("verl/singleton/grpo")["advantage"])
        assert case("verl/singleton/rloo")["advantage"] == [[0.7]]
        assert case("verl/singleton/rloo_vectorized")["advantage"] == [[0.0]]

    @pytest.mark.parametrize("kind", ["grpo", "rloo"])
    def test_rows_without_a_reward(self, kind: str) -> None:
        """Such a row leaves its group in covary; TRL keeps it with advantage 0. The others' advantages agree."""
        upstream = case(f"trl/unscorable/{kind}")
        scored = [i for i, reward in enumerate(upstream["rewards"]) if reward is not None]
        rewards = [math.nan if reward is None else reward for reward in upstream["rewards"]]
        rollout = rollout_of("trl", rewards).take(scored)
        algorithm = NO_KL if kind == "grpo" else RLOO(kl_coef=0.0)
        batch = prepared(algorithm, rollout)
        factor = (std_of(batch) + 1e-6) / (std_of(batch) + 1e-4) if kind == "grpo" else 1.0
        theirs = tensor(upstream["advantage"])
        close("trl", factor * batch["advantage"], theirs[scored], TRL_STD)
        assert len(scored) == len(rewards) - 1
        assert theirs[[i for i in range(len(rewards)) if i not in scored]].tolist() == [0.0]


class TestLossesThatDiffer:
    def test_dual_clip(self) -> None:
        """verl's default c = 3 drops the gradient of tokens with A < 0 and ratio > 3; the rest is covary's."""
        upstream = case("verl/loss/dapo_dual_clip")
        batch = prepared(PLAIN_DAPO, rollout_of("verl"))
        loss, grad = loss_and_grad(PLAIN_DAPO, batch, policy_of("verl"))
        ratio = (policy_of("verl") - batch["old"]).exp()
        advantage = spread(batch["advantage"], batch)
        dropped = (advantage < 0) & (ratio > upstream["settings"]["clip_ratio_c"])
        assert dropped.any()
        close("verl", torch.where(dropped, 0.0, grad), upstream["gradient"])
        assert (grad[dropped] != 0).all()
        excess = torch.where(dropped, -advantage * (ratio - 3), 0.0).sum() / batch.total("tokens")
        close("verl", loss - excess, upstream["loss"])

    @pytest.mark.parametrize(
        ("name", "low", "high", "algorithm"),
        [
            ("verl/loss/cispo_lower_bound", 0.8, 2.0, CISPO(clip_high=1.0)),  # verl's default clip_ratio_low
            ("trl/cispo_default_cap", 0.0, 0.2, CISPO()),  # TRL's default epsilon_high, an absolute cap of 0.2
        ],
    )
    def test_cispo_bounds(self, name: str, low: float, high: float, algorithm: CISPO) -> None:
        """Per token the gradients are in the ratio of the two clipped weights."""
        rollout = rollout_of(name)
        advantage = case(name).get("advantage") or prepared(algorithm, rollout)["advantage"].tolist()
        batch = with_advantage(rollout, advantage)
        _, grad = loss_and_grad(algorithm, batch, policy_of(name))
        ratio = (policy_of(name) - batch["old"]).exp()
        factor = ratio.clamp(low, high) / ratio.clamp(max=1 + algorithm.clip_high)
        assert (factor[batch.mask] != 1).any()
        close(name, factor * grad, case(name)["gradient"])

    def test_kl_under_the_importance_ratio(self) -> None:
        """TRL's default multiplies k3 by the live ratio (math: then its gradient is right); GRPO's paper does not."""
        rollout = rollout_of("trl")
        beta = case("trl/grpo_kl_corrected")["settings"]["beta"]
        live = policy_of("trl").requires_grad_()
        ratio = ops.log_ratio(live, rollout["old"], rollout.mask).exp()
        corrected = ratio * ops.k3(ops.log_ratio(live, rollout["initial"], rollout.mask))
        term = beta * ops.masked_mean(corrected, rollout.mask).mean()
        (grad,) = torch.autograd.grad(term, live)
        for part, ours in (("loss", term.detach()), ("gradient", grad)):
            with_kl, without = tensor(case("trl/grpo_kl_corrected")[part]), tensor(case("trl/grpo")[part])
            close("trl", ours, with_kl - without)

    def test_gspo_under_a_token_mean(self) -> None:
        """TRL's sequence ratio with loss_type="dapo": rows weigh by their length, |y| B / tokens times covary's."""
        name = "trl/gspo_token_mean"
        algorithm = GSPO(clip_low=0.2, clip_high=0.3)
        batch = with_advantage(rollout_of(name), case(name)["advantage"])
        _, grad = loss_and_grad(algorithm, batch, policy_of(name))
        factor = batch.mask.sum(-1).double() * batch.total("rows") / batch.total("tokens")
        close(name, factor.unsqueeze(-1) * grad, case(name)["gradient"])

    def test_rloo_sequence_ratio(self) -> None:
        """TRL multiplies each row's gradient by the clipped ratio of sequence probabilities; the paper has none."""
        name = "trl/rloo"
        batch = prepared(RLOO(kl_coef=0.05), rollout_of(name))
        _, grad = loss_and_grad(RLOO(kl_coef=0.05), batch, policy_of(name))
        log_ratio = ops.log_ratio(policy_of(name), batch["old"], batch.mask).sum(-1)
        held = ops.clipped(log_ratio, batch["advantage"], 0.2, 0.2)
        assert 0 < held.sum() < len(held)
        factor = torch.where(held, 0.0, log_ratio.exp())
        close(name, factor.unsqueeze(-1) * grad, case(name)["gradient"])


class TestKL:
    def test_estimators(self) -> None:
        """k1 and k3 are ops'; k2 stands in REINFORCE++-baseline."""
        rollout = rollout_of("verl")
        everywhere = torch.ones_like(rollout.mask)
        live = policy_of("verl").requires_grad_()
        d = ops.log_ratio(live, rollout["initial"], everywhere)
        upstream = case("verl/kl_penalty")["values"]
        for kind, ours in {"k1": d, "k2": d.square() / 2, "k3": ops.k3(d)}.items():
            close("verl", ours.detach(), upstream[kind]["value"])
            (grad,) = torch.autograd.grad(ours.sum(), live, retain_graph=True)
            close("verl", grad, upstream[kind]["gradient"])
        assert upstream["k3+"] == {"value": upstream["k3"]["value"], "gradient": upstream["k2"]["gradient"]}

    def test_k3_is_capped_at_10_in_verl_only(self) -> None:
        far = case("verl/kl_penalty_far")
        ours = ops.k3(tensor(far["log_ratio"]))
        close("verl", ours.clamp(max=10), far["values"]["k3"])
        assert (ours > 10).any()

    def test_k2_loss_of_reinforce_pp_baseline(self) -> None:
        """The difference that the KL term makes to loss and gradient; the rest has the whitening's factor."""
        name = "verl/loss/reinforce_pp_baseline"
        algorithm = ReinforcePPBaseline(kl_coef=case(f"{name}_k2")["settings"]["kl_loss_coef"])
        batch = prepared(algorithm, rollout_of(name))
        ours = loss_and_grad(algorithm, batch, policy_of(name))
        without = loss_and_grad(replace(algorithm, kl_coef=0.0), batch, policy_of(name))
        for part, mine, rest in zip(("loss", "gradient"), ours, without, strict=True):
            close(name, mine - rest, tensor(case(f"{name}_k2")[part]) - tensor(case(name)[part]))


class TestDistillation:
    @pytest.mark.parametrize("beta", ["0.0", "0.1", "0.5", "0.9", "1.0"])
    def test_gkd(self, beta: str) -> None:
        """TRL's `generalized_jsd_loss`, with the mean over the tokens that its labels keep."""
        recorded = case("trl/gkd")
        algorithm = GKD(beta=float(beta))
        student, teacher = (tensor(recorded[name]) for name in ("student", "teacher"))
        student.requires_grad_()
        (score,) = algorithm.trained
        name, argument = score.quantity
        quantity = QUANTITIES[name]
        chunks = (x.log_softmax(-1).flatten(0, 1) for x in (teacher, student))
        values = quantity(argument, *chunks, torch.zeros(6, dtype=torch.long)).reshape(2, 3)
        mask = [[bool(kept) for kept in row] for row in recorded["mask"]]
        loss = algorithm.loss({"jsd": values}, make_batch([0, 0], mask=mask).with_totals())
        expected = recorded["losses"][beta]
        torch.testing.assert_close(loss, tensor(expected["value"]), rtol=0, atol=TRL)
        torch.testing.assert_close(
            torch.autograd.grad(loss, student)[0], tensor(expected["of_logits"]), rtol=0, atol=TRL
        )


class TestTheNumbersThemselves:
    def test_defaults_that_the_docs_name(self) -> None:
        verl, trl = case("verl/defaults")["values"], case("trl/defaults")["values"]
        assert (verl["loss_agg_mode"], verl["clip_ratio_c"], verl["use_kl_loss"]) == ("token-mean", 3.0, False)
        assert (trl["GRPOConfig"]["loss_type"], trl["GRPOConfig"]["beta"]) == ("dapo", 0.0)
        assert trl["GRPOConfig"]["use_bias_correction_kl"]
        assert not trl["RLOOConfig"]["normalize_advantages"]
        assert trl["RLOOConfig"]["beta"] == RLOO().kl_coef
        assert trl["DPOConfig"]["beta"] == DPO().beta
        assert trl["GMPOConfig"]["epsilon"] == GMPO().clip != verl["clip_ratio_low"]
        assert trl["GRPOConfig"]["epsilon"] == verl["clip_ratio_low"] == GRPO().clip

    @pytest.mark.parametrize(
        "name",
        [
            *(f"verl/loss/{kind}" for kind in ("grpo", "dapo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline")),
            *(f"verl/loss/{kind}" for kind in ("gspo", "gspo_wide", "gmpo")),
            *(f"trl/{kind}" for kind in ("grpo", "dapo", "dr_grpo", "gspo", "gspo_wide", "gmpo", "rloo")),
        ],
    )
    def test_every_clip_holds_some_tokens(self, name: str) -> None:
        """Negative control of the inputs: among tokens with an advantage some have no gradient, and some have one."""
        rollout = rollout_of(name)
        centred = spread(ops.center(rollout.rewards, rollout.group), rollout) != 0
        gradient = tensor(case(name)["gradient"])
        assert 0 < (gradient[centred] == 0).sum() < centred.sum()

    @pytest.mark.parametrize(("name", "cap"), [("verl/loss/cispo", 2.0), ("trl/cispo", 5.0)])
    def test_every_cap_holds_some_tokens(self, name: str, cap: float) -> None:
        rollout = rollout_of(name)
        gradient = tensor(case(name)["gradient"])
        capped = (policy_of(name) - rollout["old"]).exp() > cap
        assert gradient[capped].any()
        assert gradient[~capped].any()

    def test_masked_tokens_have_no_gradient_upstream(self) -> None:
        for name, recorded in GOLDEN["cases"].items():
            if "gradient" in recorded:
                assert not tensor(recorded["gradient"])[~rollout_of(name).mask].any(), name
