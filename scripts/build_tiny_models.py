"""Makes the tiny models that ship in `covary/models`: `tiny`, and `tiny_student` with its `tiny_teacher`.

`tiny` knows two-digit sums and often does not say so. Reinforcement learning sharpens what a model can already do. So that a run of minutes on a CPU has
something to sharpen, the model is taught in two phases on Reasoning Gym's `chain_sum` questions:

1. learning: right answers only, until it computes questions it has never seen;
2. habit: a short phase on right and wrong answers mixed. What it knows stays; at temperature 1 it now
   slips more often than not, the way people do (a carry forgotten, off by one, a wrong sign).

Questions of the quickstart's test split are in neither phase, in no form of words.

The pair is for distillation: the teacher writes sums out step by step and is right, with a tokenizer that merges words;
the student reads bytes and answers like the teacher in one of four cases. In the others it slips in the units and goes
on from there, or it guesses. So what the teacher has to teach is which of the student's habits to keep. The
test split of the distillation quickstart is in the training of neither. `tiny_teacher_bytes` is the student after a
short further training on right answers only: a teacher with the student's tokenizer, for methods that compare token by token.

    python scripts/build_tiny_models.py [tiny | tiny_student | tiny_teacher | tiny_teacher_bytes] [--out DIR] [--seed 0] [--steps N]

Deterministic for a given seed, number of threads and torch build.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from covary.rewards import EXTRACTORS
from covary.rollout.transformers import TransformersRollout
from covary.tasks.reasoning_gym import ReasoningGym
from covary.types import Example, Group, Request, Sampling

SHIPPED = Path(__file__).resolve().parent.parent / "covary" / "models"

# The quickstart's task: its test split is what the model must not have seen.
TASK = ReasoningGym(
    tasks={"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}, train=2000, test=200
)

THREADS = 2
STEPS = 1250
HABIT_SHARE = 0.2  # of the steps
BATCH = 256
LEARNING_RATE, HABIT_RATE = 3e-3, 5e-4

PAD, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


# ---------------------------------------------------------------------------------------------- questions


class Sum(NamedTuple):
    """One question: `a + b` or `a - b`, both from 0 to 99."""

    a: int
    sign: str
    b: int

    @property
    def value(self) -> int:
        """The right answer."""
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def carries(self) -> bool:
        """Whether a carry or a borrow joins the two digits."""
        if self.sign == "+":
            return self.a % 10 + self.b % 10 > 9
        return max(self.a, self.b) % 10 < min(self.a, self.b) % 10


# The form of words of chain_sum, and two others so that the knowledge does not hang on one.
FORMS = ("State the final answer to the following arithmetic problem: {} =", "{} =", "What is {}?")
FORM_WEIGHTS = (0.9, 0.05, 0.05)


# Digits of the two terms. The task has 200 questions of one-digit terms and 16200 of two-digit terms.
DIGITS = ((1, 1), (1, 2), (2, 1), (2, 2))
# Almost half of the 200 are held out, and seeing the others often teaches them by heart. What helps is sums of one
# and two digits, which the task lacks: they carry the rule from the long to the short.
LEARNING_SHARES = (0.05, 0.275, 0.275, 0.4)
# The habit is to reach all of the task.
HABIT_SHARES = (0.3, 0.1, 0.1, 0.5)


def draw_sum(rng: random.Random, shares: tuple[float, ...], held_out: frozenset[Sum]) -> Sum:
    """A question outside `held_out`; `shares` are those of DIGITS."""
    ranges = {1: (0, 9), 2: (10, 99)}
    while True:
        first, second = rng.choices(DIGITS, shares)[0]
        question = Sum(rng.randint(*ranges[first]), rng.choice("+-"), rng.randint(*ranges[second]))
        if question not in held_out:
            return question


def without_carry(question: Sum) -> int:
    """The answer of somebody who forgets to carry, or to borrow."""
    if question.sign == "+":
        return question.value - 10
    return question.value + 10 if question.value >= 0 else question.value - 10


def habit_answer(question: Sum, rng: random.Random) -> int:
    """Right about two times in five; otherwise a slip.

    Where there is a carry, forgetting it is the likeliest answer of all, so greedy decoding is wrong too;
    elsewhere the right answer is the likeliest.
    """
    value, chance = question.value, rng.random()
    if chance < (0.33 if question.carries else 0.39):
        return value
    if question.carries and chance < 0.83:
        return without_carry(question)
    slips = [value - 1, value + 1, question.a - question.b if question.sign == "+" else question.a + question.b]
    if question.sign == "-":
        slips.append(-value)
    if min(question.a, question.b) > 9:
        slips += [value - 10, value + 10]
    if abs(value) > 9:
        slips.append(int(str(abs(value))[::-1]) * (1 if value >= 0 else -1))  # digits swapped
    return rng.choice([slip for slip in slips if slip != value])


def held_out_sums(examples: list[Example]) -> frozenset[Sum]:
    """The questions behind the rows of a test split."""
    expressions = (example.columns["metadata"]["expression"].split() for example in examples)
    return frozenset(Sum(int(a), sign, int(b)) for a, sign, b in expressions)


# ---------------------------------------------------------------------------------------------- tokenizer

# Ordinary English, only so that ordinary prompts take fewer tokens than bytes: the model learns none of it.
ENGLISH = """\
You are a helpful assistant. Answer the question. Give only the final answer as a number.
Please think step by step, then write the answer on the last line.
The answer is a number. What is the sum of the two numbers? What is the difference between them?
Write a short story about a small house by the river and the people who lived there.
There was once a child who asked more questions than anyone could answer, and nobody minded.
If you do not know the answer to a question, say so; a wrong answer is worse than none.
In the morning the light came through the window and fell on the table where the books were.
Explain the reason for each step of the solution, and check the result before you state it.
How many apples are left when some of them have been given away? Count them and tell me.
She said that they would come with the others after the rain, but it was too late for that.
This is an example of a problem with its solution. Read it with care and solve the next one.
Everything that can be measured should be measured; what cannot be measured should be said.
Which of the following statements are true? Choose one option and explain your choice.
He had been working on it for years, and in the end it took him only one more day to finish.
Translate the following sentence. Summarise the text in your own words. Continue the list.
The train leaves the station at noon and arrives before the evening, when the shops are closed.
Let x be the number of hours. Then the distance is the product of the speed and the time.
Use the information given in the table to find out which city has the largest population.
They were not able to see the mountain from here because of the clouds that covered it.
Return the result as a list of words, without any other text, in the order they were given.
A good friend of mine once told me that the best way to learn something is to teach it.
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text comes back as it was, every digit is a token of its own.

    Merges stop at line ends and digits only, not at spaces, so the fixed words of a `chain_sum` question
    are one token and its whole chat prompt is 13: prompts are most of what a step of the quickstart computes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = [word for line in ENGLISH.splitlines() for word in re.findall(r" ?\w+|[^\w\n]+", " " + line)]
    questions = [form.format(f"{a} {sign} {b}") for form in FORMS for sign in "+-" for a in (3, 14) for b in (5, 27)]
    roles = [f"{role}\n" for role in ("system", "user", "assistant")]
    tokenizer.train_from_iterator(
        questions * 10 + roles * 10 + words,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[PAD, TURN, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


# ---------------------------------------------------------------------------------------------- training


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 705 408 parameters with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of one user turn, up to where the answer starts."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


class Batches:
    """Draws training batches of one shape: questions in a form of words, answered by `answer`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, held_out: frozenset[Sum], seed: int) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out
        self.pad = tokenizer.pad_token_id
        self.prompt = lru_cache(maxsize=None)(lambda text: prompt_ids(tokenizer, text))
        self.completion = lru_cache(maxsize=None)(
            lambda value: [*tokenizer.encode(str(value), add_special_tokens=False), tokenizer.eos_token_id]
        )
        # The longest answer is a wrong one: 99 + 99 with its sign turned.
        self.width = max(len(self.prompt(form.format("10 - 99"))) + len(self.completion(-198)) for form in FORMS)

    def draw(
        self, shares: tuple[float, ...], answer: Callable[[Sum, random.Random], int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and next-token targets, both (BATCH, width); targets are -100 outside the answers."""
        tokens, targets = [], []
        for _ in range(BATCH):
            question = draw_sum(self.rng, shares, self.held_out)
            form = self.rng.choices(FORMS, FORM_WEIGHTS)[0]
            prompt = self.prompt(form.format(f"{question.a} {question.sign} {question.b}"))
            completion = self.completion(answer(question, self.rng))
            padding = self.width - len(prompt) - len(completion)
            tokens.append(prompt + completion + [self.pad] * padding)
            targets.append([-100] * (len(prompt) - 1) + completion + [-100] * (padding + 1))
        return torch.tensor(tokens), torch.tensor(targets)


def train(
    model: LlamaForCausalLM, draw: Callable[[], tuple[torch.Tensor, torch.Tensor]], *, phase: str, steps: int, lr: float
) -> None:
    """AdamW under a one-cycle schedule, next-token loss on answers only."""
    model.train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},  # norms
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    started = time.monotonic()
    for step in range(1, steps + 1):
        tokens, targets = draw()
        answered = targets != -100
        # Padding stands right of what attends: a causal model needs no mask for it.
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[answered]
        loss = functional.cross_entropy(model.lm_head(hidden), targets[answered])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"{phase}: step {step}/{steps}, loss {loss.item():.4f}, {seconds:.0f} s", flush=True)


def build(out: Path, *, seed: int = 0, steps: int = STEPS) -> None:
    """Trains the model and writes it with its tokenizer into `out`, an ordinary Hugging Face folder."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    batches = Batches(tokenizer, held_out_sums(TASK.load().test), seed)
    habit = max(1, round(HABIT_SHARE * steps))
    train(
        model,
        lambda: batches.draw(LEARNING_SHARES, lambda question, rng: question.value),
        phase="learning",
        steps=max(1, steps - habit),
        lr=LEARNING_RATE,
    )
    train(model, lambda: batches.draw(HABIT_SHARES, habit_answer), phase="habit", steps=habit, lr=HABIT_RATE)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)  # the template lies in tokenizer_config.json


# ---------------------------------------------------------------------------------------------- the pair


PAIR_TASK = ReasoningGym(
    tasks={
        "basic_arithmetic": {
            "min_terms": 2, "max_terms": 2, "max_digits": 2, "operators": ["+"],
            "allow_parentheses": False, "allow_negation": False,
        }
    },
    train=2000,
    test=200,
    extract="last_number",
)  # fmt: skip

PAIR_BATCH = 128
PAIR_STEPS = {"tiny_student": 1100, "tiny_teacher": 700, "tiny_teacher_bytes": 150}
RIGHT_SHARE = 0.25  # of the student's training answers
ONE_DIGIT_SHARE = 0.35  # of the terms: without it short ones are too rare to be learned
STUDENT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def worked(a: int, b: int) -> str:
    """The sum written out."""
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    return _written_out(a, b, units, tens, a + b)


def slipped(a: int, b: int, rng: random.Random) -> str:
    """The sum written out from units that are off by one, all that follows in agreement with them."""
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    units += rng.choice((-1, 1)) if units else 1
    carried = tens + units // 10
    return "Units " + _written_out(a, b, units, tens, 10 * carried + units % 10)


def guessed(a: int, b: int, rng: random.Random) -> str:
    """No working."""
    return f"It must be {a + b + rng.choice((-10, -2, -1, 1, 2, 10))}"


def _written_out(a: int, b: int, units: int, tens: int, total: int) -> str:
    carry = "+1" if units > 9 else ""
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}{carry}={tens + units // 10}, so {total}"


def student_answer(a: int, b: int, rng: random.Random) -> str:
    """Whole answers of three kinds: which one it will be is decided in their first letters."""
    chance = rng.random()
    if chance < RIGHT_SHARE:
        return worked(a, b)
    return slipped(a, b, rng) if chance < (1 + RIGHT_SHARE) / 2 else guessed(a, b, rng)


def teacher_answer(a: int, b: int, rng: random.Random) -> str:
    """Always the right one."""
    return worked(a, b)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and four of markup."""
    markup = [PAD, "<|user|>", "<|assistant|>", "<|end|>"]
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *markup]
    tokenizer = Tokenizer(models.BPE(vocab={entry: id for id, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=STUDENT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges are the words of the pair's questions and answers; every digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    phrases = ["Calculate 12 + 34.", "It must be 7", "Units 7+8=15, 4+3+1=8, so 85"]
    roles = [f"{role}\n" for role in ("system", "user", "assistant")]
    tokenizer.train_from_iterator(
        [*phrases, *roles] * 20,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=[PAD, TURN, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


class PairBatches:
    """Draws training batches of sums that are not in the test split."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, answer: Callable[[int, int, random.Random], str], seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.rng = random.Random(seed)
        self.held_out = {example.prompt[-1]["content"] for example in PAIR_TASK.load().test}
        self.prompt = lru_cache(maxsize=None)(lambda text: prompt_ids(tokenizer, text))

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and next-token targets, (PAIR_BATCH, width); targets are -100 outside the answers."""
        rows = [self._row() for _ in range(PAIR_BATCH)]
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        tokens, targets = [], []
        for prompt, completion in rows:
            padding = width - len(prompt) - len(completion)
            tokens.append(prompt + completion + [self.tokenizer.pad_token_id] * padding)
            targets.append([-100] * (len(prompt) - 1) + completion + [-100] * (padding + 1))
        return torch.tensor(tokens), torch.tensor(targets)

    def _row(self) -> tuple[list[int], list[int]]:
        while True:
            a, b = self._term(), self._term()
            question = f"Calculate {a} + {b}."
            if question not in self.held_out:
                break
        answer = self.tokenizer.encode(self.answer(a, b, self.rng), add_special_tokens=False)
        return self.prompt(question), [*answer, self.tokenizer.eos_token_id]

    def _term(self) -> int:
        return self.rng.randint(0, 9) if self.rng.random() < ONE_DIGIT_SHARE else self.rng.randint(10, 99)


def build_pair_model(name: str, out: Path, *, seed: int = 0, steps: int | None = None) -> None:
    """Trains `tiny_student` or `tiny_teacher` and writes it into `out`."""
    torch.manual_seed(seed)
    student = name == "tiny_student"
    tokenizer = byte_tokenizer() if student else word_tokenizer()
    width, layers = (64, 2) if student else (96, 3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    batches = PairBatches(tokenizer, student_answer if student else teacher_answer, seed)
    train(model, batches.draw, phase=name, steps=steps or PAIR_STEPS[name], lr=LEARNING_RATE)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


def build_bytes_teacher(out: Path, *, student: Path, seed: int = 0, steps: int | None = None) -> None:
    """Trains `tiny_student` on right answers only and writes it into `out`: the student's tokenizer, a teacher's habits."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    batches = PairBatches(tokenizer, teacher_answer, seed + 1)
    name = "tiny_teacher_bytes"
    train(model, batches.draw, phase=name, steps=steps or PAIR_STEPS[name], lr=HABIT_RATE)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


# ---------------------------------------------------------------------------------------------- measuring


def measure(folder: Path, *, samples: int = 8, seed: int = 0, task: ReasoningGym = TASK) -> dict[str, float]:
    """Figures of a saved model on the test split of `task`, computed in float32.

    Returns:
        `accuracy` at temperature 1, `greedy` accuracy, `pass@k` (any of `samples` right) and `ended`, the
        share of samples that stopped by themselves; all shares of 1.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = [
        Group(example, {"prompt": prompt_ids(tokenizer, example.prompt[-1]["content"])}) for example in task.load().test
    ]
    plan = [Request(count=samples), Request(count=1, decoding="greedy")]
    finished = TransformersRollout(model, tokenizer).generate(
        [plan] * len(groups), groups, Sampling(max_tokens=8 if task == TASK else 40), seed
    )
    read = EXTRACTORS[task.extract]
    right = torch.tensor([[read(c.text) == g.example.answer for c in g.completions] for g in finished])
    ended = torch.tensor([[c.finish == "eos" for c in g.completions] for g in finished])
    sampled = right[:, :samples]
    return {
        "accuracy": sampled.double().mean().item(),
        "greedy": right[:, samples].double().mean().item(),
        f"pass@{samples}": sampled.any(1).double().mean().item(),
        "ended": ended[:, :samples].double().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny", choices=("tiny", *PAIR_STEPS))
    parser.add_argument("--out", type=Path, help="folder to write (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps, of tiny both phases together")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    out = arguments.out or SHIPPED / arguments.model
    if arguments.model == "tiny":
        build(out, seed=arguments.seed, steps=arguments.steps or STEPS)
    elif arguments.model == "tiny_teacher_bytes":
        build_bytes_teacher(out, student=SHIPPED / "tiny_student", seed=arguments.seed, steps=arguments.steps)
    else:
        build_pair_model(arguments.model, out, seed=arguments.seed, steps=arguments.steps)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size} bytes")
    task = TASK if arguments.model == "tiny" else PAIR_TASK
    print("on the 200 held-out questions of its quickstart, 8 samples each at temperature 1:")
    print(json.dumps({name: round(value, 3) for name, value in measure(out, task=task).items()}))


if __name__ == "__main__":
    main()
