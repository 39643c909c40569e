"""Every algorithm as a slow loop over rows and tokens, written from its equation and not from `covary.ops`.

Scores are 0-dim tensors, so that autograd gives the reference gradient too. A row holds its sampled
tokens only: the loops know neither masks nor padding. What an algorithm prepares (advantages, returns,
whitening) is computed here too, from rewards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covary.algorithms import (
    CISPO,
    DAPO,
    DPO,
    GKD,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    GVPO,
    GVPOOPD,
    JLB,
    JLBGRPO,
    RAFT,
    RAVR,
    RAVRGRPO,
    RLOO,
    RLPR,
    SFT,
    CoVRL,
    CoVRLJSD,
    DrGRPO,
    LaTRO,
    LaTROGRPO,
    MiniLLM,
    PGOPDSequence,
    PGOPDToken,
    ReinforcePP,
    ReinforcePPBaseline,
    ReMax,
    SeqKD,
    SupervisedKD,
    VeriFree,
    VeriFreeGRPO,
)


@dataclass(frozen=True)
class Row:
    """One completion: live and frozen numbers of its sampled tokens (or of the whole row), by name.

    Rows that are not learned from have no live ones.
    """

    group: int
    reward: float
    live: dict[str, list[Tensor]]
    frozen: dict[str, Any]
    learn: bool
    answer_length: int = 0
    truncated: bool = False
    features: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.live["policy"])


def groups_of(rows: list[Row]) -> list[list[Row]]:
    """Rows by prompt."""
    return [[r for r in rows if r.group == g] for g in sorted({r.group for r in rows})]


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def zero() -> Tensor:
    """A sum without terms; its gradient is 0, not absent."""
    return torch.zeros((), dtype=torch.float64, requires_grad=True)


def sequence(values: list[Tensor]) -> Tensor:
    """Sum over the tokens of a row."""
    return sum(values, zero())


def tokens(rows: list[Row]) -> int:
    """Sampled tokens of all rows."""
    return sum(row.length for row in rows)


def standardised(rewards: list[float]) -> list[float]:
    """(R - mean) / (std + 1e-6) within a group, the standard deviation with n - 1; 0 where all are equal."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    squares = [(reward - mean(rewards)) ** 2 for reward in rewards]
    std = math.sqrt(math.fsum(squares) / (len(rewards) - 1))
    return [(reward - mean(rewards)) / (std + 1e-6) for reward in rewards]


def whitened(values: list[list[float]]) -> list[list[float]]:
    """Minus the mean, over the root of the population variance + 1e-8, both over all tokens of all rows."""
    flat = [value for row in values for value in row]
    variance = mean([(value - mean(flat)) ** 2 for value in flat])
    return [[(value - mean(flat)) / math.sqrt(variance + 1e-8) for value in row] for row in values]


def surrogate(log_ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A), case by case: the clip acts only where it lowers the surrogate."""
    r = torch.exp(log_ratio)
    if advantage >= 0 and r > 1 + high:
        return r.detach() * 0 + (1 + high) * advantage
    if advantage < 0 and r < 1 - low:
        return r.detach() * 0 + (1 - low) * advantage
    return r * advantage


def to_frozen(row: Row, name: str) -> list[Tensor]:
    """Live minus frozen log-prob, per token."""
    return [live - frozen for live, frozen in zip(row.live["policy"], row.frozen[name], strict=True)]


def gvpo(algorithm: GVPO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over prompts of 1 / (2 (k-1)) sum_i [beta (Delta_i - Deltabar) - (R_i - Rbar)]^2."""
    groups = groups_of(rows)
    loss = zero()
    for members in groups:
        k = len(members)
        if k == 1:
            continue  # a variance needs two
        deltas = [sequence(to_frozen(row, "reference")) for row in members]
        delta_bar = sum(deltas, zero()) / k
        reward_bar = mean([row.reward for row in members])
        for row, delta in zip(members, deltas, strict=True):
            residual = algorithm.beta * (delta - delta_bar) - (row.reward - reward_bar)
            loss = loss + residual**2 / (2 * (k - 1))
    return loss / len(groups)


def gvpo_terms(algorithm: GVPO, rows: list[Row], max_tokens: int) -> Tensor:
    """-beta Cov(R, l), and of -beta^2 Cov(l, l') + beta^2 / 2 Var(l) the named ones; - c * mean token entropy."""
    groups = groups_of(rows)
    loss = zero()
    for members in groups:
        k = len(members)
        if k == 1:
            continue
        live = [sequence(row.live["policy"]) for row in members]
        live_bar = sum(live, zero()) / k
        reference = [math.fsum(row.frozen["reference"]) for row in members]
        for i, row in enumerate(members):
            off = live[i] - live_bar
            term = -algorithm.beta * (row.reward - mean([r.reward for r in members])) * off
            if "covariance" in algorithm.terms:
                term = term - algorithm.beta**2 * (reference[i] - mean(reference)) * off
            if "variance" in algorithm.terms:
                term = term + algorithm.beta**2 / 2 * off**2
            loss = loss + term / ((k - 1) * len(groups))
    if algorithm.entropy_coef:
        entropies = [entropy for row in rows for entropy in row.live["entropy"]]
        loss = loss - algorithm.entropy_coef * sequence(entropies) / len(entropies)
    return loss


def grpo(algorithm: GRPO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over rows of 1/|y| sum_t [-surrogate + kl_coef (e^{-d} - 1 + d)]."""
    loss = zero()
    for members in groups_of(rows):
        advantages = standardised([row.reward for row in members])
        for row, advantage in zip(members, advantages, strict=True):
            to_old = to_frozen(row, "old")
            for t in range(row.length):
                term = -surrogate(to_old[t], advantage, algorithm.clip, algorithm.clip)
                if algorithm.kl_coef:
                    d = to_frozen(row, "initial")[t]
                    term = term + algorithm.kl_coef * (torch.exp(-d) - 1 + d)
                loss = loss + term / row.length
    return loss / len(rows)


def dr_grpo(algorithm: DrGRPO, rows: list[Row], max_tokens: int) -> Tensor:
    """-1 / (rows * token limit) sum of all surrogates, A = R - mean."""
    loss = zero()
    for members in groups_of(rows):
        reward_bar = mean([row.reward for row in members])
        for row in members:
            for d in to_frozen(row, "old"):
                loss = loss - surrogate(d, row.reward - reward_bar, algorithm.clip, algorithm.clip)
    return loss / (len(rows) * max_tokens)


def dapo(algorithm: DAPO, rows: list[Row], max_tokens: int) -> Tensor:
    """-1 / tokens sum of all surrogates, A standardised from the reward and the penalty of the length."""
    buffer = algorithm.overlong_share * max_tokens
    loss = zero()
    for members in groups_of(rows):
        shaped = []
        for row in members:
            if buffer == 0 or row.length <= max_tokens - buffer:
                penalty = 0.0
            elif row.length <= max_tokens:
                penalty = ((max_tokens - buffer) - row.length) / buffer
            else:
                penalty = -1.0
            shaped.append(row.reward + penalty)
        for row, advantage in zip(members, standardised(shaped), strict=True):
            for d in to_frozen(row, "old"):
                loss = loss - surrogate(d, advantage, algorithm.clip_low, algorithm.clip_high)
    return loss / tokens(rows)


def rloo(algorithm: RLOO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over rows of -A l, A = R' - mean of the others' R', R' = R - kl_coef * sum_t (old - initial)."""
    loss = zero()
    for members in groups_of(rows):
        rewards = []
        for row in members:
            kl = 0.0
            if algorithm.kl_coef:
                kl = math.fsum(row.frozen["old"]) - math.fsum(row.frozen["initial"])
            rewards.append(row.reward - algorithm.kl_coef * kl)
        for i, row in enumerate(members):
            others = rewards[:i] + rewards[i + 1 :]
            advantage = rewards[i] - mean(others) if others else 0.0
            loss = loss - advantage * sequence(row.live["policy"])
    return loss / len(rows)


def remax(algorithm: ReMax, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over the sampled rows of -(R - R of the group's greedy row) l."""
    learned = [row for row in rows if row.learn]
    loss = zero()
    for row in learned:
        (greedy,) = [r for r in rows if r.group == row.group and not r.learn]
        loss = loss - (row.reward - greedy.reward) * sequence(row.live["policy"])
    return loss / len(learned)


def reinforce_pp(algorithm: ReinforcePP, rows: list[Row], max_tokens: int) -> Tensor:
    """-1 / tokens sum of all surrogates, A_t = whitened R - kl_coef * sum_{s >= t} (old_s - initial_s)."""
    returns = []
    for row in rows:
        kl = [0.0] * row.length
        if algorithm.kl_coef:
            kl = [old - initial for old, initial in zip(row.frozen["old"], row.frozen["initial"], strict=True)]
        returns.append([row.reward - algorithm.kl_coef * math.fsum(kl[t:]) for t in range(row.length)])
    loss = zero()
    for row, advantages in zip(rows, whitened(returns), strict=True):
        for d, advantage in zip(to_frozen(row, "old"), advantages, strict=True):
            loss = loss - surrogate(d, advantage, algorithm.clip, algorithm.clip)
    return loss / tokens(rows)


def reinforce_pp_baseline(algorithm: ReinforcePPBaseline, rows: list[Row], max_tokens: int) -> Tensor:
    """1 / tokens sum of [-surrogate + kl_coef d^2 / 2], A = whitened R - group mean, each row once a token."""
    centred = [[row.reward - mean([r.reward for r in rows if r.group == row.group])] * row.length for row in rows]
    loss = zero()
    for row, advantages in zip(rows, whitened(centred), strict=True):
        to_old = to_frozen(row, "old")
        for t in range(row.length):
            loss = loss - surrogate(to_old[t], advantages[t], algorithm.clip, algorithm.clip)
            if algorithm.kl_coef:
                loss = loss + algorithm.kl_coef * to_frozen(row, "initial")[t] ** 2 / 2
    return loss / tokens(rows)


def gspo(algorithm: GSPO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over rows of -surrogate of the sequence ratio exp(1/|y| sum_t (live - old))."""
    loss = zero()
    for members in groups_of(rows):
        advantages = standardised([row.reward for row in members])
        for row, advantage in zip(members, advantages, strict=True):
            log_s = sequence(to_frozen(row, "old")) / row.length
            loss = loss - surrogate(log_s, advantage, algorithm.clip_low, algorithm.clip_high)
    return loss / len(rows)


def gmpo(algorithm: GMPO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over rows of -A exp(1/|y| sum_t m_t), m_t the log-ratio, cut at +clip if A > 0, at -clip if A < 0."""
    loss = zero()
    for members in groups_of(rows):
        advantages = standardised([row.reward for row in members])
        for row, advantage in zip(members, advantages, strict=True):
            cut = []
            for d in to_frozen(row, "old"):
                over = (advantage > 0 and d > algorithm.clip) or (advantage < 0 and d < -algorithm.clip)
                cut.append(torch.full_like(d, math.copysign(algorithm.clip, advantage)) if over else d)
            loss = loss - advantage * torch.exp(sequence(cut) / row.length)
    return loss / len(rows)


def gpg(algorithm: GPG, rows: list[Row], max_tokens: int) -> Tensor:
    """-1 / tokens sum of alpha (R - mean) log pi, alpha = rows / rows whose group has different rewards."""
    groups = groups_of(rows)
    differing = sum(len(members) for members in groups if len({row.reward for row in members}) > 1)
    loss = zero()
    for members in groups:
        reward_bar = mean([row.reward for row in members])
        for row in members:
            if differing:
                advantage = len(rows) / differing * (row.reward - reward_bar)
                loss = loss - advantage * sequence(row.live["policy"])
    return loss / tokens(rows)


def cispo(algorithm: CISPO, rows: list[Row], max_tokens: int) -> Tensor:
    """-1 / tokens sum of sg[min(r, 1 + clip_high)] A log pi."""
    loss = zero()
    for members in groups_of(rows):
        advantages = standardised([row.reward for row in members])
        for row, advantage in zip(members, advantages, strict=True):
            for policy, d in zip(row.live["policy"], to_frozen(row, "old"), strict=True):
                weight = min(math.exp(d.item()), 1 + algorithm.clip_high)
                loss = loss - weight * advantage * policy
    return loss / tokens(rows)


def raft(algorithm: RAFT, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean negative log-likelihood over the tokens of kept rows: each prompt's (first) best, or all with R >= 1."""
    kept = []
    for members in groups_of(rows):
        if algorithm.keep == "best":
            kept.append(max(members, key=lambda row: row.reward))  # the first of several
        else:
            kept += [row for row in members if row.reward >= 1]
    return -sum((sequence(row.live["policy"]) for row in kept), zero()) / max(1, tokens(kept))


def dpo(algorithm: DPO, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over pairs of -log sigmoid(beta (Delta_best - Delta_worst)); groups of equal rewards have no pair."""
    losses = []
    for members in groups_of(rows):
        best = max(members, key=lambda row: row.reward)
        worst = min(members, key=lambda row: row.reward)
        if best.reward == worst.reward:
            continue
        margin = sequence(to_frozen(best, "initial")) - sequence(to_frozen(worst, "initial"))
        losses.append(torch.log(1 + torch.exp(-algorithm.beta * margin)))
    return sum(losses, zero()) / max(1, len(losses))


def sft(algorithm: SFT, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean negative log-likelihood over all tokens of all rows."""
    terms = [policy for row in rows for policy in row.live["policy"]]
    return -sum(terms, zero()) / len(terms)


def gvpo_opd(algorithm: GVPOOPD, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over prompts of 1 / (2 (k-1)) sum_i (g_i - gbar)^2, g = (length_ref / |y|)^alpha (l - l^t)."""
    groups = groups_of(rows)
    loss = zero()
    for members in groups:
        k = len(members)
        if k == 1:
            continue
        g = [
            (algorithm.length_ref / row.length) ** algorithm.alpha
            * (sequence(row.live["policy"]) - row.frozen["teacher"])
            for row in members
        ]
        for one in g:
            loss = loss + (one - sum(g, zero()) / k) ** 2 / (2 * (k - 1))
    return loss / len(groups)


def seqkd(algorithm: SeqKD, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean negative log-likelihood over all tokens of all rows."""
    terms = [policy for row in rows for policy in row.live["policy"]]
    return -sum(terms, zero()) / len(terms)


def supervised_kd(algorithm: SupervisedKD, rows: list[Row], max_tokens: int) -> Tensor:
    """tau^2 times the mean divergence over all tokens."""
    terms = [kl for row in rows for kl in row.live["kl"]]
    return algorithm.temperature**2 * sum(terms, zero()) / len(terms)


def gkd(algorithm: GKD, rows: list[Row], max_tokens: int) -> Tensor:
    """The mean divergence over all tokens."""
    terms = [jsd for row in rows for jsd in row.live["jsd"]]
    return sum(terms, zero()) / len(terms)


def minillm(algorithm: MiniLLM, rows: list[Row], max_tokens: int) -> Tensor:
    """Mean over tokens of KL_t - min(rho A, clip(rho) A), A_t the (mean) discounted log-ratio of later tokens."""
    advantages = []
    for row in rows:
        ratios = [t - s for t, s in zip(row.frozen["teacher"], row.frozen["old"], strict=True)]
        of_row = []
        for t in range(row.length):
            weights = [algorithm.gamma ** (i - t - 1) for i in range(t + 1, row.length)]
            total = sum(w * r for w, r in zip(weights, ratios[t + 1 :], strict=True))
            of_row.append(total / sum(weights) if algorithm.length_norm and weights else total)
        advantages.append(of_row)
    if algorithm.whitening:
        advantages = whitened(advantages)
    loss = zero()
    for row, of_row in zip(rows, advantages, strict=True):
        for t, advantage in enumerate(of_row):
            a = algorithm.teacher_mix
            mixture = math.log(a * math.exp(row.frozen["teacher"][t]) + (1 - a) * math.exp(row.frozen["old"][t]))
            rho = row.live["policy"][t] - mixture
            loss = loss + row.live["kl"][t] - surrogate(rho, advantage, algorithm.clip, algorithm.clip)
    return loss / tokens(rows)


def pg_opd_sequence(algorithm: PGOPDSequence, rows: list[Row], max_tokens: int) -> Tensor:
    """-mean over rows of A_i log pi(y_i), A the reward against the chosen baseline."""
    loss = zero()
    for members in groups_of(rows):
        rewards = [row.reward for row in members]
        for i, row in enumerate(members):
            others = rewards[:i] + rewards[i + 1 :]
            advantage = {
                "rloo": rewards[i] - mean(others) if others else 0.0,
                "mean": rewards[i] - mean(rewards),
                "grpo_std": standardised(rewards)[i],
                "none": rewards[i],
            }[algorithm.baseline]
            loss = loss - advantage * sequence(row.live["policy"])
    return loss / len(rows)


def pg_opd_token(algorithm: PGOPDToken, rows: list[Row], max_tokens: int) -> Tensor:
    """-mean over tokens of (log pi_t - log pi_old) log pi."""
    loss = zero()
    for row in rows:
        for t, policy in enumerate(row.live["policy"]):
            loss = loss - (row.frozen["teacher"][t] - row.frozen["old"][t]) * policy
    return loss / tokens(rows)


def log_sum_exp(values: list[float]) -> float:
    """log sum exp, of plain numbers."""
    return max(values) + math.log(math.fsum(math.exp(v - max(values)) for v in values))


def mixed(p: Tensor, q: Tensor, weight: float) -> Tensor:
    """log(weight e^p + (1 - weight) e^q)."""
    return torch.log(weight * torch.exp(p) + (1 - weight) * torch.exp(q))


def denominators(kind: str, row: Row, share: float) -> list[float]:
    """log den of each token of a trace."""
    p, q = row.frozen["old"], row.frozen["old_posterior"]
    if kind == "source":
        return p if row.features["from_prior"] else q
    if kind == "hybrid":
        return [log_sum_exp([math.log(share) + a, math.log(1 - share) + b]) for a, b in zip(p, q, strict=True)]
    found = []
    for t in range(len(p)):
        # The share of the prior among traces that begin like this one.
        of_prior = math.log(share) + math.fsum(p[:t])
        of_posterior = math.log(1 - share) + math.fsum(q[:t])
        prefix = log_sum_exp([of_prior, of_posterior])
        found.append(log_sum_exp([of_prior - prefix + p[t], of_posterior - prefix + q[t]]))
    return found


def divergence(p: Tensor, q: Tensor, den: float) -> Tensor:
    """(p/den) (q/p - 1 - log(q/p))."""
    u = torch.exp(q - p)
    return torch.exp(p - den) * (u - 1 - torch.log(u))


def covrl(algorithm: CoVRL, rows: list[Row], max_tokens: int) -> Tensor:
    """- mean min(r A, clip(r) A) - NLL part + KL part, each over its own tokens or all over the traces'."""
    a, share = algorithm.composite_weight, algorithm.prior_share
    advantages: dict[int, float] = {}
    for members in groups_of(rows):
        rewards = [row.reward for row in members]
        values = standardised(rewards) if algorithm.advantage_std else [r - mean(rewards) for r in rewards]
        advantages |= {id(row): value for row, value in zip(members, values, strict=True)}
    gradient, answers, kls = zero(), zero(), zero()
    trace_tokens = answer_tokens = kl_tokens = 0
    for row in rows:
        advantage, prior = advantages[id(row)], bool(row.features["from_prior"])
        p, q = row.live["policy"], row.live["posterior"]
        composite = [mixed(x, y, a) for x, y in zip(p, q, strict=True)]
        den = denominators(algorithm.ratio, row, share)
        for live, frozen in zip(composite, den, strict=True):
            gradient = gradient + surrogate(live - frozen, advantage, algorithm.clip, algorithm.clip)
        trace_tokens += row.length
        answered = row.answer_length > 0
        weight = 1.0
        if algorithm.nll_select == "is_weighted":
            pairs = zip(row.frozen["old"], row.frozen["old_posterior"], strict=True)
            old = [log_sum_exp([math.log(a) + x, math.log(1 - a) + y]) for x, y in pairs]
            weight = min(2.0, math.exp(math.fsum(x - d for x, d in zip(old, den, strict=True))))
        chosen = {
            "prior_valid_posadv": prior and row.features["valid"] > 0 and advantage > 0,
            "posadv": answered and advantage > 0,
            "all": answered,
            "is_weighted": answered,
            "none": False,
        }[algorithm.nll_select]
        if chosen:
            answers = answers + weight * row.live["answer"][0]
            answer_tokens += row.answer_length
        if row.truncated and not algorithm.kl_truncated:
            continue
        kl_tokens += row.length
        for t, frozen in enumerate(
            denominators(algorithm.kl_denominator, row, share) if algorithm.kl_denominator != "full" else p
        ):
            if algorithm.kl_denominator == "full":
                kls = kls + row.live["kl"][t]
                continue
            x = p[t].detach() if algorithm.kl_grad == "posterior_only" else p[t]
            y = q[t].detach() if algorithm.kl_grad == "prior_only" else q[t]
            kls = kls + divergence(mixed(x, y, a), x, frozen)
    if algorithm.preset == "elbo":
        answer_tokens = kl_tokens = trace_tokens
    return (
        -gradient / trace_tokens
        - algorithm.nll_coef * answers / max(1, answer_tokens)
        + algorithm.kl_coef * kls / max(1, kl_tokens)
    )


def covrl_jsd(algorithm: CoVRLJSD, rows: list[Row], max_tokens: int) -> Tensor:
    """- mean min(r A, clip(r) A) - NLL part + mean (s/s_old)(p'/s - 1 - log(p'/s))."""
    a = algorithm.composite_weight
    gradient, answers, jsd = zero(), zero(), zero()
    answer_tokens = jsd_tokens = 0
    for members in groups_of(rows):
        for row in members:
            advantage = row.reward - mean([r.reward for r in members])
            prior = bool(row.features["from_prior"])
            for t in range(row.length):
                p, q = row.live["policy"][t], row.live["posterior"][t]
                old_p, old_q = row.frozen["old"][t], row.frozen["old_posterior"][t]
                composite = mixed(p, q, a)
                old = log_sum_exp([math.log(a) + old_p, math.log(1 - a) + old_q])
                gradient = gradient + surrogate(composite - old, advantage, algorithm.clip, algorithm.clip)
                if not row.truncated:
                    jsd_tokens += 1
                    jsd = jsd + divergence(p if prior else q, composite, old_p if prior else old_q)
            if prior and row.features["valid"] > 0 and advantage > 0:
                answers = answers + row.live["answer"][0]
                answer_tokens += row.answer_length
    return (
        -gradient / tokens(rows)
        - algorithm.nll_coef * answers / max(1, answer_tokens)
        + algorithm.jsd_coef * jsd / max(1, jsd_tokens)
    )


def latro(algorithm: LaTRO, rows: list[Row], max_tokens: int) -> Tensor:
    """- mean over rows of (R_i - mean of the others) l_i + c s_i."""
    loss = zero()
    for members in groups_of(rows):
        for row in members:
            others = [r.reward for r in members if r is not row]
            advantage = row.reward - mean(others) if others else 0.0
            loss = loss - advantage * sequence(row.live["policy"])
            if row.answer_length:
                loss = loss - algorithm.answer_coef * row.live["answer"][0]
    return loss / len(rows)


def clipped_rows(rows: list[Row], advantages: list[float], low: float, high: float) -> Tensor:
    """Sum over rows of the mean over tokens of GRPO's clipped surrogate."""
    loss = zero()
    for row, advantage in zip(rows, advantages, strict=True):
        terms = [surrogate(d, advantage, low, high) for d in to_frozen(row, "old")]
        loss = loss + sum(terms, zero()) / len(terms)
    return loss


def rewards_in_grpo(algorithm: LaTROGRPO | VeriFreeGRPO, rows: list[Row], max_tokens: int) -> Tensor:
    """GRPO without a KL, whatever the rewards are."""
    parts = [
        clipped_rows(members, standardised([r.reward for r in members]), algorithm.clip, algorithm.clip)
        for members in groups_of(rows)
    ]
    return -sum(parts, zero()) / len(rows)


def added(rewards: list[float]) -> list[float]:
    """LSE_j s_j - log n - (LSE_{j != i} s_j - log(n - 1)); 0 for a single one."""
    n = len(rewards)
    if n == 1:
        return [0.0]
    whole = log_sum_exp(rewards) - math.log(n)
    return [whole - (log_sum_exp(rewards[:i] + rewards[i + 1 :]) - math.log(n - 1)) for i in range(n)]


def jlb(algorithm: JLB, rows: list[Row], max_tokens: int) -> Tensor:
    """- mean over prompts of sum_i A_i l_i + LSE_j s_j over the traces with an answer."""
    loss = zero()
    for members in groups_of(rows):
        for row, advantage in zip(members, added([r.reward for r in members]), strict=True):
            loss = loss - advantage * sequence(row.live["policy"])
        answers = [row.live["answer"][0] for row in members if row.answer_length]
        if answers:
            loss = loss - torch.log(sum((torch.exp(s) for s in answers), zero()))
    return loss / len(groups_of(rows))


def jlb_grpo(algorithm: JLBGRPO, rows: list[Row], max_tokens: int) -> Tensor:
    """GRPO on what each trace adds to the bound."""
    parts = [
        clipped_rows(members, standardised(added([r.reward for r in members])), algorithm.clip, algorithm.clip)
        for members in groups_of(rows)
    ]
    return -sum(parts, zero()) / len(rows)


def verifree(algorithm: VeriFree, rows: list[Row], max_tokens: int) -> Tensor:
    """- mean over rows of (p_i - mean of the others) l_i + p_i s_i."""
    loss = zero()
    for members in groups_of(rows):
        for row in members:
            others = [r.reward for r in members if r is not row]
            advantage = row.reward - mean(others) if others else 0.0
            loss = loss - advantage * sequence(row.live["policy"])
            if row.answer_length:
                loss = loss - row.reward * row.live["answer"][0]
    return loss / len(rows)


def rlpr(algorithm: RLPR, rows: list[Row], max_tokens: int) -> Tensor:
    """GRPO with clip 0.2 / 0.27."""
    low, high = algorithm.clip_low, algorithm.clip_high
    parts = [clipped_rows(members, standardised([r.reward for r in members]), low, high) for members in groups_of(rows)]
    return -sum(parts, zero()) / len(rows)


def ravr(algorithm: RAVR | RAVRGRPO, rows: list[Row], max_tokens: int) -> Tensor:
    """GRPO on the posterior's traces; RAVR adds r_i times the KL to the prior and the answer's negative log-likelihood."""
    learned = [row for row in rows if row.learn]
    loss = zero()
    for members in groups_of(learned):
        advantages = standardised([r.reward for r in members])
        loss = loss - clipped_rows(members, advantages, algorithm.clip, algorithm.clip)
        for row in members if isinstance(algorithm, RAVR) else ():
            pairs = zip(row.live["policy"], row.live["prior"], row.frozen["old"], strict=True)
            kl = sum((divergence(q, p, old) for q, p, old in pairs), zero()) / row.length
            loss = loss + algorithm.kl_coef * row.reward * kl
            if row.answer_length:
                loss = loss - algorithm.nll_coef * row.reward * row.live["answer"][0] / row.answer_length
    return loss / len(learned)
