"""Makes the tiny model that ships in `covary/models/tiny_think`: it reasons in tags before it answers, and often wrongly.

For methods that score a reference answer behind a reasoning trace. The model is taught both prompts of the template
`think` on two-term sums: 47 + 38 is `<think>70+15=85</think>` (tens, ones, total) and then `<answer>85</answer>`. As in
`build_tiny_models.py`, in two phases:

1. learning: right traces only, under the prior's prompt (the question) and the posterior's (which shows the answer);
2. habit: under the prior most traces slip in one of their three numbers; under the posterior most do not. Whatever the
   trace says, the answer repeats its total.

So the answer follows from the trace, the posterior's traces are better than the prior's, and what there is to learn is
to write the right trace without having seen the answer. Questions of the quickstart's test split are in neither phase.

    python scripts/build_tiny_reasoner.py [--out DIR] [--seed 0] [--steps N]

Deterministic for a given seed, number of threads and torch build.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from functools import lru_cache
from pathlib import Path

import torch
from build_tiny_models import (
    BATCH,
    END,
    HABIT_SHARES,
    LEARNING_SHARES,
    PAD,
    TASK,
    THREADS,
    Sum,
    draw_sum,
    held_out_sums,
    train,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from covary.prompts import load_template, prompt_group
from covary.rewards.extract import answer_tag
from covary.rollout.transformers import TransformersRollout
from covary.types import Example, Request, Sampling

SHIPPED = Path(__file__).resolve().parent.parent / "covary" / "models" / "tiny_think"
TEMPLATE = load_template("think")
QUESTION = "State the final answer to the following arithmetic problem: {} ="

STEPS, HABIT_SHARE = 1500, 0.2  # steps of both phases, the second's share
LEARNING_RATE, HABIT_RATE = 3e-3, 5e-4
VOCABULARY = 704
PRIOR_RIGHT, POSTERIOR_RIGHT = 0.35, 0.8  # traces without a slip, in the habit
MAX_TOKENS = 28  # of a trace and its answer


def example(question: Sum) -> Example:
    """The question as the task asks it."""
    text = QUESTION.format(f"{question.a} {question.sign} {question.b}")
    return Example(text, [{"role": "user", "content": text}], answer=str(question.value))


def parts(question: Sum) -> tuple[int, int, int]:
    """Tens, ones and total."""
    sign = 1 if question.sign == "+" else -1
    tens = question.a // 10 * 10 + sign * (question.b // 10 * 10)
    ones = question.a % 10 + sign * (question.b % 10)
    return tens, ones, tens + ones


def trace(numbers: tuple[int, int, int]) -> str:
    """70+15=85."""
    tens, ones, total = numbers
    return f"{tens}{ones:+d}={total}"


def slip(numbers: tuple[int, int, int], rng: random.Random) -> tuple[int, int, int]:
    """One of the three numbers is off; what follows from it follows from it."""
    tens, ones, total = numbers
    place = rng.randrange(3)
    if place == 0:
        tens += rng.choice((-10, 10))
    elif place == 1:
        ones += rng.choice((-1, 1, 2))
    return tens, ones, tens + ones if place < 2 else total + rng.choice((-10, -1, 1, 10))


# ---------------------------------------------------------------------------------------------- tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that knows the template's sentences by heart: prompts are most of what a step computes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    forms = [*TEMPLATE.contexts.values(), TEMPLATE.glue]
    questions = [QUESTION.format(f"3 {sign} 14") for sign in "+-"]
    texts = [form.replace("{question}", q).replace("{answer}", "17") for form in forms for q in questions]
    pieces = [piece for text in texts for piece in re.split("|".join(map(re.escape, TEMPLATE.tags)), text) if piece]
    tokenizer.train_from_iterator(
        [*pieces, *TEMPLATE.tags * 2] * 2,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            min_frequency=2,
            special_tokens=[PAD, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


# ---------------------------------------------------------------------------------------------- training


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Batches:
    """Draws training batches: questions under one of both prompts, with a trace and the answer that it states."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, held_out: frozenset[Sum], seed: int) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out
        self.pad, self.end = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.contexts = lru_cache(maxsize=None)(lambda sum: prompt_group(example(sum), TEMPLATE, tokenizer).contexts)
        self.encode = lru_cache(maxsize=None)(lambda text: TEMPLATE.encode(text, tokenizer))

    def draw(self, shares: tuple[float, ...], right: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and next-token targets; targets are -100 outside trace and answer.

        Args:
            shares: of the numbers of digits.
            right: context -> share of traces without a slip.
        """
        rows = []
        for _ in range(BATCH // 2):
            question = draw_sum(self.rng, shares, self.held_out)
            context = self.rng.choice(("prompt", "posterior"))
            numbers = parts(question)
            if self.rng.random() >= right[context]:
                numbers = slip(numbers, self.rng)
            text = f"{trace(numbers)}{TEMPLATE.stop}{TEMPLATE.glue}{numbers[2]}</answer>"
            rows.append((self.contexts(question)[context], [*self.encode(text), self.end]))
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        tokens = [p + c + [self.pad] * (width - len(p) - len(c)) for p, c in rows]
        targets = [[-100] * (len(p) - 1) + c + [-100] * (width - len(p) - len(c) + 1) for p, c in rows]
        return torch.tensor(tokens), torch.tensor(targets)


def build(out: Path, *, seed: int = 0, steps: int = STEPS) -> None:
    """Trains the model and writes it with its tokenizer into `out`, an ordinary Hugging Face folder."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    batches = Batches(tokenizer, held_out_sums(TASK.load().test), seed)
    habit = max(1, round(HABIT_SHARE * steps))
    always, often = {"prompt": 1.0, "posterior": 1.0}, {"prompt": PRIOR_RIGHT, "posterior": POSTERIOR_RIGHT}
    learning = max(1, steps - habit)
    train(model, lambda: batches.draw(LEARNING_SHARES, always), phase="learning", steps=learning, lr=LEARNING_RATE)
    train(model, lambda: batches.draw(HABIT_SHARES, often), phase="habit", steps=habit, lr=HABIT_RATE)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


# ---------------------------------------------------------------------------------------------- measuring


def measure(folder: Path, *, samples: int = 8, seed: int = 0) -> dict[str, float]:
    """Shares of right answers on the held-out questions, in float32.

    Returns:
        `accuracy` and `posterior`: at temperature 1 under either prompt; `greedy` and `pass@k` under the prior's;
        `ended`: samples that stopped by themselves.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = [prompt_group(example, TEMPLATE, tokenizer) for example in TASK.load().test]
    plan = [Request(samples), Request(1, decoding="greedy"), Request(samples, context="posterior")]
    finished = TransformersRollout(model, tokenizer).generate(
        [plan] * len(groups), groups, Sampling(max_tokens=MAX_TOKENS), seed
    )
    # The prompts end with the opening tag, so a completion starts within the trace.
    right = torch.tensor([[answer_tag(c.text) == g.example.answer for c in g.completions] for g in finished]).double()
    ended = torch.tensor([[c.finish == "eos" for c in g.completions] for g in finished]).double()
    return {
        "accuracy": right[:, :samples].mean().item(),
        "posterior": right[:, samples + 1 :].mean().item(),
        "greedy": right[:, samples].mean().item(),
        f"pass@{samples}": right[:, :samples].amax(1).mean().item(),
        "ended": ended.mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder to write (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps, both phases together")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    build(arguments.out, seed=arguments.seed, steps=arguments.steps)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{arguments.out}: {size} bytes")
    print("on the 200 held-out questions of the quickstart, 8 samples each at temperature 1:")
    print(json.dumps({name: round(value, 3) for name, value in measure(arguments.out).items()}))


if __name__ == "__main__":
    main()
