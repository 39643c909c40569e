"""Agreement of two rewards, and the script that compares a judge with `math`."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from covary.rewards import Graded
from covary.rewards.agreement import agreement
from tests.rewards.test_server import saying, serving

SCRIPT = Path(__file__).parents[2] / "scripts" / "judge_agreement.py"


def graded(*values: float | None) -> list[Graded]:
    return [Graded(value) for value in values]


def test_counts_share_and_kappa():
    found = agreement(graded(1, 1, 1, 0, 0, 0, None, 1, None), graded(1, 1, 0, 1, 0, 0.5, 1, None, None))
    assert (found.both_right, found.both_wrong, found.only_first, found.only_second) == (2, 2, 1, 1)
    assert (found.first_unscorable, found.second_unscorable) == (2, 1)
    assert found.disagreements == (2, 3)
    assert found.share == pytest.approx(4 / 6)
    assert found.kappa == pytest.approx((4 / 6 - 0.5) / 0.5)


def test_where_nothing_can_be_said():
    assert math.isnan(agreement(graded(1, 1), graded(1, 1)).kappa)  # always right, both: chance would do as well
    assert math.isnan(agreement(graded(None), graded(1)).share)
    with pytest.raises(ValueError, match="shorter"):
        agreement(graded(1), graded())


def test_the_script_compares_a_judge_with_math(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    rows = [("5", "\\boxed{5}"), ("6", "\\boxed{5}"), ("7", "7"), (None, "x"), ("8", "8")]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(
        json.dumps({"id": str(i), "prompt": "q", "answer": answer, "completion": text}) + "\n"
        for i, (answer, text) in enumerate(rows)
    ))  # fmt: skip
    out = tmp_path / "out.json"

    def judge(body: dict[str, Any], number: int) -> Any:
        return saying("Maybe" if "\n8\n" in body["messages"][0]["content"] else "Correct")

    with serving(judge) as (url, _):
        recipe = tmp_path / "r.yaml"
        recipe.write_text(f"reward: {{judge: {{model: j, server: {{url: '{url}'}}}}}}")
        monkeypatch.setattr(sys, "argv", ["judge_agreement.py", str(recipe), str(samples), "--json", str(out)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert (figures["both_right"], figures["only_first"], figures["first_unscorable"]) == (2, 1, 1)
    assert "agreement 0.667 of 3" in printed
    assert "  1: judge 1, math 0: answer '6', completion '\\\\boxed{5}'" in printed
    assert "no verdict: 'Maybe'" in printed
    recipe.write_text("reward: math")
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "takes a judge here" in capsys.readouterr().err
