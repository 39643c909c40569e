"""The form of thought and answer, as a reward reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covary.rewards.tag_format import tag_format


def test_case_t05(shared: Path) -> None:
    """A prompt that opened the thought, repeated tags, end tokens left behind."""
    lines = (shared / "cases" / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    case = next(row for row in map(json.loads, lines) if row["id"] == "T05")
    # The case's notes in brackets are no part of a completion; its first two prompts end with the tag.
    completions = [text.split(" (prompt also")[0].replace("\\n", "\n") for text in case["input"]["completions"]]
    assert [tag_format(text, opened=i < 2) for i, text in enumerate(completions)] == case["expected"]["format"]


@pytest.mark.parametrize(
    ("completion", "opened", "form"),
    [
        ("<think>a</think><answer>b</answer> </s>", False, 1),
        ("a\nb</think>\n\n<answer>b</answer><|endoftext|><|endoftext|>", True, 1),
        ("<think>  </think><answer>b</answer>", False, 0),
        ("<think>a</think><answer></answer>", False, 0),
        ("<answer>b</answer><think>a</think>", False, 0),
        ("<think>a</think> so <answer>b</answer>", False, 0),
        ("<think>a</think><answer>b</answer> and more", False, 0),
        ("<think>a<answer>b</answer></think>", False, 0),
        ("", False, 0),
        ("", True, 0),
    ],
)
def test_forms(completion: str, opened: bool, form: int) -> None:
    assert tag_format(completion, opened) == form


def test_a_hostile_text_costs_no_time() -> None:
    assert tag_format("<think>" + "a " * 500_000 + "</think><answer>b</answer>") == 1
    assert tag_format("<think>" * 200_000) == 0
    assert tag_format("<|" * 500_000 + " " * 500_000) == 0
    assert tag_format("<think>" + "x " * 500_000 + "<answer>b</answer></think>") == 0
    assert tag_format("<think>" + " " * 500_000 + "</think><answer>b</answer>") == 0
    assert tag_format("<think>a</think><answer>b</answer>" + "<|im_end|>" * 20_000) == 1
