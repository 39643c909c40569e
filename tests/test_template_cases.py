"""Mistakes with tokens that other libraries made and fixed, with the right numbers (T of the shared collection)."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from covary.collate import collate
from covary.engines.local import LocalEngine
from covary.prompts import load_template, prompt_group
from covary.rollout.dataset import DatasetRollout
from covary.rollout.pieces import append_answers, fault
from covary.types import Completion, Example, Group, Request, Sampling, Score
from tests.models import random_llama


def test_t01_one_start_token() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "User: hello Assistant:": 2}, unk_token="<unk>"))
    words.add_special_tokens(["<s>"])
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    tokenizer.chat_template = "{{ bos_token }}User: {{ messages[0]['content'] }} Assistant:"
    ids = prompt_group(Example("e", [{"role": "user", "content": "hello"}]), load_template("chat"), tokenizer)
    assert ids.contexts["prompt"] == [1, 2]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert ids.contexts["prompt"] == tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.encode(rendered) == [1, 1, 2]  # the mistake


def test_t02_an_end_token_that_is_the_pad_token_is_learned_from() -> None:
    model = random_llama(vocabulary=32)
    rows = [Completion([7, 8, 2], "", "eos"), Completion([9, 2], "", "eos")]
    groups = [Group(Example("e", "q"), {"prompt": [2, 5, 6]}, rows, [0.0, 1.0])]
    batch = collate(groups, 4).with_totals()
    assert batch.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.total("tokens") == 5
    scores = LocalEngine(model).score(groups, [Score("policy")])["policy"]
    for row, score in zip(rows, scores, strict=True):
        ids = torch.tensor([[2, 5, 6, *row.tokens]])
        with torch.no_grad():
            logps = model(ids).logits.log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        torch.testing.assert_close(score, logps, rtol=0, atol=1e-5)


def test_t05_one_think_block_where_the_template_opened_it() -> None:
    """Traces as the sampler cuts them, at the first closing tag; what follows it is not sampled but given."""
    template = load_template("think")
    completions = {
        "First, 2 plus 2.\n</think>\n<answer>4</answer>": True,  # the prompt opened the tag
        "<think>2+2</think>\n<answer>4</answer>": False,  # it is opened twice
        "a</think>\n<answer>1</answer>": True,
        "a<think>b</think><answer>1</answer>": False,
        "<answer>1</answer>": False,  # never closed
    }
    for text, well_formed in completions.items():
        trace, tag, _ = text.partition("</think>")
        row = Completion([1], trace, "stop_string" if tag else "eos")
        assert (fault(row, template) is None) == well_formed, text


def test_t04_pieces_are_encoded_apart_and_sampled_ids_are_kept() -> None:
    vocabulary = {"x": 0, ">": 1, "<": 2, "/": 3, "5": 4, "><": 5, "></": 6, "<end>": 7}
    bpe = Tokenizer(models.BPE(vocabulary, [(">", "<"), ("><", "/")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    assert tokenizer.encode("x></5") == [0, 6, 4]  # what slicing a joint encoding would start from

    template = load_template("chat")
    given = Example("e", "x>", completions=["</5"])
    (group,) = DatasetRollout(tokenizer).generate(
        [[Request(1)]], [prompt_group(given, template, tokenizer)], Sampling(8), seed=0
    )
    assert group.contexts["prompt"] == [0, 1]
    assert group.completions[0].tokens == [2, 3, 4, 7]

    sampled = Group(Example("e", "x>"), {"prompt": [0, 1]}, [Completion([0, 1, 2, 3, 4], "x></5", "length")], [1.0])
    (kept,) = append_answers([sampled], template, tokenizer)
    assert collate([kept], 5).tokens.tolist() == [[0, 1, 2, 3, 4]]
