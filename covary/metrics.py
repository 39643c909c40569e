"""Numbers of a step: what `metrics.jsonl` holds beside an algorithm's own. Names are listed in docs/concepts.md."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores, TrainEngine
from covary.collate import rows_of
from covary.ops import all_equal, k3
from covary.types import Completion, Group, Score, Stream

WATCHED_GROUPS = 4
"""Prompts a step whose rollout log-probs are compared with the trainer's."""


def sampling_drift(engine: TrainEngine, groups: Sequence[Group], temperature: float) -> dict[str, float]:
    """`kl/sampling`: the rollout engine's log-probs against the trainer's of the same tokens, in nats per token.

    Both at the rollout temperature, on a few groups; re-encoded and greedy rows have no such log-probs.
    """
    watched = [
        replace(group, completions=known, rewards=None)
        for group in groups[:WATCHED_GROUPS]
        if (known := [c for c in group.completions if c.logps is not None and not c.greedy])
    ]
    difference: list[Tensor] = []
    for context in sorted({completion.context for completion in rows_of(watched)}):
        here = [
            replace(group, completions=rows)
            for group in watched
            if (rows := [c for c in group.completions if c.context == context])
        ]
        values = engine.score(here, [Score("watch", Stream("policy", context))], temperature=temperature)["watch"]
        difference += [
            torch.tensor(completion.logps) - value for completion, value in zip(rows_of(here), values, strict=True)
        ]
    return {"kl/sampling": float(k3(torch.cat(difference)).mean())} if difference else {}


def update_metrics(algorithm: Algorithm, reference: str, scores: Scores, batch: Batch) -> dict[str, float]:
    """Loss, the algorithm's own metrics, and KL to the other policies, in nats per token.

    Args:
        algorithm: its loss is evaluated on the whole optimizer batch, as the engine did in parts.
        reference: the model that `reference` streams read.
        scores: detached trained scores, finite rows only.
        batch: the same rows.
    """
    metrics = {"loss": float(algorithm.loss(scores, batch)), **algorithm.metrics(scores, batch)}
    if "policy" not in scores or scores["policy"].ndim == 1:
        return metrics
    for score in algorithm.frozen:
        model = reference if score.name == "reference" else score.name
        if model in ("old", "initial") and score.level == "token" and score.tokens == "sampled":
            # Samples come from the old policy: KL(old || policy); KL(policy || initial) as usual.
            d = scores["policy"] - batch[score.name]
            metrics[f"kl/{model}"] = float(k3(-d if model == "old" else d)[batch.mask].mean())
    return metrics


def set_weights(algorithm: Algorithm, rows: Sequence[Completion], scores: Scores, batch: Batch) -> None:
    """Give each row the weight of its first update: the w_i of sum_i w_i grad log pi(y_i|x), averaged over tokens."""
    leaves = {name: value.detach().requires_grad_() for name, value in scores.items()}
    if "policy" not in leaves or leaves["policy"].ndim == 1:
        return
    loss = algorithm.loss(leaves, batch)
    (gradient,) = torch.autograd.grad(loss, [leaves["policy"]], allow_unused=True)
    if gradient is not None:
        weights = -gradient.sum(-1) / batch.mask.sum(-1).clamp(min=1) * batch.total("rows")
        for row, weight in zip(rows, weights.tolist(), strict=True):
            row.weight = weight


def rollout_metrics(groups: Sequence[Group], count: Mapping[str, float]) -> dict[str, float]:
    """Of everything that was sampled in a step, rows that left included."""
    rows = rows_of(groups)
    logps = [logp for row in rows if row.logps is not None and not row.greedy for logp in row.logps]
    rewards = [reward for group in groups for reward in group.rewards or [] if reward is not None]
    metrics = {
        "completion/length": float(np.mean([len(row.tokens) for row in rows])),
        "completion/truncated": float(np.mean([row.finish == "length" for row in rows])),
        **{name: float(value) for name, value in count.items()},
    }
    if logps:
        # Minus the mean log-prob of samples is an unbiased estimate of the sampling policy's token entropy.
        metrics["entropy"] = -float(np.mean(logps))
    if rewards:
        group = torch.tensor([g for g, one in enumerate(groups) for r in one.rewards or [] if r is not None])
        same = all_equal(torch.tensor(rewards, dtype=torch.float64), group.unique(return_inverse=True)[1])
        metrics |= {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "groups/zero_variance": float(same.sum()),
        }
    return metrics


class Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds = dict.fromkeys(("rollout", "reward", "score", "train"), 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the time of the block to `part`."""
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """`time/...` in seconds, and completion tokens per second of the whole step."""
        tokens = sum(len(row.tokens) for row in rows_of(groups))
        rate = tokens / (time.perf_counter() - self.start)
        return {**{f"time/{name}": s for name, s in self.seconds.items()}, "tokens_per_second": rate}
