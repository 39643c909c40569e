"""Win rates, and preference accuracy from implicit rewards: the difference of log-probs, not the ratio of logs."""

from __future__ import annotations

import pytest
import torch

from covary.preferences import implicit_rewards, prefers, wins
from covary.prompts import load_template, prompt_group
from covary.rollout.dataset import encode_completion
from covary.types import Example
from tests.models import byte_tokenizer, random_llama

EXAMPLE = Example("a", [{"role": "user", "content": "Summarise."}])
TEXTS = ["short", "a much longer text", "another"]


def logp(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(prompt) + t - 1, token]) for t, token in enumerate(tokens))


def test_wins_count_ties_half():
    assert wins([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        wins([1.0], [])


def test_the_implicit_reward_is_the_log_of_the_ratio():
    tokenizer, template = byte_tokenizer(), load_template("chat")
    policy, initial = random_llama(seed=1, scale=4.0), random_llama(seed=2, scale=4.0)
    group = prompt_group(EXAMPLE, template, tokenizer)
    group.completions = [encode_completion(tokenizer, text, 12) for text in TEXTS]  # the second one is cut
    (found,) = implicit_rewards(policy, initial, [group])
    prompt = group.contexts["prompt"]
    expected = [logp(policy, prompt, c.tokens) - logp(initial, prompt, c.tokens) for c in group.completions]
    assert found == pytest.approx(expected, abs=1e-4)
    pairs = [(EXAMPLE, chosen, rejected) for chosen in TEXTS for rejected in TEXTS if chosen != rejected]
    by_text = dict(zip(TEXTS, expected, strict=True))
    found = prefers(policy, initial, pairs, template, tokenizer, max_tokens=12)
    assert found == [float(by_text[chosen] > by_text[rejected]) for _, chosen, rejected in pairs]


def test_a_policy_that_was_not_trained_prefers_nothing():
    model = random_llama()
    pairs = [(EXAMPLE, "a", "b"), (EXAMPLE, "b", "a")]
    assert prefers(model, model, pairs, load_template("chat"), byte_tokenizer(), max_tokens=8) == [0.0, 0.0]
