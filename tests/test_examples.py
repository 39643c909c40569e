"""The programs of examples/ run as they are, on the shipped model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.loop.mini import metrics, rollouts, run

EXAMPLES = Path(__file__).parent.parent / "examples"


def execute(name: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(EXAMPLES.parent)
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_there_are_three_short_ones() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(lines) == {"own_algorithm.py", "own_data.py", "read_rollouts.py"}
    assert max(lines.values()) < 60


def test_own_algorithm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    execute("own_algorithm.py", str(tmp_path / "run"))
    rows = metrics(tmp_path / "run")
    assert all(row["grad_norm"] > 0 and row["pairwise/pairs"] > 0 for row in rows[1:])
    assert rows[-1]["kl/old"] > 0
    assert f"{rows[-1]['pairwise/pairs']:.0f} pairs an update" in capsys.readouterr().out.splitlines()[-1]


def test_own_data(tmp_path: Path) -> None:
    execute("own_data.py", str(tmp_path))
    data = {i: json.loads(line) for i, line in enumerate((tmp_path / "receipts.jsonl").read_text().splitlines(), 1)}
    scored = [row for row in rollouts(tmp_path / "run", 4) if row["reward"] is not None]
    assert any(0 < row["reward"] < 1 for row in scored)
    for row in scored:
        receipt = data[int(row["id"].split("/")[1])]
        assert (row["reward"] == 1) == (int(row["completion"].split()[0]) == receipt["total"])


def test_read_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    capsys.readouterr()
    execute("read_rollouts.py", str(tmp_path / "run"))
    lines = capsys.readouterr().out.splitlines()
    first = rollouts(tmp_path / "run", 1)
    step, reward, right, distinct, truncated = map(float, lines[1].split())
    assert (step, right) == (1, mean(row["reward"] >= 1 for row in first))
    assert reward == pytest.approx(mean(row["reward"] for row in first), abs=6e-4)
    assert distinct == 1
    assert truncated == pytest.approx(mean(row["finish"] == "length" for row in first), abs=6e-3)
    hardest = max((row for n in (1, 2) for row in rollouts(tmp_path / "run", n)), key=lambda row: row["weight"])
    assert lines[-2].split()[0] == f"{hardest['weight']:+.3f}"
    with pytest.raises(SystemExit, match="has no rollouts"):
        execute("read_rollouts.py", str(tmp_path))


def test_read_rollouts_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="usage: python examples"):
        execute("read_rollouts.py")
    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps({"prompt": "a", "completion": "b"}) + "\n") * 8)
    run(tmp_path, algorithm={"name": "sft"}, task={"name": "jsonl", "path": str(data)}, reward=None,
        rollout={"engine": "dataset", "prompts": 4, "completions": 1, "max_tokens": 6})  # fmt: skip
    with pytest.raises(SystemExit, match="has no rewards"):
        execute("read_rollouts.py", str(tmp_path / "run"))
