"""Means over problems and their intervals, pass@k against enumeration, majority with ties."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covary.statistics import estimate, majority, pass_at_k


def case(shared: Path, id: str) -> dict:
    rows = (json.loads(line) for line in (shared / "cases" / "cases.jsonl").read_text().splitlines())
    return next(row for row in rows if row["id"] == id)


def test_pass_at_k_of_the_case(shared: Path) -> None:
    found = case(shared, "E01")
    a, b = found["input"]["a"], found["input"]["b"]
    per_problem = [pass_at_k(a["samples_each"], int(i < a["solved"]), 1) for i in range(a["problems"])]
    assert estimate(per_problem).mean == pytest.approx(found["expected"]["a"]["pass@1"], abs=1e-6)
    with pytest.raises(ValueError, match="at least 10 samples per problem, got 1"):
        pass_at_k(1, 1, 10)
    assert {str(k): pass_at_k(b["n"], b["c"], k) for k in b["k"]} == pytest.approx(found["expected"]["b"], abs=1e-6)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([i < correct for i in range(n)], k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_estimate_by_hand() -> None:
    found = estimate([1.0, 0.0, 0.5, 0.5])
    assert (found.mean, found.problems) == (0.5, 4)
    assert found.half == pytest.approx(1.959964 * math.sqrt((0.5 / 3) / 4))
    assert estimate([0.25]).mean == 0.25
    assert math.isnan(estimate([0.25]).half)
    assert math.isnan(estimate([]).mean)


def test_the_interval_covers_where_samples_of_a_problem_are_alike() -> None:
    """Problems are easy or hard: an interval that took samples for independent would cover far less than 95 %."""
    rng = random.Random(0)
    covered = naive = 0
    for _ in range(400):
        easy = [rng.random() < 0.5 for _ in range(60)]
        shares = [sum(rng.random() < (0.95 if e else 0.05) for _ in range(8)) / 8 for e in easy]
        found = estimate(shares)
        covered += abs(found.mean - 0.5) <= found.half
        naive += abs(found.mean - 0.5) <= 1.96 * math.sqrt(found.mean * (1 - found.mean) / (60 * 8))
    assert 0.92 <= covered / 400 <= 0.98
    assert naive / 400 < 0.7


def test_majority() -> None:
    assert majority([(3, True), (2, False)]) == 1
    assert majority([(2, True), (3, False)]) == 0
    assert majority([(2, True), (2, False), (1, False)]) == 0.5  # decided by lot
    assert majority([]) == 0
