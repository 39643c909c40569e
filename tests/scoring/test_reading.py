"""What a teacher reads of a student's completion, on tokenizers of four kinds, against ids written by hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from covary.models.loading import model_path
from covary.prompts import Template, load_template, prompt_group
from covary.scoring.reading import Reading, end_of_turn, other_markup, same_tokens
from covary.types import Completion, Example, Finish, Group, UserError
from tests.models import byte_tokenizer

QUESTION = [{"role": "user", "content": "2 + 3 ="}]
EXAMPLE = Example("e", QUESTION)
CHAT = load_template("chat")
THINKS = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a><think>\n{% endif %}"


def letters(vocabulary: dict[str, int], merges: list[tuple[str, str]], end: str) -> PreTrainedTokenizerFast:
    """Characters and what they merge to."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([end])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space in front of the text, bytes for what it has no piece for."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    for piece in ("▁", "a", "b", "▁a", "<s>", "</s>"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    return fast


def tiny() -> Any:
    return AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True)


def reading(student: Any, teacher: Any, **more: Any) -> Reading:
    ends = frozenset({teacher.eos_token_id})
    return Reading(student, teacher, more.pop("template", CHAT), end_of_turn(teacher, ends), **more)


def written(student: Any, text: str, finish: Finish = "eos") -> Completion:
    tokens = student.encode(text, add_special_tokens=False)
    return Completion([*tokens, student.eos_token_id] if finish == "eos" else tokens, text, finish)


# -- completions ---------------------------------------------------------------------------------------------


def test_text_is_encoded_anew_and_ended_where_the_student_ended() -> None:
    student = letters({"a": 0, "b": 1, "ab": 2, "<eos>": 3}, [("a", "b")], "<eos>")
    teacher = letters({"b": 0, "a": 1, "</s>": 2}, [], "</s>")
    both = reading(student, teacher)
    assert both.completion(Completion([2, 3], "ab", "eos")) == [1, 0, 2]
    assert both.completion(Completion([2], "ab", "length")) == [1, 0]
    assert both.completion(Completion([0, 1, 3], "ab", "eos")) == [1, 0, 2]  # another way to write the same
    assert both.completion(Completion([3], "", "eos")) == [2]
    assert both.completion(Completion([], "", "length")) == []


def test_bytes_become_merged_tokens() -> None:
    student, teacher = byte_tokenizer(), tiny()
    text = "The answer is 42."
    ids = reading(student, teacher).completion(written(student, text))
    assert ids == [*teacher.encode(text, add_special_tokens=False), teacher.eos_token_id]
    assert len(ids) < len(text)


def test_a_stop_string_belongs_to_the_text() -> None:
    """The student's log-prob counts its tokens; graders read the text before it."""
    student, teacher = byte_tokenizer(), tiny()
    tokens = student.encode("7</think>", add_special_tokens=False)
    ids = reading(student, teacher).completion(Completion(tokens, "7", "stop_string"))
    assert teacher.decode(ids) == "7</think>"


def test_an_appended_answer_is_nothing_that_the_student_said() -> None:
    student, teacher = byte_tokenizer(), tiny()
    said, appended = (student.encode(text, add_special_tokens=False) for text in ("so 7.", "\n42"))
    row = Completion(
        said + appended, "so 7.", "stop_string", roles=["sampled"] * len(said) + ["answer"] * len(appended)
    )
    assert teacher.decode(reading(student, teacher).completion(row)) == "so 7."


@pytest.mark.parametrize(
    ("text", "missing", "kept"),
    [
        ("ab é", 1, "ab "),
        ("ab 漢", 1, "ab "),
        ("ab 漢", 2, "ab "),
        ("ab 👩", 3, "ab "),
        ("👩", 2, ""),
        ("ab é", 0, "ab é"),
    ],
)
@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece])
def test_a_cut_character_is_left_out(make: Any, text: str, missing: int, kept: str) -> None:
    student, teacher = make(), tiny()
    tokens = student.encode(text, add_special_tokens=False)
    tokens = tokens[: len(tokens) - missing]
    both = reading(student, teacher)
    assert teacher.decode(both.completion(Completion(tokens, "", "length"))) == kept
    assert "�" in teacher.decode(both.completion(Completion([*tokens, student.eos_token_id], "", "eos"))) or not missing


def test_bytes_that_are_no_cut_character_are_not_free() -> None:
    """Any number of them would otherwise cost the teacher nothing."""
    student, teacher = byte_tokenizer(), tiny()
    bad = student.encode("漢", add_special_tokens=False)[1]  # continues a character that never began
    tokens = [*student.encode("ab", add_special_tokens=False), *[bad] * 5]
    assert teacher.decode(reading(student, teacher).completion(Completion(tokens, "", "length"))) == "ab" + "�" * 5


def test_a_control_token_inside_a_completion_is_text_and_costs_the_teacher_tokens() -> None:
    student, teacher = byte_tokenizer(), tiny()
    pad, end = student.pad_token_id, student.eos_token_id
    said = student.encode("42", add_special_tokens=False)
    plain = reading(student, teacher).completion(Completion([*said, end], "42", "eos"))
    padded = reading(student, teacher).completion(Completion([*said, pad, pad, end], "42", "eos"))
    assert len(padded) > len(plain) + 2
    assert teacher.decode(padded[:-1]) == "42<pad><pad>"
    # What the rule is for: left out, any number of them would be read as the same text.
    assert student.decode([*said, pad, pad], skip_special_tokens=True) == "42"


def test_text_is_never_read_as_a_control_token() -> None:
    """Both call their end <|im_end|>; the student spells it, letter by letter, and goes on."""
    student, teacher = byte_tokenizer(), tiny()
    spelled = student.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert student.eos_token_id not in spelled
    ids = reading(student, teacher).completion(Completion([*spelled, student.eos_token_id], "", "eos"))
    assert ids.count(teacher.eos_token_id) == 1
    assert ids[-1] == teacher.eos_token_id
    assert teacher.eos_token_id in teacher.encode("<|im_end|>", add_special_tokens=False)  # what plain encoding does


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=12), finish=st.sampled_from(["eos", "length"]))
def test_any_text_reaches_the_teacher_whole(text: str, finish: Finish) -> None:
    student, teacher = byte_tokenizer(), tiny()
    tokens = student.encode(text, add_special_tokens=False, split_special_tokens=True)
    row = Completion([*tokens, student.eos_token_id] if finish == "eos" else tokens, text, finish)
    ids = reading(student, teacher).completion(row)
    assert (ids[-1:] == [teacher.eos_token_id]) == (finish == "eos")
    expected = text[:-1] if finish == "length" and text.endswith("�") else text
    assert teacher.decode(ids[:-1] if finish == "eos" else ids) == expected


# -- prompts -------------------------------------------------------------------------------------------------


def test_each_renders_the_messages_by_its_own_template() -> None:
    student, teacher = byte_tokenizer(), sentencepiece()
    both = reading(student, teacher)
    assert teacher.decode(both.prompt(EXAMPLE)) == "[user]2 + 3 ="
    assert "<|im_start|>" in student.decode(prompt_group(EXAMPLE, CHAT, student).contexts["prompt"])


def test_a_thought_that_the_teachers_prompt_opens_is_not_opened_twice() -> None:
    student, teacher = byte_tokenizer(), deepcopy(tiny())
    teacher.chat_template = THINKS
    both = reading(student, teacher)
    prompt = both.prompt(EXAMPLE)
    assert teacher.decode(prompt).endswith("<think>\n")
    for text in ("<think>\nso 5</think>5", "so 5</think>5"):
        assert teacher.decode(both.completion(written(student, text), prompt)[:-1]) == "so 5</think>5"
    plain = reading(student, tiny())
    kept = plain.completion(written(student, "<think>\nso 5"), plain.prompt(EXAMPLE))
    assert tiny().decode(kept[:-1]) == "<think>\nso 5"


def test_a_thought_that_the_students_prompt_opens_is_open_for_the_teacher_too() -> None:
    student, teacher = byte_tokenizer(), tiny()
    form = Template("r1", {"prompt": "Q: {question}\nA: <think>"})
    both = reading(student, teacher, template=form)
    own = reading(student, teacher).prompt(EXAMPLE)
    assert both.prompt(EXAMPLE) == own + teacher.encode("<think>", add_special_tokens=False)
    opened = deepcopy(teacher)
    opened.chat_template = THINKS
    assert teacher.decode(reading(student, opened, template=form).prompt(EXAMPLE)).count("<think>") == 1


def test_a_teacher_without_a_chat_template_reads_the_students_text_form() -> None:
    student, teacher = byte_tokenizer(), deepcopy(tiny())
    teacher.chat_template = None
    form = Template("qa", {"prompt": "Q: {question} A:"})
    assert teacher.decode(reading(student, teacher, template=form).prompt(EXAMPLE)) == "Q: 2 + 3 = A:"
    with pytest.raises(UserError, match=r"^teacher: example 'e'.* no chat template"):
        reading(student, teacher).prompt(EXAMPLE)
    raw = Example("raw", "2 + 3 =")
    assert teacher.decode(reading(student, teacher).prompt(raw)) == "2 + 3 ="


def test_what_the_teacher_cannot_read_is_none() -> None:
    student, teacher = byte_tokenizer(), tiny()
    whole = reading(student, teacher)
    rows = [written(student, text) for text in ("5", "five and more", "")]
    rows += [Completion(student.encode("é", add_special_tokens=False)[:1], "", "length")]
    group = Group(EXAMPLE, prompt_group(EXAMPLE, CHAT, student).contexts, rows)
    prompt, ids = whole.read(group)
    assert ids[2:] == [[teacher.eos_token_id], None]  # an end alone is something, half a character is nothing
    assert ids[0] is not None
    short = reading(student, teacher, context=len(prompt) + len(ids[0]))
    assert [value is None for value in short.read(group)[1]] == [False, True, False, True]
    assert whole.read(group)[1][1] is not None
    few = reading(student, teacher, vocabulary=max([*prompt, *ids[0]]) + 1)
    assert few.read(group)[1][0] == ids[0]
    assert few.read(group)[1][1] is None


# -- ends and the same tokens --------------------------------------------------------------------------------


def test_the_end_of_turn_is_that_of_the_chat_template() -> None:
    teacher = deepcopy(tiny())
    assert end_of_turn(teacher, frozenset({2})) == 2
    teacher.eos_token = "<|endoftext|>"  # as base models have it
    assert end_of_turn(teacher, frozenset({0, 2})) == 2
    teacher.chat_template = None
    assert end_of_turn(teacher, frozenset({0})) == 0
    teacher.eos_token = None
    with pytest.raises(UserError, match="no end token"):
        end_of_turn(teacher, frozenset())


def with_markup(names: list[str], padding: int = 0) -> PreTrainedTokenizerFast:
    alphabet = {letter: i for i, letter in enumerate("abc")}
    alphabet |= {f"[PAD{3 + len(names) + i}]": 3 + len(names) + i for i in range(padding)}
    alphabet |= {name: 3 + i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=names[0])


def test_padding_and_names_of_markup_do_not_make_another_tokenizer() -> None:
    plain = with_markup(["<end>", "<turn>"])
    assert same_tokens(plain, plain)
    assert same_tokens(plain, with_markup(["<end>", "<turn>"], padding=4))
    assert same_tokens(plain, with_markup(["<end>", "<turn>", "<tool>"]))
    renamed = with_markup(["<stop>", "<turn>"])
    assert same_tokens(plain, renamed)
    assert other_markup(plain, renamed) == {3: ("<end>", "<stop>")}


def test_other_words_make_another_tokenizer() -> None:
    plain = letters({"a": 0, "b": 1, "<e>": 2}, [], "<e>")
    assert not same_tokens(plain, letters({"b": 0, "a": 1, "<e>": 2}, [], "<e>"))
    assert not same_tokens(plain, letters({"a": 0, "b": 1, "ab": 2, "<e>": 3}, [("a", "b")], "<e>"))
    assert not same_tokens(byte_tokenizer(), tiny())
    # One's markup is the other's word: no renaming.
    assert not same_tokens(plain, letters({"a": 0, "b": 1, "c": 2, "<e>": 3}, [], "<e>"))
    # The same pieces that decode to other text.
    spaced = letters({"a": 0, "b": 1, "<e>": 2}, [], "<e>")
    spaced.backend_tokenizer.decoder = decoders.Replace("a", "A")
    assert not same_tokens(plain, spaced)


def test_the_same_tokens_are_read_as_they_are_but_for_the_end() -> None:
    student, teacher = with_markup(["<end>", "<turn>"]), with_markup(["<pad>", "<stop>"])
    teacher.eos_token = "<stop>"
    both = Reading(student, teacher, CHAT, end=4, same_tokens=True, relabelled=3)
    assert both.completion(Completion([0, 2, 3], "ac", "eos")) == [0, 2, 4]
    assert both.completion(Completion([0, 2], "ac", "length")) == [0, 2]
