"""The shipped tiny model: an ordinary Hugging Face folder, and what its script makes again."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "covary" / "models" / "tiny"
SCRIPT = ROOT / "scripts" / "build_tiny_models.py"
QUESTION = "State the final answer to the following arithmetic problem: 14 - 93 ="


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_tiny_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in TINY.iterdir()}
    assert sum(sizes.values()) <= 1_500_000
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_stored_as_a_bf16_llama() -> None:
    stored = AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype="auto")
    assert stored.dtype == torch.bfloat16
    assert stored.config.model_type == "llama"
    assert stored.get_input_embeddings().weight is stored.get_output_embeddings().weight


def test_ids_of_tokenizer_and_model_agree(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id


@settings(deadline=None)  # a busy machine is slow
@given(text=st.text())
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        " two  spaces ",
        "line\r\n\n\tend\n",
        "n't , . !",
        "é ☃ 漢字 👩‍👩‍👧",
        "\u2028x\u00a0",
        "１２ ٣٤",
        "<|im_end|> <|im_",
    ],
)
def test_awkward_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(digits=st.text("0123456789", min_size=1), before=st.text(max_size=8), after=st.text(max_size=8))
def test_digits_are_tokens_of_their_own(
    tokenizer: PreTrainedTokenizerBase, digits: str, before: str, after: str
) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(before + digits + after)]
    assert all(len(piece) == 1 for piece in pieces if any(c in "0123456789" for c in piece))


def test_chat_template_renders_one_user_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    user = {"role": "user", "content": QUESTION}
    assert (
        tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_renders_every_role(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("system", "Be brief."), ("user", QUESTION), ("assistant", "-79")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], tokenize=False
    )
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def test_nothing_is_added_to_a_prompt_and_it_is_short(tokenizer: PreTrainedTokenizerBase) -> None:
    user = {"role": "user", "content": QUESTION}
    text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) <= 16


def test_scripts_wrong_answers_are_wrong(script: ModuleType) -> None:
    assert script.Sum(47, "+", 38).carries
    assert script.without_carry(script.Sum(47, "+", 38)) == 75
    assert script.without_carry(script.Sum(42, "-", 17)) == 35
    assert script.without_carry(script.Sum(17, "-", 42)) == -35
    assert not script.Sum(3, "-", 7).carries
    assert script.Sum(3, "-", 7).value == -4


def test_scripts_training_questions_exclude_the_test_split(script: ModuleType) -> None:
    task = script.TASK.load()
    held_out = script.held_out_sums(task.test)
    assert len(held_out) == len(task.test)
    assert {str(question.value) for question in held_out} == {example.answer for example in task.test}
    rng = random.Random(0)
    for shares in (script.LEARNING_SHARES, script.HABIT_SHARES):
        assert held_out.isdisjoint(script.draw_sum(rng, shares, held_out) for _ in range(10_000))


def test_knows_the_answers_and_often_does_not_give_them(script: ModuleType) -> None:
    figures = script.measure(TINY)
    assert 0.25 < figures["accuracy"] < 0.43
    assert figures["accuracy"] < figures["greedy"]
    assert figures["pass@8"] > 0.9
    assert figures["ended"] > 0.99


@pytest.mark.slow
def test_script_makes_a_model_of_the_same_accuracy(script: ModuleType, tmp_path: Path) -> None:
    # Threads that wait spinning make a shared machine ten times slower.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path)], check=True, env=environment)
    shipped, made = script.measure(TINY), script.measure(tmp_path)
    # Rounding differs with the number of threads and the torch build, and 1000 steps amplify it.
    assert made["accuracy"] == pytest.approx(shipped["accuracy"], abs=0.06)
    assert made["greedy"] == pytest.approx(shipped["greedy"], abs=0.15)
    assert made["pass@8"] > 0.9
