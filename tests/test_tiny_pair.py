"""The pair of tiny models for distillation: two tokenizers, a right teacher and a student of mixed habits."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from covary.config import load_recipe, validate
from covary.models.teacher import read_teacher
from covary.prompts import load_template
from covary.settings import Teacher
from tests.test_tiny_model import ROOT, script  # noqa: F401 (a fixture)

MODELS = ROOT / "covary" / "models"
PAIR = ("tiny_student", "tiny_teacher")
BYTES = "tiny_teacher_bytes"  # a teacher with the student's tokenizer


def test_folders_are_small_and_complete() -> None:
    size = 0
    for name in (*PAIR, BYTES):
        files = {path.name: path.stat().st_size for path in (MODELS / name).iterdir()}
        size += sum(files.values())
        assert set(files) == {
            "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json",
        }  # fmt: skip
        stored = AutoModelForCausalLM.from_pretrained(MODELS / name, local_files_only=True, dtype="auto")
        assert str(stored.dtype) == "torch.bfloat16"
    assert size <= 1_500_000


@pytest.mark.parametrize("name", PAIR)
@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=20))
def test_any_text_round_trips(name: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_two_share_no_tokenizer_no_markup_and_no_end() -> None:
    student, teacher = (AutoTokenizer.from_pretrained(MODELS / name, local_files_only=True) for name in PAIR)
    text = "7+8=15, 4+3+1=8, so 85"
    assert len(student.encode(text)) == len(text) > len(teacher.encode(text))
    reading = read_teacher(Teacher("tiny_teacher"), student, frozenset({student.eos_token_id}), load_template("chat"))
    assert not reading.same_tokens
    assert teacher.decode([reading.end]) == "<|im_end|>" != student.eos_token == "<|end|>"


def test_the_scripts_answers_are_what_they_are_said_to_be(script: ModuleType) -> None:  # noqa: F811
    assert script.worked(47, 38) == "7+8=15, 4+3+1=8, so 85"
    assert script.worked(3, 4) == "3+4=7, 0+0=0, so 7"
    assert script.worked(99, 99) == "9+9=18, 9+9+1=19, so 198"
    rng = random.Random(0)
    for a in range(0, 100, 7):
        for b in range(0, 100, 3):
            slip = script.slipped(a, b, rng)
            assert slip.startswith("Units ")
            assert int(slip.rpartition(" ")[2]) in (a + b - 1, a + b + 1)
            assert int(script.guessed(a, b, rng).rpartition(" ")[2]) != a + b
            assert int(script.worked(a, b).rpartition(" ")[2]) == a + b


def test_questions_of_the_test_split_are_in_no_training(script: ModuleType) -> None:  # noqa: F811
    recipe = ROOT / "recipes" / "distill_quickstart.yaml"
    config = validate(load_recipe(recipe), where=str(recipe))
    assert config.task == script.PAIR_TASK
    asked = {example.prompt[-1]["content"] for example in config.task.load().test}
    batches = script.PairBatches(script.word_tokenizer(), script.teacher_answer, seed=1)
    assert batches.held_out == asked
    drawn: list[str] = []
    batches.prompt = lambda text: drawn.append(text) or [0]
    for _ in range(2000):
        batches._row()
    assert asked.isdisjoint(drawn)
    assert all(text.startswith("Calculate ") for text in asked)


def test_a_right_teacher_and_a_student_that_could_be(script: ModuleType) -> None:  # noqa: F811
    student, teacher = (script.measure(MODELS / name, samples=4, task=script.PAIR_TASK) for name in PAIR)
    assert teacher["accuracy"] > 0.9
    assert 0.2 < student["accuracy"] < 0.45
    assert student["pass@4"] > student["accuracy"] + 0.2
    assert student["ended"] > 0.98


def test_the_teacher_with_the_students_tokenizer_is_right(script: ModuleType) -> None:  # noqa: F811
    student, teacher = (
        AutoTokenizer.from_pretrained(MODELS / name, local_files_only=True) for name in (PAIR[0], BYTES)
    )
    reading = read_teacher(Teacher(BYTES), student, frozenset({student.eos_token_id}), load_template("chat"))
    assert reading.same_tokens
    assert reading.relabelled is None
    assert teacher.get_vocab() == student.get_vocab()
    figures = script.measure(MODELS / BYTES, samples=2, task=script.PAIR_TASK)
    assert figures["accuracy"] > 0.9


def test_the_script_makes_it_from_the_student(script: ModuleType, tmp_path: Path) -> None:  # noqa: F811
    script.build_bytes_teacher(tmp_path, student=MODELS / PAIR[0], steps=2)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (tmp_path / file).read_text() == (MODELS / BYTES / file).read_text(), file


def test_their_cards_name_their_numbers() -> None:
    for name in (*PAIR, BYTES):
        card = (MODELS / name / "README.md").read_text()
        model = AutoModelForCausalLM.from_pretrained(MODELS / name, local_files_only=True)
        assert f"{sum(p.numel() for p in model.parameters()):,}".replace(",", " ") in card
        assert f"python scripts/build_tiny_models.py {name}" in card


@pytest.mark.parametrize("name", PAIR)
def test_the_script_makes_these_tokenizers_and_shapes(script: ModuleType, name: str, tmp_path: Path) -> None:  # noqa: F811
    script.build_pair_model(name, tmp_path, steps=2)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (tmp_path / file).read_text() == (MODELS / name / file).read_text(), file


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIR)
def test_the_script_makes_models_of_the_same_accuracy(script: ModuleType, name: str, tmp_path: Path) -> None:  # noqa: F811
    script.build_pair_model(name, tmp_path)
    shipped, made = (script.measure(folder, task=script.PAIR_TASK) for folder in (MODELS / name, tmp_path))
    # Rounding differs with the number of threads and the torch build, and a thousand steps amplify it.
    assert made["accuracy"] == pytest.approx(shipped["accuracy"], abs=0.1)


@pytest.mark.slow
def test_the_quickstart_raises_the_students_accuracy_by_a_fifth(tmp_path: Path) -> None:
    import covary

    done = covary.train(ROOT / "recipes" / "distill_quickstart.yaml", out=tmp_path / "run", quiet=True)
    from tests.loop.mini import metrics

    name = "eval/basic_arithmetic/accuracy"
    assert done.metrics[name] >= metrics(tmp_path / "run")[0][name] + 0.2
