"""Traces, tags and reference answers in tokens: the same pieces on every kind of tokenizer, whatever was merged in sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from covary.models.loading import model_path
from covary.prompts import Template, load_template, prompt_group
from covary.rollout.pieces import append_answers, fault
from covary.tasks import Jsonl
from covary.types import Completion, Example, Group, UserError
from tests.models import byte_tokenizer

THINK = load_template("think")


def merging() -> PreTrainedTokenizerFast:
    """A byte-level BPE that merges across the tags' ends, as those of SmolLM2 and Qwen do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["so it is.</think>\n<answer>42</answer>", "<think>a", "x></think>\n<answer>", ">4", "2</", ".</"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Spaces are a letter, unknown characters are bytes, and a start token comes by itself: as Gemma's."""
    from tokenizers.processors import TemplateProcessing

    letters = [chr(c) for c in range(33, 127)] + ["▁", "\n", "é"]
    pieces = ["<pad>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters, "</", ".</", "k>"]
    merges = [("<", "/"), (".", "</"), ("k", ">")]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>")


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "merging": merging(),
    "sentencepiece": sentencepiece_like(),
    "tiny": AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def closed(tokenizer: PreTrainedTokenizerFast, text: str, answer: str, template: Template = THINK) -> Group:
    """A group whose one trace was sampled as the tokenizer would write it with its tag in one go."""
    sampled = tokenizer.encode(f"{text}{template.stop}", add_special_tokens=False)
    group = prompt_group(Example("e", [{"role": "user", "content": "What?"}], answer=answer), template, tokenizer)
    group.completions = [Completion(sampled, text, "stop_string", logps=[-1.0] * len(sampled))]
    (group,) = append_answers([group], template, tokenizer)
    return group


@every_tokenizer
@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    answer=st.text("ab 4.>é/", min_size=1, max_size=5),
)
def test_pieces_round_trip(name: str, text: str, answer: str) -> None:
    tokenizer = TOKENIZERS[name]
    (row,) = closed(tokenizer, text, answer).completions
    by_role = {
        role: decoded(tokenizer, [row.tokens[t] for t, r in enumerate(row.roles or ()) if r == role])
        for role in ("sampled", "context", "answer")
    }
    assert by_role == {"sampled": f"{text}</think>", "context": "\n<answer>", "answer": f"{answer}</answer>"}
    assert row.logps is None
    # Encoding what was decoded once more gives the same pieces.
    (again,) = closed(tokenizer, by_role["sampled"].removesuffix("</think>"), answer).completions
    assert again.tokens == row.tokens


@every_tokenizer
def test_tags_are_encoded_alone_everywhere(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    group = closed(tokenizer, "x>", ">4")
    tags = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in THINK.tags}

    def count(ids: list[int], tag: str) -> int:
        return sum(ids[i : i + len(tags[tag])] == tags[tag] for i in range(len(ids)))

    row = group.completions[0]
    assert [count(row.tokens, tag) for tag in THINK.tags] == [0, 1, 1, 1]
    for context, ids in group.contexts.items():
        assert ids[-len(tags["<think>"]) :] == tags["<think>"]
        assert count(ids, "<think>") == decoded(tokenizer, ids).count("<think>") == 2
        assert ("42" in decoded(tokenizer, ids)) is False
        assert (">4" in decoded(tokenizer, ids)) == (context == "posterior")
    start = tokenizer.encode("")  # a start token comes once, at the very front
    assert group.contexts["prompt"][: len(start)] == start
    assert group.contexts["prompt"].count(start[0] if start else -1) == len(start)


def test_merged_tags_are_what_the_pieces_undo() -> None:
    """Negative control: in one go, the tags merge with their neighbours."""
    for name in ("merging", "sentencepiece"):
        tokenizer = TOKENIZERS[name]
        text = "so it is.</think> <answer>42</answer>"
        assert THINK.encode(text, tokenizer) != tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "finish", "found"),
    [
        ("so", "stop_string", None),
        ("", "stop_string", "empty"),
        (" \n", "stop_string", "empty"),
        ("so", "length", "truncated"),
        ("", "length", "truncated"),
        ("so", "eos", "unclosed"),
        ("a<think>b", "stop_string", "tagged"),
        ("<answer>5</answer>", "stop_string", "tagged"),
    ],
)
def test_faults(text: str, finish: str, found: str | None) -> None:
    tokenizer = byte_tokenizer()
    row = Completion(tokenizer.encode(text or "x"), text, finish)  # pyright: ignore[reportArgumentType]
    assert fault(row, THINK) == found
    group = Group(Example("e", "q", answer="5"), {"prompt": [1]}, [row], answer_tokens=[7])
    (made,) = append_answers([group], THINK, tokenizer)
    answered = made.completions[0].role_positions("answer") != []
    assert answered == (found in (None, "empty"))
    if not answered:
        assert made.completions[0] == row


def test_verifree_splits_within_the_answers_tag() -> None:
    template, tokenizer = load_template("verifree"), byte_tokenizer()
    group = closed(tokenizer, "so</think>\n", "42", template)
    (row,) = group.completions
    assert decoded(tokenizer, [row.tokens[t] for t in row.role_positions("sampled")]) == "so</think>\n<answer"
    assert decoded(tokenizer, [row.tokens[t] for t in row.role_positions("answer")]) == r"> \boxed{42} </answer>"
    assert fault(Completion([1], "a</think>", "stop_string"), template) is None


def test_rlprs_base_reads_the_answer_straight_behind_the_header() -> None:
    template, tokenizer = load_template("rlpr"), byte_tokenizer()
    group = closed(tokenizer, "so", "42", template)
    assert decoded(tokenizer, group.contexts["direct"]).endswith("User: What?\nAssistant:")
    assert decoded(tokenizer, group.answer_tokens or []) == "42"
    row = group.completions[0]
    assert [row.tokens[t] for t in row.role_positions("answer")] == group.answer_tokens


def test_thinking_differs_from_think_in_its_tags_only() -> None:
    thinking = load_template("thinking")
    assert thinking.tags == ("<thinking>", "</thinking>", "<answer>", "</answer>")
    for name, form in THINK.contexts.items():
        assert thinking.contexts[name] == form.replace("think>", "thinking>")
    assert (thinking.stop, thinking.glue, thinking.answer) == ("</thinking>", THINK.glue, THINK.answer)


def test_tags_in_the_data_are_named(tmp_path: Path) -> None:
    fine = Example("a", [{"role": "user", "content": "x < y"}], answer="</b>")
    assert THINK.complaint(fine) is None
    for example in (
        Example("b", "see <think>", answer="1"),
        Example("b", [{"role": "user", "content": "a"}], answer="</answer> 1"),
    ):
        assert "'b': its text holds <" in str(THINK.complaint(example))
    for content, message in (
        ("contexts: {prompt: x}\ntags: a", "tags takes a list of texts, got 'a'"),
        ("contexts: {prompt: x}\ntags: ['']", "tags, item 1 takes text, got ''"),
        ("contexts: {prompt: x}\ntags: [3]", "tags, item 1 takes text, got 3"),
    ):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(UserError, match=message):
            load_template(str(tmp_path / "bad.yaml"))


def test_webinstruct_rows_make_traces(shared: Path) -> None:
    """Real questions and answers of one to hundreds of characters, LaTeX among them, through the template."""
    task = Jsonl(str(shared / "data" / "webinstruct" / "train_600.jsonl"), prompt="question", answer="reference").load()
    assert len(task.train) == 600
    tokenizer = TOKENIZERS["tiny"]
    for example in list(task.train)[:100]:
        assert THINK.complaint(example) is None
        group = closed(tokenizer, "Because.", example.answer or "")
        row = group.completions[0]
        assert decoded(tokenizer, [row.tokens[t] for t in row.role_positions("answer")]) == f"{example.answer}</answer>"


# -- filters ---------------------------------------------------------------------------------------------------


def rows(path: Path) -> str:
    kinds = ["Mathematics", "Physics", "Business", "Physics"]
    data = [{"prompt": f"q{i}", "answer": str(i), "category": kinds[i % 4], "level": i % 3} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return str(path)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({"category": "Physics"}, lambda i: i % 2 == 1),
        ({"category": ["Physics", "Business"]}, lambda i: i % 4 != 0),
        ({"category": {"not": "Mathematics"}}, lambda i: i % 4 != 0),
        ({"category": {"not": ["Mathematics", "Physics"]}, "level": 2}, lambda i: i % 4 == 2 and i % 3 == 2),
    ],
)
def test_a_filter_on_any_column(tmp_path: Path, wanted: dict, kept) -> None:
    path = rows(tmp_path / "data.jsonl")
    task = Jsonl(path, filter=wanted).load()
    assert [example.answer for example in task.train] == [str(i) for i in range(24) if kept(i)]
    both = Jsonl(path, test_path=rows(tmp_path / "test.jsonl"), filter=wanted, train=0).load()
    assert [example.answer for example in both.test] == [str(i) for i in range(24) if kept(i)]


def test_mistakes_in_a_filter_are_named(tmp_path: Path) -> None:
    path = rows(tmp_path / "data.jsonl")
    with pytest.raises(UserError, match="filter leaves none of 24 rows"):
        Jsonl(path, filter={"category": "physics"}).load()
    with pytest.raises(UserError, match=r"data\.jsonl.*filter: no column 'kind'"):
        Jsonl(path, filter={"kind": "x"}).load()
    with pytest.raises(UserError, match=r"filter\.category: takes a value, a list of them, or \{not: \.\.\.\}"):
        Jsonl(path, filter={"category": {"no": "x"}})
