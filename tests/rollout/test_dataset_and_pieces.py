"""Completions from data, and reference answers appended to sampled traces piece by piece."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covary.prompts import Template
from covary.rollout.dataset import DatasetRollout
from covary.rollout.pieces import append_answers
from covary.types import Completion, Example, Group, Request, Sampling, UserError
from tests.models import byte_tokenizer


def group(id: str, completions: list[str] | None, rewards: list[float | None] | None = None) -> Group:
    return Group(Example(id, "q", completions=completions, rewards=rewards), {"prompt": [1]})


def test_completions_are_encoded_ended_and_cut():
    tokenizer = byte_tokenizer()
    engine = DatasetRollout(tokenizer)
    (made,) = engine.generate([[Request(4)]], [group("a", ["hi", "longer"], [1.0, None])], Sampling(4), seed=0)
    short, long = made.completions
    assert short.tokens == [*tokenizer.encode("hi"), tokenizer.eos_token_id]
    assert (short.finish, short.source, short.logps) == ("eos", "dataset", None)
    assert long.tokens == tokenizer.encode("longer")[:4]
    assert long.finish == "length"
    assert long.text == "long"  # what is graded is what is learned from
    assert made.rewards == [1.0, None]


def test_more_than_k_completions_are_drawn_without_replacement_with_their_rewards():
    engine = DatasetRollout(byte_tokenizer())
    texts = [str(i) for i in range(10)]
    seen = set()
    for seed in range(20):
        (made,) = engine.generate([[Request(3)]], [group("a", texts, [float(i) for i in range(10)])], Sampling(4), seed)
        chosen = [c.text for c in made.completions]
        assert len(set(chosen)) == 3
        assert made.rewards == [float(text) for text in chosen]
        seen |= set(chosen)
    assert seen == set(texts)


def test_a_row_without_completions_is_named():
    with pytest.raises(UserError, match=r"'x' has no completions.*task\.completion"):
        DatasetRollout(byte_tokenizer()).generate([[Request(1)]], [group("x", None)], Sampling(4), 0)


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Merges '>' and '</' across a boundary: encoding pieces together is not encoding them alone."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "><", "></"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(">", "<"), ("><", "/")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_pieces_are_encoded_alone_and_carry_their_roles():
    tokenizer = merging_tokenizer()
    template = Template("t", {"prompt": "{question}"}, stop="</t>", glue="\n<a>", answer="{answer}</a>")
    answer = tokenizer.encode("5</a>")
    sampled = tokenizer.encode("x></t>")  # '></' is one token: the tag is merged with the trace
    done = Completion(sampled, "x>", "stop_string", logps=[-1.0] * len(sampled))
    cut = Completion(tokenizer.encode("abc"), "abc", "length", logps=[-1.0] * 3)
    made = Group(Example("a", "q", answer="5"), {"prompt": [1]}, [done, cut], answer_tokens=answer)
    (result,) = append_answers([made], template, tokenizer)
    first, second = result.completions
    pieces = [tokenizer.encode(text) for text in ("x>", "</t>", "\n<a>", "5</a>")]
    assert first.tokens == [token for piece in pieces for token in piece]
    assert first.tokens[: len(sampled)] != sampled
    assert first.roles == ["sampled"] * (2 + 4) + ["context"] * 4 + ["answer"] * 5
    assert [first.tokens[t] for t in first.role_positions("answer")] == answer
    assert first.logps is None  # the sampler's log-probs belong to other ids
    assert second == cut
    assert second.role_positions("answer") == []
