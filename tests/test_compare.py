"""Two evaluations compared: paired by question, by category, and refused where they are not of the same questions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from covary.compare import compare, differences
from covary.evaluate import Sample
from covary.types import UserError


def sample(id: str, index: int, reward: float | None, category: str | None = None, greedy: bool = False) -> Sample:
    return Sample(id, index, greedy, "", "eos", 1, reward, category=category)


def write(
    root: Path, rows: dict[str, list[float | None]], task: str = "t", questions: int | None = None, **settings
) -> Path:
    folder = root / task
    folder.mkdir(parents=True)
    count = max(map(len, rows.values()))
    base = {
        "rows_sha256": "r", "questions": questions or len(rows), "model": {"weights_sha256": str(root)},
        "sampling": {"samples": count, "greedy": False, "temperature": 1.0}, "about": {"model": str(root)},
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(base | settings))
    with (folder / "samples.jsonl").open("w") as file:
        for id, rewards in rows.items():
            for index, reward in enumerate(rewards):
                file.write(json.dumps(vars(sample(id, index, reward, id[0]))) + "\n")
    return root


def test_by_hand(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x1": [1, 0], "x2": [0, 0], "y1": [1, 1]})
    b = write(tmp_path / "b", {"x1": [1, 1], "x2": [1, 0], "y1": [0, 0]})
    (all_, x, y), notes = compare(a, b)
    assert notes == []
    assert (all_.a, all_.b) == pytest.approx((0.5, 0.5))
    assert all_.difference.mean == pytest.approx(0)
    assert all_.difference.half == pytest.approx(1.959964 * math.sqrt((2 * 0.5**2 + 1) / 2 / 3))
    assert (x.category, x.difference.mean, x.difference.problems) == ("x", 0.5, 2)
    assert (y.category, y.difference.mean) == ("y", -1.0)
    assert x.line() == "t/x 0.250 -> 0.750, +0.500 (+0.500 to +0.500), 2 questions"


def test_pairing_is_what_makes_small_differences_visible() -> None:
    rng = random.Random(0)
    a, b = [], []
    for i in range(200):
        hard = rng.random()
        for own, chance in ((a, hard), (b, min(1.0, hard + 0.1))):
            own += [sample(str(i), k, float(rng.random() < chance)) for k in range(8)]
    (found,) = differences("t", a, b)
    mean, half = found.difference.mean, found.difference.half
    assert mean - half > 0
    assert half < 0.03  # two intervals apart would need 0.08: questions differ more than models
    assert abs(mean - 0.095) < half


def test_greedy_completions_and_questions_without_a_score() -> None:
    a = [sample("p", 0, 1.0), sample("p", 1, 0.0, greedy=True), sample("q", 0, None), sample("q", 1, 1.0, greedy=True)]
    b = [sample("p", 0, 0.0), sample("p", 1, 1.0, greedy=True), sample("q", 0, 1.0), sample("q", 1, 1.0, greedy=True)]
    (found,) = differences("t", a, b)
    assert (found.a, found.b, found.difference.problems) == (1.0, 0.0, 1)
    assert found.greedy is not None
    assert (found.greedy.a, found.greedy.b, found.greedy.difference.problems) == (0.5, 1.0, 2)
    assert "; greedy 0.500 -> 1.000" in found.line()


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    rows = {"x1": [1.0, 0.0]}
    a = write(tmp_path / "a", rows)
    with pytest.raises(UserError, match=r"none holds no evaluation"):
        compare(a, tmp_path / "none")
    with pytest.raises(UserError, match="no task in common"):
        compare(a, write(tmp_path / "b", rows, task="other"))
    with pytest.raises(UserError, match=r"the questions of t in .* are not those in"):
        compare(a, write(tmp_path / "c", rows, rows_sha256="s"))
    with pytest.raises(UserError, match="is not finished, 1 of 2 questions are answered"):
        compare(a, write(tmp_path / "d", rows, questions=2))


def test_other_conditions_are_told(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x1": [1.0, 0.0]})
    b = write(tmp_path / "b", {"x1": [1.0]}, sampling={"samples": 1, "greedy": False, "temperature": 0.6})
    _, notes = compare(a, b)
    assert notes == ["t: beside their models, the two differ in sampling.samples, sampling.temperature"]
