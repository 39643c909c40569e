"""What a batch promises: rows taken with their numbers, totals kept, clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covary.batch import Algorithm, Batch, one_process
from covary.types import Example, Request, Score
from tests.algorithms.helpers import make_batch


@pytest.fixture
def batch() -> Batch:
    return make_batch(
        [3, 1, 3, 0],
        mask=[[True, True], [True], [True, False, True], [True]],
        rewards=[1.0, 2.0, 3.0, 4.0],
        numbers={"old": [[-1, -2], [-3], [-4, -5, -6], [-7]], "length": [2.0, 1.0, 3.0, 1.0]},
        source=["policy", "teacher", "replay", "policy"],
        max_tokens=9,
    )


def test_take_keeps_rows_together(batch: Batch) -> None:
    part = batch.with_numbers({"weight": torch.arange(4.0)}).take([2, 3, 0])
    assert len(part) == 3
    assert part.group.tolist() == [1, 0, 1]
    assert part.num_groups == 2
    assert part.rewards.tolist() == [3.0, 4.0, 1.0]
    assert part["old"].tolist() == [[-4, -5, -6], [-7, 0, 0], [-1, -2, 0]]
    assert part["length"].tolist() == [3.0, 1.0, 2.0]
    assert part["weight"].tolist() == [2.0, 3.0, 0.0]
    assert part.mask.tolist() == [[True, False, True], [True, False, False], [True, True, False]]
    assert torch.equal(part.tokens, batch.tokens[[2, 3, 0]])
    assert part.source == ("replay", "policy", "policy")
    assert part.max_tokens == 9


def test_take_accepts_tensors_and_nothing(batch: Batch) -> None:
    assert batch.take(torch.tensor([1])).rewards.tolist() == [2.0]
    empty = batch.take([])
    assert len(empty) == 0
    assert empty.num_groups == 0


def test_take_reads_a_boolean_mask_as_rows(batch: Batch) -> None:
    keep = torch.tensor([False, False, True, True])
    assert batch.take(keep).rewards.tolist() == [3.0, 4.0]


def test_totals_are_of_the_optimizer_batch(batch: Batch) -> None:
    whole = batch.with_totals(["length"])
    assert {name: whole.total(name) for name in ("groups", "rows", "tokens", "length")} == {
        "groups": 3.0,
        "rows": 4.0,
        "tokens": 6.0,
        "length": 7.0,
    }
    part = whole.take([1, 3])
    assert part.totals == whole.totals
    assert part.with_totals().total("rows") == 2.0  # fixed anew: another optimizer batch


def test_totals_are_summed_over_ranks(batch: Batch) -> None:
    both = batch.with_totals(["length"], reduce=lambda x: 2 * x)
    assert both.totals == {"groups": 6.0, "rows": 8.0, "tokens": 12.0, "length": 14.0}


def test_a_batch_without_rows_has_totals_of_zero(batch: Batch) -> None:
    """`prepare` is not asked where every row left, so the normaliser's numbers are not there."""
    assert batch.take([]).with_totals(["nll_tokens"]).totals == {"groups": 0, "rows": 0, "tokens": 0, "nll_tokens": 0}


def test_a_name_is_used_once(batch: Batch) -> None:
    with pytest.raises(ValueError, match="two numbers of one batch are called 'old'"):
        batch.with_numbers({"old": torch.zeros(4)})


@pytest.mark.parametrize("shape", [(), (3,), (4, 2), (3, 3), (4, 1), (4, 3, 1)], ids=str)
def test_numbers_have_one_value_per_row_or_token(batch: Batch, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"number 'x' has shape .* not \(B,\) or \(B, T\)"):
        batch.with_numbers({"x": torch.zeros(shape)})


def test_adding_numbers_leaves_the_first_batch_alone(batch: Batch) -> None:
    more = batch.with_numbers({"x": torch.zeros(4, 3), "y": torch.zeros(4)})
    assert "x" in more
    assert "y" in more
    assert "x" not in batch


def test_unknown_names_are_answered_with_the_known_ones(batch: Batch) -> None:
    with pytest.raises(KeyError, match=r"no number 'reference' \(it has: length, old\)"):
        batch["reference"]
    with pytest.raises(KeyError, match="call with_totals first"):
        batch.total("rows")
    with pytest.raises(KeyError, match=r"no total 'pairs' \(it has: groups, rows, tokens\)"):
        batch.with_totals().total("pairs")
    with pytest.raises(KeyError, match="no number 'pairs'"):
        batch.with_totals(["pairs"])


def test_source_is(batch: Batch) -> None:
    assert batch.source_is("policy").tolist() == [True, False, False, True]
    assert batch.source_is("dataset").tolist() == [False] * 4
    assert batch.take([1]).source_is("teacher").tolist() == [True]


def test_to_moves_every_tensor(batch: Batch) -> None:
    moved = batch.with_totals().to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 7
    assert all(value.is_meta for value in [*tensors, *moved.numbers.values()])
    assert moved.totals == batch.with_totals().totals


def test_defaults_of_an_algorithm(batch: Batch) -> None:
    algorithm = Algorithm()
    prompts = [Example("a", "x"), Example("b", "y")]
    plan = algorithm.plan(prompts, 8, np.random.default_rng(0))
    assert plan == [[Request(8)], [Request(8)]]
    assert algorithm.trained == (Score("policy"),)
    assert algorithm.select(batch, {"n": 1.0}) == (None, {"n": 1.0})
    assert algorithm.reward(batch) is None
    assert algorithm.prepare(batch, one_process) == {}
    with pytest.raises(NotImplementedError, match="Algorithm has no loss"):
        algorithm.loss({}, batch)
