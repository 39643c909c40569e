"""Summarisation in small: its rule, its data, and the chain from samples to the four measures, with hardly any training."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest

from covary.jsonlines import read_jsonl

SCRIPTS = Path(__file__).parent.parent / "scripts"
POST = "A b C d E f g h i"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(SCRIPTS)
    import build_tiny_summariser as builder  # pyright: ignore[reportMissingImports]
    import record_summarisation as recorder  # pyright: ignore[reportMissingImports]

    few = {"DEMONSTRATIONS": 64, "COMPARISONS": 64, "TRAINING_POSTS": 8, "TEST_POSTS": 6, "TEST_COMPARISONS": 6}
    for name, value in {**few, "SFT_STEPS": 3, "REWARD_STEPS": 3, "BATCH": 16}.items():
        monkeypatch.setattr(builder, name, value)
    monkeypatch.setattr(recorder, "PROMPTS", 4)
    monkeypatch.setattr(recorder, "EPOCHS", 1)
    return builder, recorder


def test_quality_is_facts_found_less_other_words(scripts: tuple[ModuleType, ModuleType]) -> None:
    quality = scripts[0].quality
    assert [quality(POST, text) for text in ("A C E", "E A C", "A", "", "A A", "A b", "A F", "b d f")] == pytest.approx(
        [1, 1, 1 / 3, 0, 0, 0, 0, -1]
    )


def test_people_prefer_the_better_summary_most_of_the_time(scripts: tuple[ModuleType, ModuleType]) -> None:
    builder = scripts[0]
    rng = random.Random(0)
    margins = [builder.quality(POST, chosen) - builder.quality(POST, rejected)
               for chosen, rejected in (builder.compare(POST, rng) for _ in range(400))]  # fmt: skip
    told = [margin > 0 for margin in margins if margin]
    assert 0.8 < sum(told) / len(told) < 1


def test_the_whole_chain_runs_and_every_policy_gets_four_measures(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    builder, recorder = scripts
    found = recorder.one_seed(0, tmp_path / "seed")
    rows = [row for _, row in read_jsonl(tmp_path / "seed" / "samples.jsonl")]
    assert [len(row["completion"]) for row in rows] == [builder.SAMPLES] * 8
    policies = ["sft", *(f"{method} {rate:g}" for rate in recorder.RATES for method in recorder.METHODS)]
    for name in policies:
        assert set(found[name]) == {*recorder.MEASURES, "quality"}
    assert found["sft"]["preference"] == 0  # ties
    assert found["gvpo 0.0003"]["preference"] > 0
    assert found["gvpo 0.0003"] != found["dpo 0.0003"]
    lines = recorder.table([found, found])
    assert lines[-1].startswith("| GVPO less DPO, lr 0.0003 | ")
    assert [line.count("|") for line in lines] == [7] * len(lines)
    assert f"{found['sft']['reward']:.3f}" in next(line for line in lines if line.startswith("| SFT "))
