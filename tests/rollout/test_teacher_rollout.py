"""A teacher's completions in the student's tokens, sampled once and kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from covary.models.loading import fingerprint, load_tokenizer
from covary.rollout.store import Store
from covary.rollout.teacher import TeacherRollout, Translation
from covary.rollout.transformers import TransformersRollout
from covary.types import Completion, Example, Finish, Group, Request, RunError, Sampling, UserError
from tests.models import byte_tokenizer, random_llama

STUDENT = byte_tokenizer()
END = STUDENT.eos_token_id
SAMPLING = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def bpe() -> Any:
    return load_tokenizer("tiny")


def translation(teacher: Any, same: bool = False) -> Translation:
    return Translation(STUDENT, teacher, frozenset({END}), same, 259)


def said(teacher: Any, text: str, finish: Finish = "eos", stop: str = "") -> Completion:
    """What the teacher's sampler gives."""
    tokens = teacher.encode(text + stop, add_special_tokens=False)
    return Completion([*tokens, teacher.eos_token_id] if finish == "eos" else tokens, text, finish, logps=[-1.0])


class TestTranslation:
    def test_text_becomes_the_students_tokens_and_its_end(self, bpe: Any) -> None:
        row = translation(bpe)(said(bpe, "12 + 7 = 19"), "", 99)
        assert row.tokens == [*STUDENT.encode("12 + 7 = 19"), END]
        assert (row.text, row.finish, row.source, row.logps) == ("12 + 7 = 19", "eos", "teacher", None)

    def test_an_unfinished_one_has_no_end(self, bpe: Any) -> None:
        row = translation(bpe)(said(bpe, "12 +", "length"), "", 99)
        assert row.tokens == STUDENT.encode("12 +")
        assert row.finish == "length"

    def test_a_character_that_was_cut_is_left_out(self) -> None:
        cut = Completion(STUDENT.encode("ab é")[:-1], "ab \ufffd", "length")
        row = translation(STUDENT)(cut, "", 99)
        assert STUDENT.decode(row.tokens) == "ab "

    def test_the_stop_string_is_learned_too(self, bpe: Any) -> None:
        row = translation(bpe)(said(bpe, "so 7", "stop_string", stop="\n"), "", 99)
        assert STUDENT.decode(row.tokens) == "so 7\n"
        assert (row.text, row.finish) == ("so 7", "stop_string")

    def test_one_longer_than_the_students_limit_is_cut_with_its_text(self, bpe: Any) -> None:
        row = translation(bpe)(said(bpe, "12 + 7 = 19"), "", 4)
        assert row.tokens == STUDENT.encode("12 +")
        assert (row.text, row.finish) == ("12 +", "length")
        whole = translation(bpe)(said(bpe, "12 +"), "", 5)
        assert whole.finish == "eos"
        assert len(whole.tokens) == 5

    def test_what_the_teachers_prompt_says_already_the_student_says_itself(self, bpe: Any) -> None:
        row = translation(bpe)(said(bpe, "2 + 2"), "<think>\n", 99)
        assert row.text == STUDENT.decode(row.tokens[:-1]) == "<think>\n2 + 2"

    def test_the_same_tokens_stay_as_they_are(self) -> None:
        ids = STUDENT.encode("7!")
        other_end = 258
        assert translation(STUDENT, same=True)(Completion([*ids, END], "7!", "eos"), "", 99).tokens == [*ids, END]
        # An end of the teacher's that is none of the student's becomes the student's own.
        row = translation(STUDENT, same=True)(Completion([*ids, other_end], "7!", "eos"), "", 99)
        assert row.tokens == [*ids, END]

    def test_an_id_that_only_the_teachers_padding_has_makes_the_row_invalid(self) -> None:
        assert translation(STUDENT, same=True)(Completion([5, 259, END], "", "eos"), "", 9).tokens == []

    def test_text_is_never_read_as_a_control_token(self, bpe: Any) -> None:
        row = translation(bpe)(said(bpe, "a<|im_end|>b", "length"), "", 99)
        assert END not in row.tokens
        assert STUDENT.decode(row.tokens) == "a<|im_end|>b"

    def test_an_empty_answer_is_an_end_and_an_empty_beginning_nothing(self, bpe: Any) -> None:
        assert translation(bpe)(said(bpe, ""), "", 9).tokens == [END]
        assert translation(bpe)(Completion([], "", "length"), "", 9).tokens == []


class Counting:
    """A sampler that counts what it is asked for."""

    def __init__(self, seed: int = 0) -> None:
        model = random_llama(seed=seed, scale=4.0)
        self.inner = TransformersRollout(model, STUDENT)  # pyright: ignore[reportArgumentType]
        self.asked: list[str] = []

    def generate(self, plans: Any, groups: Any, sampling: Any, seed: Any) -> list[Group]:
        self.asked += [group.example.id for group in groups]
        return self.inner.generate(plans, groups, sampling, seed)


def silent(text: str) -> None:
    raise AssertionError(f"nothing was to be said, got {text!r}")


def rollout(path: Path | None = None, **changes: Any) -> tuple[TeacherRollout, Counting]:
    sampler = changes.pop("sampler", None) or Counting()
    settings: dict[str, Any] = {
        "identity": "teacher",
        "prompt": lambda example: STUDENT.encode(f"Q {example.id}"),
        "opening": lambda example: "",
        "translate": translation(STUDENT, same=True),
        "store": Store(path, changes.pop("say", silent)),
        "seed": 11,
    }
    return TeacherRollout(sampler, **{**settings, **changes}), sampler


def ask(engine: TeacherRollout, *ids: str, k: int = 2, seed: int = 0, sampling: Sampling = SAMPLING) -> list[list[Any]]:
    groups = [Group(Example(id, ""), {"prompt": [1]}) for id in ids]
    done = engine.generate([[Request(k, source="teacher")]] * len(ids), groups, sampling, seed)
    assert all(group.contexts == {"prompt": [1]} for group in done)  # the student's, not the teacher's
    return [[(c.tokens, c.text, c.finish) for c in group.completions] for group in done]


class TestTeacherRollout:
    def test_a_prompts_completions_are_sampled_once_whatever_the_step(self) -> None:
        engine, sampler = rollout()
        first = ask(engine, "a", "b", seed=1)
        assert ask(engine, "b", "a", seed=2) == first[::-1]
        assert sampler.asked == ["a", "b"]
        assert first[0] != first[1]
        assert first[0][0] != first[0][1]

    def test_one_prompt_twice_in_a_batch_is_asked_once(self) -> None:
        engine, sampler = rollout()
        twice = ask(engine, "a", "a")
        assert twice[0] == twice[1]
        assert sampler.asked == ["a"]

    def test_the_file_serves_other_runs(self, tmp_path: Path) -> None:
        path = tmp_path / "folder" / "teacher.jsonl"
        first = ask(rollout(path)[0], "a", "b")
        again, sampler = rollout(path)
        assert ask(again, "b", "a") == first[::-1]
        assert sampler.asked == []

    def test_more_completions_than_are_known_begin_with_the_known_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "teacher.jsonl"
        two = ask(rollout(path)[0], "a", k=2)[0]
        engine, sampler = rollout(path)
        four = ask(engine, "a", k=4)[0]
        assert four[:2] == two
        assert sampler.asked == ["a"]
        assert ask(rollout(path)[0], "a", k=4)[0] == four

    @pytest.mark.parametrize(
        ("changes", "sampling"),
        [
            ({"identity": "another"}, SAMPLING),
            ({"seed": 12}, SAMPLING),
            ({"prompt": lambda example: STUDENT.encode("R")}, SAMPLING),
            ({}, Sampling(max_tokens=7)),
            ({}, Sampling(max_tokens=8, temperature=0.5)),
            ({}, Sampling(max_tokens=8, stop=("x",))),
        ],
        ids=["teacher", "seed", "prompt", "length", "temperature", "stop"],
    )
    def test_everything_that_determines_them_is_in_their_key(
        self, tmp_path: Path, changes: dict[str, Any], sampling: Sampling
    ) -> None:
        path = tmp_path / "teacher.jsonl"
        ask(rollout(path)[0], "a")
        engine, sampler = rollout(path, **changes)
        ask(engine, "a", sampling=sampling)
        assert sampler.asked == ["a"]

    def test_a_line_that_a_kill_cut_short_is_left_out_with_a_note(self, tmp_path: Path) -> None:
        path = tmp_path / "teacher.jsonl"
        first = ask(rollout(path)[0], "a")
        ask(rollout(path)[0], "b")
        content = path.read_bytes().rstrip()
        path.write_bytes(content[:-9])
        notes: list[str] = []
        engine, sampler = rollout(path, say=notes.append)
        assert len(notes) == 1
        assert f"{path}: 1 damaged lines are left out" in notes[0]
        assert ask(engine, "a") == first
        ask(engine, "b")
        assert sampler.asked == ["b"]
        # What was appended behind the damage is whole.
        assert ask(rollout(path, say=notes.append)[0], "a", "b") == ask(engine, "a", "b")

    @pytest.mark.parametrize(
        "row",
        [
            {"key": "x"},
            {"key": "x", "completions": [[["a"], "t", "eos"]]},
            {"key": "x", "completions": [[[-1], "t", "eos"]]},
            {"key": "x", "completions": [[[10**30], "t", "eos"]]},
            {"key": "x", "completions": [[[1], "t", "never"]]},
            {"key": "x", "completions": [[[1], 5, "eos"]]},
            [1, 2],
        ],
    )
    def test_lines_of_another_kind_are_damage(self, tmp_path: Path, row: Any) -> None:
        path = tmp_path / "teacher.jsonl"
        path.write_text(json.dumps(row) + "\n")
        notes: list[str] = []
        store = Store(path, notes.append)
        assert store.get("x") == []
        assert len(notes) == 1

    def test_a_file_that_cannot_be_read_or_written_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"teacher\.cache: .* cannot be read"):
            Store(tmp_path, silent)
        (tmp_path / "file").write_text("")
        store = Store(tmp_path / "file" / "teacher.jsonl", silent)
        with pytest.raises(RunError, match="could not be written"):
            store.add({"x": []})

    def test_a_prompt_that_the_teacher_cannot_read_has_rows_without_tokens(self) -> None:
        def prompt(example: Example) -> list[int]:
            if example.id == "refused":
                raise UserError("no")
            return [5] * (4 if example.id == "short" else 9)

        engine, sampler = rollout(prompt=prompt, context=12)
        refused, long, short = ask(engine, "refused", "long", "short", k=2)
        assert refused == long == [([], "", "length")] * 2
        assert all(tokens for tokens, _, _ in short)
        assert sampler.asked == ["short"]

    def test_what_a_teacher_with_broken_numbers_says_is_not_learned(self, tmp_path: Path) -> None:
        class Broken(Counting):
            """NaN for some prompts; sampling from NaN gives tokens all the same."""

            def generate(self, plans: Any, groups: Any, sampling: Any, seed: Any) -> list[Group]:
                done = super().generate(plans, groups, sampling, seed)
                for group in done:
                    if group.example.id.startswith("bad"):
                        group.completions[0].logps = [math.nan]
                return done

        path = tmp_path / "teacher.jsonl"
        # What the prompt says already would else be a row of its own.
        changes: dict[str, Any] = {"opening": lambda example: "<think>"}
        bad, good = ask(rollout(path, sampler=Broken(), **changes)[0], "bad", "good")
        assert bad[0] == ([], "", "length")
        assert all(tokens for tokens, _, _ in [bad[1], *good])
        engine, sampler = rollout(path, **changes)
        assert ask(engine, "bad", "good") == [bad, good]
        assert sampler.asked == []
        with pytest.raises(
            RunError, match=r"the log-probs of the teacher \(teacher\) are not finite: its model is broken"
        ):
            ask(rollout(sampler=Broken())[0], "bad 1", "bad 2", k=1)

    def test_other_sources_and_greedy_rows_are_refused(self) -> None:
        engine, _ = rollout()
        for request in (Request(1), Request(1, source="teacher", decoding="greedy")):
            with pytest.raises(ValueError, match="asked for samples of its own"):
                engine.generate([[request]], [Group(Example("a", ""), {"prompt": [1]})], SAMPLING, seed=0)


def test_a_fingerprint_tells_models_of_one_name_apart() -> None:
    model = random_llama(seed=0)
    before = fingerprint(model)
    assert before == fingerprint(random_llama(seed=0))
    assert before != fingerprint(random_llama(seed=1))
    assert before != fingerprint(random_llama(seed=0, vocabulary=270))
    assert before != fingerprint(random_llama(seed=0).bfloat16())
