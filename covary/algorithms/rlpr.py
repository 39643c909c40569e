"""RLPR: reinforcement learning with reference probability reward (arXiv 2506.18254).

    r_i = clip( 1/|y| sum_t p(y_t|z_i,x,y_<t) - base(x,y), 0, 1 ),   R_i = 0.9 r_i + 0.1 format_i
    base: the same mean, of y straight behind the assistant's header without a trace, by the initial policy, once per question
    A_i = (R_i - mean) / (std + eps), 0 where the std is below 1e-6
    L   = - mean over rows of  1 / |z_i| * sum_t min(ratio A, clip(ratio, 1 - 0.2, 1 + 0.27) A)

Questions whose rewards differ too little are dropped and others drawn: their standard deviation has to reach half of a
moving average (decay 0.99) of the mean one, which starts at the sixth draw and filters from the eleventh on. No KL, and no gradient
through y. The answer's tags are not scored (template `rlpr`); the format is a closed trace that is not empty and holds no tag.
Compared with OpenBMB/RLPR, examples/RLPR/reproduce_qwen.sh, verl/workers/reward_manager/prob.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Reduce, Scores
from covary.ops import check_clip, clipped, group_variance, log_ratio, row_surrogate, share, standardise
from covary.types import Completion, Example, Score, Stream

LEAST_STD = 1e-6
DECAY = 0.99
FIRST_AVERAGED, FIRST_FILTERED = 6, 11  # draws, of which there is one a step until the filter starts


@dataclass(frozen=True)
class RLPR(Algorithm):
    """GRPO on the mean probability of the reference answer's tokens, above that without a trace.

    Attributes:
        format_share: the format's share of the reward.
        min_spread: a question stays where its rewards' standard deviation reaches this share of the moving average.
        clip_low: below the ratio 1.
        clip_high: above it.
    """

    format_share: float = 0.1
    min_spread: float = 0.5
    clip_low: float = 0.2
    clip_high: float = 0.27

    min_group = 2
    template = "rlpr"
    frozen = (
        Score("old_answer", Stream("old"), "prob", tokens="answer", level="sequence", early=True),
        Score("base", Stream("initial", "direct"), "prob", level="sequence", per="example", early=True),
        Score("old", Stream("old")),
    )

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if not 0 <= self.format_share <= 1:
            raise ValueError(f"format_share takes a number from 0 to 1, got {self.format_share}")
        if not self.min_spread >= 0:
            raise ValueError(f"min_spread takes a number from 0 on, got {self.min_spread}")

    def features(self, example: Example, completion: Completion) -> dict[str, float]:
        """Whether the trace has the form."""
        return {"valid": float(completion.valid_trace)}

    def reward(self, batch: Batch) -> Float[Tensor, " B"]:
        """Mean probability above the base, and the format."""
        length = batch.answer_mask.sum(-1)
        above = ((batch["old_answer"] - batch["base"]) / length.clamp(min=1)).clamp(0, 1)
        above = torch.where(length > 0, above, 0.0)
        return (1 - self.format_share) * above + self.format_share * batch["valid"]

    def select(self, batch: Batch, state: dict[str, float]) -> tuple[Bool[Tensor, " G"] | None, dict[str, float]]:
        """Questions whose rewards differ enough, by the average over earlier draws."""
        std = group_variance(batch.rewards, batch.group).sqrt()
        draw, average = state.get("draws", 0.0) + 1, state.get("average")
        keep = std >= self.min_spread * average if draw >= FIRST_FILTERED and average is not None else None
        state = {**state, "draws": draw}
        if draw >= FIRST_AVERAGED:
            mean = float(std.mean())
            state["average"] = mean if average is None else DECAY * average + (1 - DECAY) * mean
        return keep, state

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Rewards standardised within their group."""
        flat = group_variance(batch.rewards, batch.group).sqrt() < LEAST_STD
        advantage = standardise(batch.rewards, batch.group, eps=1e-6)
        return {"advantage": torch.where(flat[batch.group], 0.0, advantage)}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """GRPO's clipped surrogate with a wider upper range."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        surrogate = row_surrogate(to_old, batch["advantage"], batch.mask, self.clip_low, self.clip_high)
        return -surrogate.sum() / batch.total("rows")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Share of tokens that the clip holds, and of traces that have the form."""
        to_old = log_ratio(scores["policy"], batch["old"], batch.mask)
        held = clipped(to_old, batch["advantage"].unsqueeze(-1), self.clip_low, self.clip_high)
        return {"rlpr/clip_fraction": share(held, batch.mask), "rlpr/valid": float(batch["valid"].mean())}
