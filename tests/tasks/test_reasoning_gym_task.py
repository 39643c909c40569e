"""The reasoning_gym task: held-out questions, mixtures, parameters, generators that fail or hang."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from typing import Any, get_args

import pytest
from reasoning_gym.arithmetic.chain_sum import ChainSumDataset
from reasoning_gym.arithmetic.gcd import GCDDataset
from reasoning_gym.factory import DATASETS

import covary.tasks.reasoning_gym as module
from covary.rewards import EXTRACTORS, Grader
from covary.tasks import TASKS, Benchmark, Hub, Jsonl, Parquet, ReasoningGym, Task
from covary.tasks.task import ExtractorName
from covary.types import UserError

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def questions(task: Task) -> tuple[list[str], list[str]]:
    return [e.columns["question"] for e in task.train], [e.columns["question"] for e in task.test]


def test_families_and_extractors_agree_with_the_rest_of_the_library() -> None:
    assert {
        "reasoning_gym": ReasoningGym,
        "jsonl": Jsonl,
        "parquet": Parquet,
        "hub": Hub,
        "benchmark": Benchmark,
    } == TASKS
    assert set(get_args(ExtractorName)) == set(EXTRACTORS)


def test_the_quickstart_task() -> None:
    started = time.perf_counter()
    task = ReasoningGym({"chain_sum": TWO_DIGITS}, train=2000, test=200).load()
    assert time.perf_counter() - started < 2
    train, test = questions(task)
    assert (len(train), len(test), len(set(test))) == (2000, 200, 200)
    assert not set(train) & set(test)
    assert len({e.id for e in (*task.train, *task.test)}) == 2200
    assert (task.name, task.grader) == ("chain_sum", Grader("reasoning_gym", "none"))
    dropped = next(int(note.split()[2]) for note in task.notes if "dropped" in note)
    assert dropped > 100  # half the questions have one digit, and test holds about half of those


def test_rows() -> None:
    task = ReasoningGym(
        {"chain_sum": TWO_DIGITS},
        train=3,
        test=2,
        instruction="Number only.",
        examples=[{"question": "1 + 2 =", "answer": "3"}],
        system="Be brief.",
        extract="last_number",
    ).load()
    for split, examples in (("train", task.train), ("test", task.test)):
        for example in examples:
            question = example.columns["question"]
            assert example.prompt == [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Number only.\n1 + 2 ="},
                {"role": "assistant", "content": "3"},
                {"role": "user", "content": f"Number only.\n{question}"},
            ]
            assert example.id.startswith(f"chain_sum/{split}/")
            expression = example.columns["metadata"]["expression"]
            assert expression in question
            assert example.answer == str(
                sum(int(term) for term in expression.replace("- ", "-").split() if term != "+")
            )
            assert example.columns["task"] == "chain_sum"
            assert example.columns["parameters"] == TWO_DIGITS
            assert pickle.loads(pickle.dumps(example)) == example
    assert task.grader == Grader("reasoning_gym", "last_number")


def test_bare_prompt_and_default_parameters() -> None:
    example = ReasoningGym({"gcd": None}, train=1, test=1).load().train[0]
    assert example.prompt == [{"role": "user", "content": example.columns["question"]}]
    assert "parameters" not in example.columns


@pytest.mark.parametrize(
    ("name", "parameters", "train", "test"),
    [
        ("coin_flip", {}, 400, 100),  # 260 distinct questions in all
        ("gcd", {"max_value": 20}, 400, 200),
        ("chain_sum", ONE_DIGIT, 400, 100),  # 200 distinct
        ("spell_backward", {}, 200, 100),
        ("list_functions", {}, 100, 50),  # tables of the dataset's size
        ("acre", {}, 600, 100),  # not indexed by seed + index
        ("gsm_symbolic", {}, 40, 20),
        ("basic_arithmetic", {}, 200, 100),
        ("syllogism", {}, 200, 100),
    ],
)
def test_splits_share_no_question(name: str, parameters: dict[str, Any], train: int, test: int) -> None:
    task = ReasoningGym({name: parameters}, train=train, test=test).load()
    train_questions, test_questions = questions(task)
    assert (len(train_questions), len(test_questions)) == (train, test)
    assert len(set(test_questions)) == test
    assert not set(train_questions) & set(test_questions)
    repeats = [note for note in task.notes if "distinct" in note]
    assert bool(repeats) == (len(set(train_questions)) < train)
    assert all(f"hold {len(set(train_questions))} distinct questions" in note for note in repeats)


@pytest.mark.parametrize(
    ("name", "parameters", "train", "test", "found"),
    [
        ("chain_sum", ONE_DIGIT, 2000, 200, range(195, 201)),
        ("coin_flip", {}, 2000, 200, range(255, 261)),
        ("count_bits", {"max_n": 16}, 2000, 200, range(16, 17)),
    ],
)
def test_too_few_distinct_questions(name: str, parameters: dict[str, Any], train: int, test: int, found: range) -> None:
    with pytest.raises(UserError, match=rf"'{name}': found only \d+ distinct questions") as caught:
        ReasoningGym({name: parameters}, train=train, test=test).load()
    message = str(caught.value)
    assert int(message.split("only ")[1].split()[0]) in found
    assert f"test: {test} and train: {train}" in message


def test_seed_decides_the_rows() -> None:
    make = lambda seed: ReasoningGym({"gcd": {}, "lcm": {"weight": 2}}, train=60, test=20, seed=seed).load()  # noqa: E731
    assert make(0) == make(0)
    for one, other in zip(questions(make(0)), questions(make(1)), strict=True):
        # Near seeds would repeat each other's items, one place along.
        assert len(set(one) & set(other)) < len(one) / 4


def test_test_rows_do_not_depend_on_the_number_of_training_rows() -> None:
    few, many = (ReasoningGym({"gcd": {}}, train=train, test=20).load() for train in (10, 600))
    assert few.test == many.test
    assert {e.id for e in few.train} <= {e.id for e in many.train}


def test_long_draws_cross_chunks_without_repeating_them() -> None:
    task = ReasoningGym({"chain_sum": {"min_digits": 6, "max_digits": 6}}, train=1700, test=0).load()
    train, _ = questions(task)
    assert len(set(train)) == 1700
    assert {e.id for e in task.train} == {f"chain_sum/train/{i}" for i in range(1700)}


def test_mixture_by_weight() -> None:
    task = ReasoningGym(
        {"gcd": {"weight": 2}, "chain_sum": {"weight": 1, "max_digits": 3}, "lcm": None}, train=101, test=40
    ).load()
    assert task.name == "reasoning_gym"
    assert Counter(e.columns["task"] for e in task.train) == {"gcd": 51, "chain_sum": 25, "lcm": 25}
    assert Counter(e.columns["task"] for e in task.test) == {"gcd": 20, "chain_sum": 10, "lcm": 10}
    assert len({e.columns["task"] for e in task.train[:20]}) == 3  # mixed, not one after the other
    chain = next(e for e in task.train if e.columns["task"] == "chain_sum")
    assert chain.columns["parameters"] == {"max_digits": 3}


def test_shares_add_up() -> None:
    assert module._shares(10, [1, 1, 1]) == [4, 3, 3]
    assert module._shares(7, [0.1, 0.2, 0.7]) == [1, 1, 5]
    assert module._shares(0, [1, 2]) == [0, 0]


@pytest.mark.parametrize("name", ["propositional_logic", "graph_color", "rush_hour"])
def test_tasks_without_reference_answer_keep_their_rows(name: str) -> None:
    task = ReasoningGym({name: {}}, train=5, test=5).load()
    assert [e.answer for e in task.train] == [None] * 5


def test_yaml_lists_stand_for_tuples() -> None:
    task = ReasoningGym({"simple_equations": {"operators": ["+"], "operators_weights": [1]}}, train=20, test=5).load()
    assert all("*" not in e.columns["question"].split("equation")[-1] for e in task.train)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": {}}, "tasks: name at least one"),
        ({"tasks": {"chain_sums": {}}}, "tasks: 'chain_sums' is not a Reasoning Gym task; nearest: chain_sum"),
        ({"tasks": {"composite": {}}}, "'composite' is not a Reasoning Gym task"),
        (
            {"tasks": {"chain_sum": {"max_digit": 2}}},
            "tasks.chain_sum: unknown parameter 'max_digit'; valid: min_terms, max_terms, min_digits, max_digits, "
            "allow_negation, weight",
        ),
        ({"tasks": {"chain_sum": {"seed": 2}}}, "tasks.chain_sum.seed: not taken here"),
        ({"tasks": {"chain_sum": {"size": 2}}}, "tasks.chain_sum.size: not taken here"),
        ({"tasks": {"chain_sum": {"max_digits": "2"}}}, "tasks.chain_sum.max_digits: takes int, not '2'"),
        ({"tasks": {"chain_sum": {"max_digits": True}}}, "tasks.chain_sum.max_digits: takes int, not True"),
        (
            {"tasks": {"chain_sum": {"min_digits": 3, "max_digits": 2}}},
            "tasks.chain_sum: max_digits must be >= min_digits",
        ),
        ({"tasks": {"simple_equations": {"operators": 3}}}, "tasks.simple_equations: "),
        ({"tasks": {"gcd": {"weight": 0}}}, "tasks.gcd.weight: takes a number above 0, not 0"),
        ({"tasks": {"gcd": {"weight": True}}}, "tasks.gcd.weight: takes a number above 0"),
        ({"tasks": {"gcd": {"weight": "2"}}}, "tasks.gcd.weight: takes a number above 0"),
        ({"tasks": {"gcd": {"weight": float("nan")}}}, "tasks.gcd.weight: takes a number above 0"),
        ({"tasks": {"gcd": {}}, "train": -1}, "train: a number of rows is 0 or more, not -1"),
        ({"tasks": {"gcd": {}}, "train": 0, "test": 0}, "nothing to draw"),
        ({"tasks": {"gcd": {}}, "examples": [{"q": "1", "a": "2"}]}, "examples, item 1: needs the keys"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ReasoningGym(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_task_accepts_its_own_defaults() -> None:
    for name, (_, config_class) in DATASETS.items():
        if name == "composite":
            continue
        plain = {
            f.name: f.default
            for f in dataclasses.fields(config_class)
            if f.name not in ("seed", "size") and type(f.default) in (int, float, bool, str)
        }
        assert ReasoningGym({name: plain}).tasks == {name: plain}


def test_draws_that_fail_are_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = ChainSumDataset.__getitem__

    def unreliable(self: ChainSumDataset, idx: int) -> dict[str, Any]:
        if idx % 3 == 0:
            raise RuntimeError("no luck")
        return draw(self, idx)

    monkeypatch.setattr(ChainSumDataset, "__getitem__", unreliable)
    task = ReasoningGym({"chain_sum": {"max_digits": 6}}, train=20, test=10).load()
    assert (len(task.train), len(task.test)) == (20, 10)
    assert "chain_sum: skipped 15 draws that its generator failed on" in task.notes


def test_a_task_that_keeps_failing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ChainSumDataset, idx: int) -> dict[str, Any]:
        raise RuntimeError("no luck")

    monkeypatch.setattr(ChainSumDataset, "__getitem__", broken)
    with pytest.raises(UserError, match=r"'chain_sum': 100 draws in a row failed, .* RuntimeError: no luck"):
        ReasoningGym({"chain_sum": {}}, train=20, test=10).load()


def test_missing_answers_are_failures_where_the_scorer_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = GCDDataset.__getitem__
    monkeypatch.setattr(GCDDataset, "__getitem__", lambda self, idx: draw(self, idx) | {"answer": None})
    with pytest.raises(UserError, match=r"'gcd': 100 draws in a row failed, .* no answer"):
        ReasoningGym({"gcd": {}}, train=20, test=10).load()


def test_a_draw_that_hangs_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(self: ChainSumDataset, idx: int) -> dict[str, Any]:
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # as retry loops of real generators have it
                continue

    monkeypatch.setattr(ChainSumDataset, "__getitem__", endless)
    monkeypatch.setattr(module, "_DRAW_SECONDS", 0.2)
    with pytest.raises(UserError, match="'chain_sum': a single question took longer than"):
        ReasoningGym({"chain_sum": {}}, train=20, test=10).load()


def test_tasks_that_follow_the_hash_seed_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from covary.tasks import ReasoningGym\n"
        f"for name in {sorted(module.HASH_ORDERED)}:\n"
        "    print([(e.columns['question'], e.answer) for e in ReasoningGym({name: {}}, train=8, test=0).load().train])\n"
    )
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    )
    assert [one != two for one, two in zip(first, second, strict=True)] == [True] * 4
    for seed, warned in (("0", False), ("random", True)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        task = ReasoningGym({"ransom_note": {}}, train=2, test=1).load()
        assert any("PYTHONHASHSEED=0" in note for note in task.notes) == warned


def test_no_torch() -> None:
    code = "import sys, covary.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
