"""What a run leaves behind can always be written and read, whatever the model said."""

from __future__ import annotations

import json

from covary.log import RunLog, Screen, step_line, summary
from covary.types import Completion, Example, Group


def test_one_bad_character_loses_nothing(tmp_path):
    log = RunLog(tmp_path)
    texts = ["x\ud835y", "line\u2028break", "nul\x00 \x1b[31m", "fine"]
    rows = [Completion([1], text, "eos") for text in texts]
    log.rollouts(3, [Group(Example("a", "p"), {"prompt": [1]}, rows, [1.0, None, 0.0, 1.0])])
    lines = (tmp_path / "rollouts" / "step-000003.jsonl").read_text().split("\n")[:-1]
    read = [json.loads(line) for line in lines]
    assert [row["completion"] for row in read] == texts
    assert [row["reward"] for row in read] == [1.0, None, 0.0, 1.0]


def test_metrics_are_json_and_positions_rewind(tmp_path):
    log = RunLog(tmp_path)
    log.metrics({"step": 0, "a": float("nan"), "b": float("inf")})
    position = log.position()
    log.metrics({"step": 1, "a": 2.0})
    log.rollouts(1, [])
    log.rollouts(2, [])
    rows = [json.loads(line) for line in log.metrics_path.read_text().splitlines()]
    assert rows == [{"step": 0, "a": None, "b": None}, {"step": 1, "a": 2.0}]
    log.rewind(position, 1)
    assert len(log.metrics_path.read_text().splitlines()) == 1
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step-000001.jsonl"]


def test_the_screen_shows_control_characters_and_markup_as_text(capsys):
    Screen(quiet=True).say("a\x1b[31m\r\n[bold]b[/bold] \ud835 é")
    out = capsys.readouterr().out
    assert out == "a\\x1b[31m\\r\\n[bold]b[/bold] \\ud835 é\n"


def test_lines():
    before = {"step": 0, "eval/t/accuracy": 0.25, "eval/t/reward": 0.3, "eval/t/pass@8": float("nan")}
    after = {
        "step": 5,
        "eval/t/accuracy": 0.5,
        "eval/t/reward": 0.6,
        "eval/t/pass@8": 1.0,
        "loss": 0.1,
        "time/rollout": 2.0,
    }
    assert summary(before, after) == ["eval/t/accuracy: 0.250 -> 0.500", "eval/t/pass@8: nan -> 1.000"]
    assert step_line(after, 9) == "step 5/9  loss 0.1  eval/t/accuracy 0.500  eval/t/pass@8 1.000  2.0 s"
