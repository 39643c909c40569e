"""Whether a completion has the form `<think>...</think> <answer>...</answer>`: for rewards that ask for one."""

from __future__ import annotations

import re

_MARK = re.compile(r"(?:<\|[^|<>]{1,40}\|>|</s>|<pad>)$")  # an end or padding token that a decoder left behind
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def tag_format(completion: str, opened: bool = False) -> float:
    """1 where one thought and then one answer stand, neither empty and nothing beside them, else 0.

    Args:
        completion: the model's text. End and padding tokens behind it do not count.
        opened: the prompt ends with `<think>` (the templates `r1` and `think`): the completion then goes on inside it,
            and a second opening tag is one too many.
    """
    rest = _unmarked(("<think>" if opened else "") + completion)
    if any(rest.count(tag) != 1 for tag in _TAGS):
        return 0.0
    before: list[str] = []
    for tag in _TAGS:
        part, found, rest = rest.partition(tag)
        if not found:  # they stand in another order
            return 0.0
        before.append(part.strip())
    start, thought, between, answer = before
    return float(bool(thought and answer) and not (start or between or rest))


def _unmarked(text: str) -> str:
    text = text.rstrip()
    while mark := _MARK.search(text, max(0, len(text) - 50)):
        text = text[: mark.start()].rstrip()
    return text
