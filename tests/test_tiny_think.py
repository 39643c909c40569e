"""The shipped tiny model that reasons in tags: an ordinary small folder, which knows both prompts and is often wrong."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covary.prompts import load_template

ROOT = Path(__file__).resolve().parent.parent
THINK = ROOT / "covary" / "models" / "tiny_think"
SCRIPT = ROOT / "scripts" / "build_tiny_reasoner.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_tiny_reasoner", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
    return module


def test_folder_is_small_and_stored_in_bf16() -> None:
    assert sum(path.stat().st_size for path in THINK.iterdir()) <= 1_000_000
    model = AutoModelForCausalLM.from_pretrained(THINK, local_files_only=True, dtype="auto")
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(THINK, local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id != tokenizer.pad_token_id


def test_text_round_trips_and_prompts_are_short(script: ModuleType) -> None:
    tokenizer = AutoTokenizer.from_pretrained(THINK, local_files_only=True)
    for text in (" two  spaces ", "line\r\n\tend\n", "é ☃ 漢字", "70+15=85</think>", "<answer>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    group = script.prompt_group(script.example(script.Sum(47, "+", 38)), load_template("think"), tokenizer)
    assert all(len(ids) < 30 for ids in group.contexts.values())


def test_traces_and_their_slips(script: ModuleType) -> None:
    assert script.trace(script.parts(script.Sum(47, "+", 38))) == "70+15=85"
    assert script.trace(script.parts(script.Sum(17, "-", 42))) == "-30+5=-25"
    assert script.trace(script.parts(script.Sum(47, "-", 38))) == "10-1=9"
    rng = random.Random(0)
    for _ in range(500):
        right = script.parts(script.draw_sum(rng, script.HABIT_SHARES, frozenset()))
        wrong = script.slip(right, rng)
        assert wrong[2] != right[2]
        assert sum(a != b for a, b in zip(wrong[:2], right[:2], strict=True)) <= 1


def test_knows_both_prompts_and_is_often_wrong(script: ModuleType) -> None:
    figures = script.measure(THINK, samples=4)
    assert 0.2 < figures["accuracy"] < 0.5
    assert figures["posterior"] > figures["accuracy"] + 0.2
    assert figures["pass@4"] > figures["accuracy"] + 0.2
    assert figures["ended"] > 0.98


@pytest.mark.slow
def test_script_makes_a_model_of_the_same_accuracy(script: ModuleType, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path)], check=True, env=environment)
    shipped, made = script.measure(THINK), script.measure(tmp_path)
    # Rounding differs with the number of threads and the torch build, and 1000 steps amplify it.
    assert made["accuracy"] == pytest.approx(shipped["accuracy"], abs=0.06)
    assert made["posterior"] == pytest.approx(shipped["posterior"], abs=0.06)
