"""Sampled traces -> traces with a reference answer behind them, re-encoded piece by piece.

A sampled closing tag may be merged with its neighbours into one token, and the answer is appended as text.
So the trace is decoded, cut at the tag, and every piece is encoded alone: trace + stop (sampled: stopping is
an action), glue (context), answer (answer). The sampler's log-probs do not belong to these ids and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from covary.prompts import Template
from covary.types import Completion, Group, Role


def append_answers(groups: Sequence[Group], template: Template, tokenizer: Any) -> list[Group]:
    """Groups whose finished traces carry the reference answer.

    A trace that did not reach the stop string (truncated, or ended by the end token) gets none: it keeps its
    tokens and has no answer positions.
    """
    if template.answer is None or template.stop is None:
        return list(groups)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    stop, glue = encode(template.stop), encode(template.glue)

    def answered(completion: Completion, answer: list[int] | None) -> Completion:
        if completion.finish != "stop_string" or not answer:
            return completion
        trace = encode(completion.text) + stop
        roles: list[Role] = ["sampled"] * len(trace) + ["context"] * len(glue) + ["answer"] * len(answer)
        return replace(completion, tokens=trace + glue + answer, roles=roles, logps=None)

    return [
        replace(
            group,
            completions=[answered(completion, group.answer_tokens) for completion in group.completions],
        )
        for group in groups
    ]
