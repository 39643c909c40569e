"""How close an update and a decode step come to the machine: matrix products alone, measured in the same run.

    python benchmarks/limits.py [--rounds 5] [--threads 2] [--out benchmarks/results/limits]

A random model of SmolLM2-135M's shape, 4 prompts of 64 tokens x 8 completions of 48, in float32 and in bfloat16
autocast. Everything is measured in turn, `--rounds` times; numbers are medians.

Rate: operations a second of x @ W.T for the shapes of the model's layers over the update's tokens, and for squares of
1024, 1536 and 2048; the largest counts.

Operations that an update needs, 2 per multiply-add:

* every linear layer over every packed token (a prompt once, completions without their last token), forward once and
  twice that backward (gradients of input and weight);
* the output projection at the scored positions, likewise;
* attention's two products, over the positions that a token sees, likewise.

What is computed again in the backward pass, padding, norms, softmax, the optimizer and all else is no operation that is
needed, so it lowers the share of the rate. The update is one `forward_backward` of GRPO and one optimizer step.

A decode step is the slope of `TransformersRollout.generate` between two lengths, 32 rows, so that reading the prompts
drops out. It is compared with the bare products of one step as torch computes them: every linear layer with 32 rows on the
model's own weights, and attention's two products over the mean length of the cache. That is no lower bound: the engine
reorders weights (benchmarks/linear.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUPS, COMPLETIONS, PROMPT, LENGTH = 4, 8, 64, 48
SHORT = 16
"""Tokens of the shorter of the two rollouts that give a decode step."""
HEAD_ROWS = 512
"""Rows of the output projection that is timed: all scored positions at once would not be computed in one piece."""
SQUARES = (1024, 1536, 2048)
TIMED_OPERATIONS = 2e10
"""Operations of a product that is timed at once: fast ones are repeated."""


@dataclass(frozen=True)
class Shape:
    """A decoder's matrices.

    Attributes:
        hidden: width of the residual stream.
        inner: width inside a gated MLP (three matrices).
        layers: decoder layers.
        heads: of queries.
        kv_heads: of keys and values.
        head: width of a head.
        vocabulary: rows of the output projection.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of one layer's matrices."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        return [
            (queries, self.hidden),
            (keys, self.hidden),
            (keys, self.hidden),
            (self.hidden, queries),
            (self.inner, self.hidden),
            (self.inner, self.hidden),
            (self.hidden, self.inner),
        ]


def update_operations(shape: Shape, groups: Sequence[tuple[int, Sequence[int]]]) -> dict[str, float]:
    """Operations that an update of (prompt length, completion lengths) groups needs, by where they fall.

    Every token of a completion is scored; its last one predicts nothing and is not read.
    """
    forward_and_backward = 3
    tokens = sum(prompt + sum(n - 1 for n in lengths) for prompt, lengths in groups)
    scored = sum(sum(lengths) for _, lengths in groups)
    seen = sum(
        prompt * (prompt + 1) // 2 + sum((n - 1) * prompt + (n - 1) * n // 2 for n in lengths)
        for prompt, lengths in groups
    )
    weights = sum(outputs * inputs for outputs, inputs in shape.matrices)
    return {
        "layers": forward_and_backward * 2.0 * shape.layers * weights * tokens,
        "projection": forward_and_backward * 2.0 * shape.vocabulary * shape.hidden * scored,
        "attention": forward_and_backward * 2.0 * 2 * shape.layers * shape.heads * shape.head * seen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {dtype: measure(dtype, arguments.rounds) for dtype in ("float32", "bfloat16")}
    results |= {"threads": arguments.threads, "rounds": arguments.rounds, "torch": torch.__version__}
    text = page(results)
    print(text)
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        arguments.out.with_suffix(".md").write_text(text)


def measure(dtype: str, rounds: int) -> dict[str, Any]:
    """Everything in one compute type, in turn."""
    import torch

    from covary.engines.local import LocalEngine
    from covary.memory import memory_for_training
    from covary.rollout.transformers import TransformersRollout
    from covary.types import Request, Sampling

    model, tokenizer, shape = smollm2_shape()
    autocast = torch.bfloat16 if dtype == "bfloat16" else None
    engine, rollout = LocalEngine(model, autocast=autocast), TransformersRollout(model, tokenizer, autocast=autocast)
    rollout.end_ids = frozenset()  # every completion has all its tokens
    draw = torch.Generator().manual_seed(0)
    groups, batch, algorithm = update_input(draw, shape.vocabulary, [(PROMPT, [LENGTH] * COMPLETIONS)] * GROUPS)

    def generate(max_tokens: int) -> None:
        rollout.generate([[Request(COMPLETIONS)]] * GROUPS, groups, Sampling(max_tokens), seed=0)

    def step() -> None:
        engine.step(0.0)

    floor = bare_decode_step(model, shape, PROMPT + (SHORT + LENGTH) // 2, autocast or torch.float32)
    products = dict(matrix_products(shape, autocast or torch.float32))
    work: dict[str, Callable[[], None]] = {
        "gradient": lambda: engine.forward_backward(groups, batch, algorithm) and None,
        "optimizer": step,
        "short": lambda: generate(SHORT),
        "long": lambda: generate(LENGTH),
        "floor": floor,
        **{name: run for name, (run, _) in products.items()},
    }
    with memory_for_training(torch.device("cpu")):  # as the training loop does
        seconds = in_turn(work, rounds)
    needed = update_operations(shape, [(PROMPT, [LENGTH] * COMPLETIONS)] * GROUPS)
    rates = {name: operations / seconds[name] for name, (_, operations) in products.items()}
    update = seconds["gradient"] + seconds["optimizer"]
    decode = (seconds["long"] - seconds["short"]) / (LENGTH - SHORT)
    best = max(rates, key=lambda name: rates[name])
    return {
        "rate_gflops": rates[best] / 1e9,
        "rate_of": best,
        "rates_gflops": {name: rate / 1e9 for name, rate in rates.items()},
        "needed_gflop": {name: operations / 1e9 for name, operations in needed.items()},
        "update_floor_s": sum(needed.values()) / rates[best],
        "update_s": update,
        "gradient_s": seconds["gradient"],
        "optimizer_s": seconds["optimizer"],
        "update_share_of_rate": sum(needed.values()) / update / rates[best],
        "gradient_share_of_rate": sum(needed.values()) / seconds["gradient"] / rates[best],
        "decode_step_ms": decode * 1e3,
        "decode_floor_ms": seconds["floor"] * 1e3,
        "decode_ratio": decode / seconds["floor"],
    }


def in_turn(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each, one after the other in every round; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, run in work.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def smollm2_shape() -> tuple[Any, Any, Shape]:
    """A random model of SmolLM2-135M's shape, some tokenizer, and its matrices."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from covary.fused import use_fused
    from covary.models.loading import load_tokenizer

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    use_fused(model)  # as `load_model` does
    return model, load_tokenizer("tiny"), Shape(576, 1536, 30, 9, 3, 64, 49152)


def update_input(draw: Any, vocabulary: int, sizes: Sequence[tuple[int, Sequence[int]]]) -> tuple[Any, Any, Any]:
    """Random groups of (prompt length, completion lengths), their batch, and GRPO."""
    import torch

    from covary.algorithms import ALGORITHMS
    from covary.collate import collate
    from covary.types import Completion, Example, Group

    def ids(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=draw).tolist()

    groups = [
        Group(
            Example(str(number), ""),
            {"prompt": ids(prompt)},
            [Completion(ids(n), "", "length") for n in lengths],
            rewards=[float(i % 2) for i in range(len(lengths))],
        )
        for number, (prompt, lengths) in enumerate(sizes)
    ]
    batch = collate(groups, max(n for _, lengths in sizes for n in lengths))
    advantage = torch.randn(len(batch), generator=draw)
    batch = batch.with_numbers({"old": torch.zeros(batch.tokens.shape), "advantage": advantage}).with_totals()
    return groups, batch, ALGORITHMS["grpo"](kl_coef=0.0)


def matrix_products(shape: Shape, dtype: Any) -> list[tuple[str, tuple[Callable[[], None], float]]]:
    """By name: a product to time, and its operations."""
    import torch

    tokens = GROUPS * (PROMPT + COMPLETIONS * (LENGTH - 1))
    layers = {(tokens, outputs, inputs) for outputs, inputs in shape.matrices}
    sizes = [*sorted(layers), (HEAD_ROWS, shape.vocabulary, shape.hidden), *((n, n, n) for n in SQUARES)]
    found = []
    for rows, outputs, inputs in sizes:
        x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
        repeats = max(1, int(TIMED_OPERATIONS / (2 * rows * outputs * inputs)))

        def run(x: Any = x, weight: Any = weight, repeats: int = repeats) -> None:
            for _ in range(repeats):
                torch.nn.functional.linear(x, weight)

        found.append((f"{rows}x{inputs}x{outputs}", (run, 2.0 * rows * outputs * inputs * repeats)))
    return found


def bare_decode_step(model: Any, shape: Shape, length: int, dtype: Any) -> Callable[[], None]:
    """The matrix products of one decode step and nothing else, on the model's own weights."""
    import torch

    rows = GROUPS * COMPLETIONS
    weights = [m.weight.detach().to(dtype) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {n: torch.randn(rows, n, dtype=dtype) for n in {weight.shape[1] for weight in weights}}
    queries = torch.randn(rows * shape.kv_heads, shape.heads // shape.kv_heads, shape.head, dtype=dtype)
    caches = [
        (torch.randn(rows * shape.kv_heads, length, shape.head, dtype=dtype), torch.randn(rows * shape.kv_heads, length, shape.head, dtype=dtype))
        for _ in range(shape.layers)
    ]  # fmt: skip

    def step() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        for keys, values in caches:
            torch.bmm(torch.bmm(queries, keys.transpose(1, 2)), values)

    return step


def page(results: dict[str, Any]) -> str:
    """The results as a page."""
    lines = [
        "# How close to the machine",
        "",
        f"Written by `python benchmarks/limits.py --rounds {results['rounds']} --out benchmarks/results/limits`, whose docstring says",
        f"what is counted. {results['threads']} threads, torch {results['torch']}; the update reads its rows in one pass.",
        "",
        "| | float32 | bfloat16 |",
        "|---|---|---|",
    ]
    rows = {
        "best matrix product, GFLOP/s": lambda r: f"{r['rate_gflops']:.0f} ({r['rate_of']})",
        "needed by an update, GFLOP": lambda r: f"{sum(r['needed_gflop'].values()):.0f}",
        "update at that rate, s": lambda r: f"{r['update_floor_s']:.2f}",
        "update, s": lambda r: f"{r['update_s']:.2f}",
        "- loss and gradient, s": lambda r: f"{r['gradient_s']:.2f}",
        "- clip and optimizer, s": lambda r: f"{r['optimizer_s']:.2f}",
        "share of the rate, whole update": lambda r: f"{r['update_share_of_rate']:.0%}",
        "share of the rate, loss and gradient": lambda r: f"{r['gradient_share_of_rate']:.0%}",
        "bare products of a decode step, ms": lambda r: f"{r['decode_floor_ms']:.1f}",
        "decode step, ms": lambda r: f"{r['decode_step_ms']:.1f}",
        "decode step / bare products": lambda r: f"{r['decode_ratio']:.2f}",
    }
    for name, cell in rows.items():
        lines.append(f"| {name} | {cell(results['float32'])} | {cell(results['bfloat16'])} |")
    lines += [
        "",
        "Rates by shape (rows x inputs x outputs), GFLOP/s:",
        "",
        "| shape | float32 | bfloat16 |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {rate:.0f} | {results['bfloat16']['rates_gflops'][name]:.0f} |"
        for name, rate in results["float32"]["rates_gflops"].items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
