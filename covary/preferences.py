"""What alignment to preferences is measured by: win rates of rewards, and the implicit reward of a policy.

The implicit reward of a completion is beta * log(pi(y|x) / pi_initial(y|x)), up to a term of the prompt (arXiv 2305.18290,
eq. 5). GVPO++ (arXiv 2609.21432, A-C) prints the ratio of the two logs instead of the log of the ratio; taken literally
that reverses preferences, because log-probs are negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from covary.engines.local import LocalEngine
from covary.prompts import Template, prompt_group
from covary.rollout.dataset import encode_completion
from covary.types import Example, Group, Score, Stream


def wins(rewards: Sequence[float], against: Sequence[float]) -> list[float]:
    """1 where a reward is the larger of the two, 0 where it is the smaller, one half for a tie; the mean is the win rate."""
    return [0.5 + 0.5 * ((a > b) - (a < b)) for a, b in zip(rewards, against, strict=True)]


def implicit_rewards(
    policy: nn.Module, initial: nn.Module, groups: Sequence[Group], *, micro_batch_tokens: int = 8192
) -> list[list[float]]:
    """log(pi(y|x) / pi_initial(y|x)) of every completion, by group, in nats: the implicit reward at beta = 1.

    Args:
        policy: the trained model.
        initial: the model that it was trained from.
        groups: prompts with completions.
        micro_batch_tokens: of a forward pass, at most.
    """
    engine = LocalEngine(policy, frozen={"initial": initial}, micro_batch_tokens=micro_batch_tokens)
    found = engine.score(list(groups), [Score("policy"), Score("initial", Stream("initial"))])
    # Differences first: a difference of two sums is worth two digits less in float32.
    ratios = iter(
        float((torch.as_tensor(a).double() - torch.as_tensor(b).double()).sum())
        for a, b in zip(found["policy"], found["initial"], strict=True)
    )
    return [[next(ratios) for _ in group.completions] for group in groups]


def prefers(
    policy: nn.Module,
    initial: nn.Module,
    pairs: Sequence[tuple[Example, str, str]],
    template: Template,
    tokenizer: Any,
    *,
    max_tokens: int,
) -> list[float]:
    """1 where the chosen completion has the larger implicit reward, else 0; the mean is the preference accuracy.

    A tie is 0: before training every pair is one.

    Args:
        policy: the trained model.
        initial: the model that it was trained from.
        pairs: example, chosen and rejected completion.
        template: prompt form, as in training.
        tokenizer: of both models.
        max_tokens: completions are cut there, as in training.

    Raises:
        UserError: a prompt that cannot be rendered.
    """
    groups = [prompt_group(example, template, tokenizer) for example, _, _ in pairs]
    for group, (_, *texts) in zip(groups, pairs, strict=True):
        group.completions = [encode_completion(tokenizer, text, max_tokens) for text in texts]
    return [float(chosen > rejected) for chosen, rejected in implicit_rewards(policy, initial, groups)]
