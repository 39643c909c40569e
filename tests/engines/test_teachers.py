"""Scores of teachers: against hand-computed values, and against each row alone."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from covary.collate import attach, collate
from covary.engines.local import LocalEngine
from covary.engines.reader import LocalLogProbs, Reader
from covary.models.loading import load_model, model_path
from covary.models.teacher import RelabelledHead, check_prompts, describe, load_teacher, read_teacher
from covary.prompts import load_template, prompt_group
from covary.scoring.reading import Reading
from covary.settings import Teacher
from covary.types import Completion, Example, Group, Score, Stream, UserError
from tests.models import byte_tokenizer, random_llama, save_random_model, save_with_another_end
from tests.scoring.test_reading import letters

CHAT = load_template("chat")
SEQUENCE = Score("teacher", Stream("teacher"), level="sequence")
TOKENS = Score("teacher", Stream("teacher"))


def unconditional(probabilities: list[float]) -> GPT2LMHeadModel:
    """A model whose next token has these probabilities whatever came before."""
    config = GPT2Config(vocab_size=len(probabilities), n_embd=8, n_layer=1, n_head=1, n_positions=64)
    config.tie_word_embeddings = False
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.eye(8)[0])
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = torch.tensor(probabilities).log()
    return model


def alone(model: nn.Module, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probs of `ids` after `prompt`, from one plain forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].float()
    logps = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logps.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)


def test_a_teacher_with_another_tokenizer_has_the_log_prob_of_its_own_tokens(shared: Path) -> None:
    """The case: p(b) = 0.2, p(a) = 0.7, p(</s>) = 0.1 at each step."""
    cases = [json.loads(line) for line in (shared / "cases" / "cases.jsonl").read_text().splitlines()]
    expected = next(case["expected"] for case in cases if case["id"] == "X04")
    student = letters({"a": 0, "b": 1, "ab": 2, "<eos>": 3}, [("a", "b")], "<eos>")
    tokenizer = letters({"b": 0, "a": 1, "</s>": 2}, [], "</s>")
    reading = Reading(student, tokenizer, CHAT, end=2)
    reader = Reader(reading, LocalLogProbs(unconditional([0.2, 0.7, 0.1]), 64))
    rows = [Completion([2, 3], "ab", "eos"), Completion([2], "ab", "length"), Completion([3], "", "eos")]
    group = Group(Example("x", "ab"), {"prompt": [2]}, rows)
    scored = reader([group], [SEQUENCE])
    finished, truncated, empty = scored["teacher"]
    assert finished == pytest.approx(expected["teacher_seq_logp"], abs=1e-5)
    assert truncated == pytest.approx(expected["truncated_completion_without_eos"], abs=1e-5)
    assert empty == pytest.approx(torch.tensor(0.1).log().item(), abs=1e-5)
    assert scored["teacher_tokens"] == [3, 2, 1]


def pair() -> tuple[Any, Any, nn.Module]:
    """A byte-level student and the shipped model as its teacher."""
    name = model_path("tiny")
    return byte_tokenizer(), AutoTokenizer.from_pretrained(name, local_files_only=True), load_model("tiny")


def groups_of(student: Any, texts: list[list[str]]) -> list[Group]:
    groups = []
    for g, group_texts in enumerate(texts):
        example = Example(f"e{g}", [{"role": "user", "content": f"{g} + 2 ="}])
        rows = [
            Completion([*student.encode(text, add_special_tokens=False), student.eos_token_id], text, "eos")
            for text in group_texts
        ]
        groups.append(Group(example, prompt_group(example, CHAT, student).contexts, rows))
    return groups


@pytest.mark.parametrize("limit", [8192, 24])
def test_rows_are_scored_in_micro_batches_as_if_alone(limit: int) -> None:
    student, tokenizer, model = pair()
    reading = Reading(student, tokenizer, CHAT, end=tokenizer.eos_token_id, context=40)
    reader = Reader(reading, LocalLogProbs(deepcopy(model), limit))
    groups = groups_of(student, [["2", "the answer is 2", "x" * 60], ["12"], ["", "éé"]])
    engine = LocalEngine(random_llama(), reader=reader)
    scored = engine.score(groups, [SEQUENCE, Score("old", Stream("old"))])
    assert set(scored) == {"teacher", "teacher_tokens", "old"}
    rows = [(group, row) for group in groups for row in group.completions]
    for (group, row), value in zip(rows, scored["teacher"], strict=True):
        if row.text.startswith("xxx"):
            assert value != value  # more than the teacher's context: no number, so the loop takes the row out
            continue
        prompt = tokenizer.apply_chat_template(group.example.prompt, add_generation_prompt=True, return_dict=False)
        ids = [*tokenizer.encode(row.text, add_special_tokens=False), tokenizer.eos_token_id]
        assert value == pytest.approx(alone(model, prompt, ids).double().sum().item(), abs=1e-4)
    attach(groups, scored)
    assert collate(groups, 64)["teacher"].isnan().tolist() == [False, False, True, False, False, False]


def test_a_text_has_no_score_of_another_kind() -> None:
    student, tokenizer, model = pair()
    reader = Reader(Reading(student, tokenizer, CHAT, end=2), LocalLogProbs(model, 64))
    for score, why in (
        (TOKENS, "not the student's"),
        (Score("e", Stream("teacher"), "entropy", level="sequence"), "log-probs of sampled tokens"),
        (Score("a", Stream("teacher"), tokens="answer", level="sequence"), "log-probs of sampled tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            reader(groups_of(student, [["2"]]), [score])


def test_one_prompt_that_the_teacher_refuses_takes_its_rows_out_alone() -> None:
    student, tokenizer, model = pair()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    reader = Reader(Reading(student, tokenizer, CHAT, end=2), LocalLogProbs(model, 64))
    groups = groups_of(student, [["2", "3"], ["4"]])
    groups[0].example.prompt = [{"role": "system", "content": "Be brief."}, *groups[0].example.prompt]  # type: ignore[misc]
    first, second, third = reader(groups, [SEQUENCE])["teacher"]
    assert first != first
    assert second != second
    assert third < 0


# -- the same tokens -----------------------------------------------------------------------------------------


def local(folder: Path, student: Any, **more: Any) -> Any:
    spec = Teacher(str(folder), **more)
    reading = read_teacher(spec, student, frozenset({student.eos_token_id}), CHAT)
    return load_teacher(spec, reading, device="cpu", student_vocabulary=259)


def with_contexts(groups: list[Group], reading: Reading) -> list[Group]:
    for group in groups:
        group.contexts["teacher"] = reading.prompt(group.example)
    return groups


def test_another_end_of_turn_stands_under_the_students(tmp_path: Path) -> None:
    """A teacher that ends turns with <pad>: its log-prob of <pad> is what the student's end token gets."""
    student = byte_tokenizer()
    folder = save_with_another_end(tmp_path / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}<pad>{% endif %}{% endfor %}"
    tokenizer.save_pretrained(folder)
    teacher = local(folder, student)
    assert (teacher.same_tokens, teacher.reading.end, teacher.reading.relabelled) == (True, 258, 257)
    assert teacher.end_ids == {257}
    groups = with_contexts(groups_of(student, [["2", "12"], ["éx"]]), teacher.reading)
    groups[0].completions[1] = Completion([17, 18], "12", "length")
    engine = LocalEngine(random_llama(seed=3), frozen={"teacher": teacher.model})
    plain = load_model(str(folder))
    scored = engine.score(groups, [TOKENS, Score("sum", Stream("teacher"), level="sequence")])
    rows = [(group, row) for group in groups for row in group.completions]
    for (group, row), values, total in zip(rows, scored["teacher"], scored["sum"], strict=True):
        ids = [258 if token == 257 else token for token in row.tokens]
        prompt = tokenizer.apply_chat_template(group.example.prompt, add_generation_prompt=True, return_dict=False)
        torch.testing.assert_close(values, alone(plain, prompt, ids), atol=1e-4, rtol=0)
        assert total == pytest.approx(float(values.double().sum()), abs=1e-6)
    # What the exchange is for: the student's own end token is nothing that this teacher says.
    student_prompt = groups[0].contexts["prompt"]
    assert student_prompt != groups[0].contexts["teacher"]
    wrong = alone(plain, prompt, groups[1].completions[0].tokens)
    assert abs(float(wrong[-1] - scored["teacher"][-1][-1])) > 0.01


def test_a_relabelled_projection_exchanges_two_columns() -> None:
    head = nn.Linear(4, 5, bias=False)
    hidden = torch.randn(3, 4)
    expected = head(hidden)[:, [0, 4, 2, 3, 1]]
    assert RelabelledHead(head, (1, 4))(hidden).equal(expected)


def test_both_streams_read_their_own_prompts() -> None:
    """A divergence compares the same token's two distributions, behind prompts of different length."""
    student = byte_tokenizer()
    policy, model = random_llama(seed=1), random_llama(seed=2)
    groups = groups_of(student, [["2", "12"], ["7"]])
    for group in groups:
        group.contexts["teacher"] = group.contexts["prompt"][3:]
    score = Score("kl", (Stream("policy"), Stream("teacher")), "kl")
    engine = LocalEngine(policy, frozen={"teacher": model})
    rows = [(group, row) for group in groups for row in group.completions]
    for (group, row), values in zip(rows, engine.score(groups, [score])["kl"], strict=True):
        logps = []
        for module, context in ((policy, "prompt"), (model, "teacher")):
            prompt = group.contexts[context]
            with torch.no_grad():
                logits = module(input_ids=torch.tensor([prompt + row.tokens])).logits[0]
            logps.append(torch.log_softmax(logits, -1)[len(prompt) - 1 : -1])
        expected = (logps[0].exp() * (logps[0] - logps[1])).sum(-1)
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-3)


def test_an_id_of_the_students_padding_takes_its_row_out_and_nothing_else(tmp_path: Path) -> None:
    student = byte_tokenizer()
    folder = save_random_model(tmp_path / "teacher")
    spec = Teacher(str(folder))
    reading = read_teacher(spec, student, frozenset({257}), CHAT)
    teacher = load_teacher(spec, reading, device="cpu", student_vocabulary=272)
    groups = with_contexts(groups_of(student, [["2", "3"]]), reading)
    groups[0].completions[0] = Completion([17, 270, 18], "2", "length")
    policy = random_llama(vocabulary=272, seed=1)
    first, second = LocalEngine(policy, frozen={"teacher": teacher.model}).score(groups, [SEQUENCE])["teacher"]
    assert first == -torch.inf
    assert second == pytest.approx(
        float(alone(load_model(str(folder)), groups[0].contexts["teacher"], groups[0].completions[1].tokens).sum()),
        abs=1e-4,
    )


def test_a_bfloat16_teacher_beside_a_float32_student(tmp_path: Path) -> None:
    student = byte_tokenizer()
    folder = save_random_model(tmp_path / "teacher")
    teacher = local(folder, student, dtype="bfloat16")
    assert next(teacher.model.parameters()).dtype == torch.bfloat16
    groups = with_contexts(groups_of(student, [["2", "12"]]), teacher.reading)
    engine = LocalEngine(random_llama(seed=1), frozen={"teacher": teacher.model})
    jsd = Score("kl", (Stream("teacher"), Stream("policy")), "kl")
    scored = engine.score(groups, [TOKENS, jsd])
    exact = load_model(str(folder))
    for row, values in zip(groups[0].completions, scored["teacher"], strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, alone(exact, groups[0].contexts["teacher"], row.tokens), atol=0.05, rtol=0)
    assert all(values.dtype == torch.float32 for values in scored["kl"])


# -- loading and what is said --------------------------------------------------------------------------------


def test_wrong_teachers_are_named(tmp_path: Path) -> None:
    student, ends = byte_tokenizer(), frozenset({257})
    with pytest.raises(UserError, match=r"^teacher\.model: no folder"):
        read_teacher(Teacher(str(tmp_path / "none")), student, ends, CHAT)
    folder = save_random_model(tmp_path / "teacher")
    reading = read_teacher(Teacher(str(folder)), student, ends, CHAT)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"^teacher\.model: .* could not be loaded"):
        load_teacher(Teacher(str(folder)), reading, device="cpu", student_vocabulary=259)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"^teacher\.device: cuda"):
            load_teacher(Teacher("tiny", device="cuda:1"), reading, device="cpu", student_vocabulary=259)


def test_what_is_said_before_a_run(tmp_path: Path) -> None:
    student, tokenizer, _ = pair()
    (group,) = groups_of(student, [["2"]])
    other = "\n".join(describe(Reading(student, tokenizer, CHAT, end=2), group))
    assert "student reads e0 as" in other
    assert "teacher reads e0 as" in other
    assert "another tokenizer" in other
    assert "'<|im_end|>' (2) ends the teacher's turn" in other
    folder = save_with_another_end(tmp_path / "teacher")
    renamed = AutoTokenizer.from_pretrained(folder)
    text = (folder / "tokenizer.json").read_text().replace("<|im_start|>", "<|turn|>")
    (folder / "tokenizer.json").write_text(text)
    renamed = AutoTokenizer.from_pretrained(folder)
    renamed.chat_template = None
    same = "\n".join(describe(Reading(student, renamed, CHAT, end=258, same_tokens=True, relabelled=257), Group(
        Example("raw", "2 + 2"), {"prompt": student.encode("2 + 2")})))  # fmt: skip
    assert "the same tokens" in same
    assert "stands for '<pad>' (258)" in same
    assert "256 '<|im_start|>' is the teacher's '<|turn|>'" in same


def test_prompts_that_no_teacher_can_read_are_refused_before_the_run() -> None:
    student, tokenizer, _ = pair()
    examples = [Example(str(n), [{"role": "user", "content": "x" * n}]) for n in (1, 2, 300)]
    short = Reading(student, tokenizer, CHAT, end=2, context=40)
    assert check_prompts(Reading(student, tokenizer, CHAT, end=2), examples, 8) is None
    note = check_prompts(short, examples, 8)
    assert note is not None
    assert "cannot read 1 of 3 prompts" in note
    with pytest.raises(UserError, match="more than its context of 40"):
        check_prompts(short, examples[2:], 8)
    assert check_prompts(short, examples[:2], 35) is None  # how long a student's text is for the teacher is not known
    with pytest.raises(UserError, match="more than its context of 40"):
        check_prompts(short, examples[:2], 35, samples=True)
