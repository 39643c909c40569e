"""Sampled traces -> traces with a reference answer behind them, re-encoded piece by piece.

A sampled closing tag may be merged with its neighbours into one token, and the answer is appended as text.
So the trace is decoded, cut at the tag, and every piece is encoded alone: trace + stop (sampled: stopping is
an action), glue (context), answer (answer). The sampler's log-probs do not belong to these ids and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from covary.prompts import Template
from covary.types import Completion, Group, Role

Fault = Literal["truncated", "unclosed", "tagged", "empty"]
FAULTS: tuple[Fault, ...] = ("truncated", "unclosed", "tagged", "empty")


def fault(completion: Completion, template: Template) -> Fault | None:
    """What a trace's form lacks.

    Returns:
        `truncated`: it met the token limit. `unclosed`: it ended without the stop string. `tagged`: it holds another of
        the template's tags. `empty`: it was closed at once. None: nothing.
    """
    if completion.finish != "stop_string":
        return "truncated" if completion.finish == "length" else "unclosed"
    if template.tag_in(completion.text):
        return "tagged"
    return None if completion.text.strip() else "empty"


def append_answers(groups: Sequence[Group], template: Template, tokenizer: Any) -> list[Group]:
    """Groups whose closed traces carry the reference answer.

    A trace of another form (see `fault`; an empty one is closed) gets none: it keeps its tokens and has no answer
    positions.
    """
    if template.answer is None or template.stop is None:
        return list(groups)
    stop, glue = (template.encode(text, tokenizer) for text in (template.stop, template.glue))

    def answered(completion: Completion, answer: list[int] | None) -> Completion:
        if fault(completion, template) not in (None, "empty") or not answer:
            return completion
        trace = template.encode(completion.text, tokenizer) + stop
        roles: list[Role] = ["sampled"] * len(trace) + ["context"] * len(glue) + ["answer"] * len(answer)
        return replace(completion, tokens=trace + glue + answer, roles=roles, logps=None)

    return [
        replace(
            group,
            completions=[answered(completion, group.answer_tokens) for completion in group.completions],
        )
        for group in groups
    ]
