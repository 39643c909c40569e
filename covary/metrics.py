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
"""Prompts a step whose rollout log-probs are compared with the trainer's, where that takes a pass of its own."""


def watched(groups: Sequence[Group]) -> list[Group]:
    """The policy's own samples whose log-probs at the rollout temperature are known, of a few groups.

    Greedy rows, re-encoded ones and those of other sources have no such log-probs.
    """
    few = [
        replace(group, completions=rows, rewards=None)
        for group in groups
        if (rows := [row for row in group.completions if is_watched(row)])
    ]
    return few[:WATCHED_GROUPS]


def is_watched(row: Completion) -> bool:
    """Whether `kl/sampling` may read this row."""
    return row.source == "policy" and row.logps is not None and not row.greedy


def sampling_kl(rows: Sequence[Completion], values: Sequence[Tensor]) -> dict[str, float]:
    """`kl/sampling`: the rollout engine's log-probs against the trainer's of the same tokens, in nats per token."""
    both = [
        (row.logps or [], value[: len(row.tokens)]) for row, value in zip(rows, values, strict=True) if is_watched(row)
    ]
    if not both:
        return {}
    engine = torch.tensor([logp for logps, _ in both for logp in logps])
    return {"kl/sampling": float(k3(engine - torch.cat([value for _, value in both])).mean())}


def score_watched(engine: TrainEngine, groups: Sequence[Group], temperature: float) -> dict[str, float]:
    """`kl/sampling` by a forward pass of its own, at the rollout temperature."""
    rows: list[Completion] = []
    values: list[Tensor] = []
    for context in sorted({row.context for row in rows_of(watched(groups))}):
        here = [
            replace(group, completions=of_context)
            for group in watched(groups)
            if (of_context := [row for row in group.completions if row.context == context])
        ]
        rows += rows_of(here)
        values += engine.score(here, [Score("watch", Stream("policy", context))], temperature=temperature)["watch"]
    return sampling_kl(rows, values)


def update_metrics(
    algorithm: Algorithm, reference: str, scores: Scores, batch: Batch
) -> tuple[dict[str, float], list[float]]:
    """Loss, the algorithm's own metrics, KL to the other policies (nats per token); and the weight of each row.

    A row's weight is the w_i of sum_i w_i grad log pi(y_i|x), averaged over its tokens, in units of one row.

    Args:
        algorithm: its loss is evaluated on the whole optimizer batch, as the engine did in parts.
        reference: the model that `reference` streams read.
        scores: detached trained scores, finite rows only.
        batch: the same rows.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in scores.items()}
    loss = algorithm.loss(leaves, batch)
    metrics = {**algorithm.metrics(scores, batch), "loss": float(loss.detach())}
    weights = torch.zeros(len(batch), dtype=torch.float64)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else ()
    for score, gradient in zip(algorithm.trained, gradients, strict=False):
        if gradient is not None and is_policy_logp(score):
            per_row = gradient.sum(-1) / batch.mask.sum(-1).clamp(min=1) if gradient.ndim == 2 else gradient
            weights -= per_row * batch.total("rows")
    for score in algorithm.frozen:
        model = _model(score, reference)
        twin = next((t for t in algorithm.trained if is_policy_logp(t) and _same_tokens(t, score)), None)
        if model in ("old", "initial") and twin is not None:
            # Samples come from the old policy: KL(old || policy); KL(policy || initial) as usual.
            d = scores[twin.name] - batch[score.name]
            # A method may read the policy under several prompts: the first that it names is meant.
            metrics.setdefault(f"kl/{model}", float(k3(-d if model == "old" else d)[batch.mask].mean()))
    return metrics, weights.tolist()


def is_policy_logp(score: Score) -> bool:
    """Whether it is the policy's own log-prob of sampled tokens, per token or summed."""
    stream, *others = score.stream_pair
    return score.quantity == "logp" and score.tokens == "sampled" and not others and stream.model == "policy"


def _model(score: Score, reference: str) -> str | None:
    """The one model behind a frozen log-prob."""
    stream, *others = score.stream_pair
    if others or score.quantity != "logp" or score.per != "row":
        return None
    return reference if stream.model == "reference" else stream.model


def _same_tokens(trained: Score, frozen: Score) -> bool:
    """Whether both are per-token numbers of the same tokens under the same context."""
    same_context = trained.stream_pair[0].context == frozen.stream_pair[0].context
    return same_context and trained.tokens == frozen.tokens and trained.level == frozen.level == "token"


def rollout_metrics(groups: Sequence[Group], count: Mapping[str, float]) -> dict[str, float]:
    """Of everything that was sampled in a step, rows that left included; rewards of rows to learn from."""
    rows = rows_of(groups)
    metrics = {
        "completion/length": float(np.mean([row.sampled_length for row in rows])),
        "completion/truncated": float(np.mean([row.finish == "length" for row in rows])),
        **{name: float(value) for name, value in count.items()},
    }
    metrics["tokens/generated"] = float(generated(groups))
    for source in sorted({row.source for row in rows} - {"policy"}):
        of_source = [
            r
            for g in groups
            for c, r in zip(g.completions, g.rewards or (), strict=bool(g.rewards))
            if c.source == source
        ]
        metrics[f"{source}/rows"] = float(sum(row.source == source for row in rows))
        scored = [reward for reward in of_source if reward is not None]
        if scored:
            metrics[f"{source}/reward"] = float(np.mean(scored))
    own = [row for row in rows if row.source == "policy" and not row.greedy]
    if own and all(row.logps is not None for row in own):
        # Minus the mean log-prob of samples is an unbiased estimate of the sampling policy's token entropy.
        metrics["entropy"] = -float(np.mean([logp for row in own for logp in row.logps or []]))
    rewards = [
        (g, reward)
        for g, group in enumerate(groups)
        for row, reward in zip(group.completions, group.rewards or [None] * len(group.completions), strict=True)
        if row.learn and reward is not None
    ]
    if rewards:
        group = torch.tensor([g for g, _ in rewards]).unique(return_inverse=True)[1]
        values = torch.tensor([reward for _, reward in rewards], dtype=torch.float64)
        metrics |= {
            "reward/mean": float(values.mean()),
            "reward/std": float(values.std(correction=0)),
            "groups/zero_variance": float(all_equal(values, group).sum()),
        }
    return metrics


def generated(groups: Sequence[Group]) -> int:
    """Tokens that were sampled in a step: replayed and given ones cost nothing."""
    return sum(row.sampled_length for row in rows_of(groups) if row.source not in ("replay", "dataset"))


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
        rate = generated(groups) / (time.perf_counter() - self.start)
        return {**{f"time/{name}": s for name, s in self.seconds.items()}, "tokens_per_second": rate}
