"""Groups become one padded batch, and rows leave groups and batch alike."""

from __future__ import annotations

import math

import pytest
import torch

from covary.algorithms import GVPO
from covary.batch import Algorithm
from covary.collate import attach, attach_features, collate, rows_of, take_rows
from covary.types import Completion, Example, Group


def groups() -> list[Group]:
    def row(tokens: list[int], **changes) -> Completion:
        return Completion(tokens, "", changes.pop("finish", "eos"), **changes)

    one = Group(Example("a", ""), {"prompt": [1]}, [row([5, 6]), row([7], finish="length")], [1.0, None])
    two = Group(
        Example("b", ""), {"prompt": [1]}, [row([2, 2, 2], source="replay"), row([8], learn=False)], [0.5, 0.25]
    )
    return [one, two]


def test_batch_of_ragged_groups():
    batch = collate(groups(), max_tokens=9)
    # Token 2 could be a pad or an end id: padding is known by position, so every 2 of the completion counts.
    assert batch.mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert batch.tokens.tolist() == [[5, 6, 0], [7, 0, 0], [2, 2, 2], [8, 0, 0]]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist()[0] == 1.0
    assert math.isnan(batch.rewards.tolist()[1])
    assert batch.learn.tolist() == [True, True, True, False]
    assert batch.truncated.tolist() == [False, True, False, False]
    assert batch.source_is("replay").tolist() == [False, False, True, False]
    assert batch.max_tokens == 9
    assert len(collate([], 9)) == 0


def test_numbers_of_rows_and_tokens():
    made = groups()
    attach(made, {"old": [torch.arange(len(c.tokens)).float() for c in rows_of(made)], "f": [1.0, 2.0, 3.0, 4.0]})
    batch = collate(made, 9)
    assert batch["old"].tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert batch["f"].tolist() == [1, 2, 3, 4]
    kept = take_rows(made, [1, 3])
    assert collate(kept, 9)["f"].tolist() == batch.take([1, 3])["f"].tolist() == [2, 4]
    with pytest.raises(ValueError, match="zip"):
        attach(made, {"x": [1.0]})
    with pytest.raises(ValueError, match="two numbers of one row are called 'f'"):
        attach(made, {"f": [1.0, 2.0, 3.0, 4.0]})


def test_taking_rows_keeps_rewards_with_their_rows_and_drops_empty_groups():
    made = groups()
    kept = take_rows(made, [2])
    assert [g.example.id for g in kept] == ["b"]
    assert kept[0].rewards == [0.5]
    assert [len(g.completions) for g in made] == [2, 2]  # the original groups are untouched
    assert take_rows(made, []) == []


def test_features_come_from_text_and_data():
    class Lengths(Algorithm):
        def features(self, example, completion):
            return {"length": float(len(completion.tokens)), "is_a": float(example.id == "a")}

    made = groups()
    attach_features(made, Lengths())
    batch = collate(made, 9)
    assert batch["length"].tolist() == [2, 1, 3, 1]
    assert batch["is_a"].tolist() == [1, 1, 0, 0]


def test_an_excluded_row_neither_moves_the_group_mean_nor_gets_a_gradient():
    """Rewards 1, None, 0, 1: the mean of the valid ones is 2/3; a 0 in its place would give 0.5."""
    rows = [Completion([i], "", "eos", numbers={"reference": torch.zeros(1)}) for i in range(4)]
    group = Group(Example("a", ""), {"prompt": [1]}, rows, [1.0, None, 0.0, 1.0])
    valid = [i for i, reward in enumerate(group.rewards or []) if reward is not None]
    batch = collate(take_rows([group], valid), 4).with_totals()
    scores = torch.zeros(3, 1, requires_grad=True)
    GVPO(beta=1.0).loss({"policy": scores}, batch).backward()
    # d/dl_i = -(R_i - mean R) / (k - 1)
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad[:, 0], -torch.tensor([1 / 3, -2 / 3, 1 / 3]) / 2)
