"""Makes summarisation in small, in seconds: posts, people's choices, an SFT model that is to be improved, a reward model.

A post is nine words in any order, of which three are facts (capitals) and the others filler; a good summary is the
facts and nothing else. `quality` is that rule. People know it, but write and compare with some noise, and neither model
is ever shown it:

* demonstrations miss facts and repeat filler; the SFT model imitates them;
* comparisons are of two summaries of one post, chosen by a Bradley-Terry model of their quality; the reward model starts
  from the SFT model's weights and learns from them alone.

    python scripts/build_tiny_summariser.py OUT [--seed 0]

OUT then holds `sft/` and `reward/` (ordinary Hugging Face folders), `samples.jsonl` (training posts with samples of the SFT
model, not scored yet), `test.jsonl` (posts with a demonstration) and `comparisons.jsonl` (held-out chosen and rejected
summaries). Deterministic for a given seed, number of threads and torch build.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from covary.prompts import Template, prompt_group
from covary.rollout.transformers import TransformersRollout
from covary.types import Example, Request, Sampling

FACTS, FILLER = list("ABCDEFGHIJKL"), list("abcdefghijkl")
FACTS_IN_POST, WORDS_IN_POST = 3, 9
MAX_TOKENS = 8  # of a summary, its end included
PAD, USER, ASSISTANT, END = "<pad>", "<user>", "<assistant>", "<end>"

DEMONSTRATIONS, COMPARISONS = 20_000, 6_000
TRAINING_POSTS, TEST_POSTS, TEST_COMPARISONS, SAMPLES = 512, 512, 512, 5
CERTAINTY = 4.0  # people prefer the better of two summaries with probability sigmoid(CERTAINTY * difference in quality)
SFT_STEPS, REWARD_STEPS, BATCH, LEARNING_RATE = 300, 150, 96, 3e-3


def quality(post: str, summary: str) -> float:
    """Facts of the post that the summary has, less every other word of it, in facts of the post; 1 is the best."""
    words, facts = summary.split(), {word for word in post.split() if word in FACTS}
    found = facts & set(words)
    return (len(found) - (len(words) - len(found))) / len(facts)


def write_post(rng: random.Random) -> str:
    words = rng.sample(FACTS, FACTS_IN_POST) + rng.choices(FILLER, k=WORDS_IN_POST - FACTS_IN_POST)
    rng.shuffle(words)
    return " ".join(words)


def summarise(post: str, care: float, rng: random.Random) -> str:
    """What a person writes: each fact with probability `care`, each other word with a quarter of its complement."""
    chances = ((word, care if word in FACTS else (1 - care) / 4) for word in post.split())
    return " ".join([word for word, chance in chances if rng.random() < chance][: MAX_TOKENS - 1])


def demonstrate(post: str, rng: random.Random) -> str:
    return summarise(post, 0.7, rng)


def compare(post: str, rng: random.Random) -> tuple[str, str]:
    """(chosen, rejected) of two summaries that people of different care wrote."""
    one = two = ""
    while one == two:
        one, two = (summarise(post, rng.uniform(0, 1), rng) for _ in range(2))
    margin = torch.tensor(CERTAINTY * (quality(post, one) - quality(post, two)))
    return (one, two) if rng.random() < torch.sigmoid(margin) else (two, one)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = [PAD, USER, ASSISTANT, END, *FACTS, *FILLER]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, additional_special_tokens=[USER, ASSISTANT]
    )
    fast.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' ' }}"
        "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
    )
    return fast


def make_config(**options: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4 + len(FACTS) + len(FILLER),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=3,
        tie_word_embeddings=True,
        **options,
    )


def chat(post: str, summary: str | None = None) -> list[dict[str, str]]:
    prompt = [{"role": "user", "content": post}]
    return prompt if summary is None else [*prompt, {"role": "assistant", "content": summary}]


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Tensor:
    """Posts with their summaries as (rows, tokens), padded on the right."""
    rows = [tokenizer.apply_chat_template(chat(*pair), tokenize=True, return_dict=False) for pair in pairs]
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def optimise(model: nn.Module, steps: int, loss: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def learn_demonstrations(tokenizer: Any, rng: random.Random) -> LlamaForCausalLM:
    """The SFT model."""
    model = LlamaForCausalLM(make_config())
    posts = [write_post(rng) for _ in range(DEMONSTRATIONS)]
    data = encode(tokenizer, [(post, demonstrate(post, rng)) for post in posts])
    answers = WORDS_IN_POST + 2  # the user's tag, the post, the assistant's tag

    def loss() -> Tensor:
        rows = data[torch.randint(len(data), (BATCH,))]
        logits = model(input_ids=rows, attention_mask=(rows != 0).long()).logits[:, answers - 1 : -1]
        return functional.cross_entropy(logits.transpose(1, 2), rows[:, answers:], ignore_index=0)

    optimise(model, SFT_STEPS, loss)
    return model


def learn_choices(tokenizer: Any, sft: LlamaForCausalLM, rng: random.Random) -> LlamaForSequenceClassification:
    """The reward model: log sigmoid of the difference between chosen and rejected (Bradley-Terry)."""
    model = LlamaForSequenceClassification(make_config(num_labels=1))
    model.model.load_state_dict(sft.model.state_dict())
    posts = [write_post(rng) for _ in range(COMPARISONS)]
    choices = [compare(post, rng) for post in posts]
    sides = encode(
        tokenizer, [(post, pair[side]) for side in (0, 1) for post, pair in zip(posts, choices, strict=True)]
    )
    chosen, rejected = sides.chunk(2)

    def loss() -> Tensor:
        picked = torch.randint(len(chosen), (BATCH,))
        rows = torch.cat([chosen[picked], rejected[picked]])
        better, worse = model(input_ids=rows, attention_mask=(rows != 0).long()).logits.squeeze(-1).chunk(2)
        return -functional.logsigmoid(better - worse).mean()

    optimise(model, REWARD_STEPS, loss)
    return model


def sample(model: Any, tokenizer: Any, posts: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """`count` summaries of each post at temperature 1."""
    groups = [
        prompt_group(Example(f"post {i}", chat(post)), Template("chat"), tokenizer) for i, post in enumerate(posts)
    ]
    plans = [[Request(count)] for _ in groups]
    groups = TransformersRollout(model, tokenizer).generate(plans, groups, Sampling(MAX_TOKENS), seed)
    return [[completion.text for completion in group.completions] for group in groups]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build(out: Path, seed: int) -> None:
    """Everything that OUT holds."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    sft = learn_demonstrations(tokenizer, rng)
    reward = learn_choices(tokenizer, sft, rng)
    for name, model in (("sft", sft), ("reward", reward)):
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    posts = [write_post(rng) for _ in range(TRAINING_POSTS + TEST_POSTS + TEST_COMPARISONS)]
    training, test, compared = (
        posts[:TRAINING_POSTS],
        posts[TRAINING_POSTS:-TEST_COMPARISONS],
        posts[-TEST_COMPARISONS:],
    )
    samples = sample(sft, tokenizer, training, SAMPLES, seed)
    write(
        out / "samples.jsonl",
        [{"prompt": post, "completion": texts} for post, texts in zip(training, samples, strict=True)],
    )
    write(out / "test.jsonl", [{"prompt": post, "answer": demonstrate(post, rng)} for post in test])
    pairs = [(post, *compare(post, rng)) for post in compared]
    write(out / "comparisons.jsonl", [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
