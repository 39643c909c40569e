"""Attention of a layer over trees (covary/attention.py): in which way, and what is padded together.

    python benchmarks/attention.py [--rounds 15] [--threads 2] [--json FILE]

One layer's forward and backward pass. Prompts and completions of one length each are attended to at once (a fused
kernel) and in parts; completions of evenly spread lengths as one block, and in bunches of similar length. The two ways
alternate; numbers are medians, the ratio is that of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

CASES = {
    "smollm2_full": {"prompts": 4, "prompt": 64, "completions": 8, "completion": 47, "heads": 9, "kv": 3, "width": 64},
    "smollm2_ragged": {
        "prompts": 4,
        "prompt": 64,
        "completions": 8,
        "completion": 19,
        "heads": 9,
        "kv": 3,
        "width": 64,
    },
    "smollm2_short": {"prompts": 4, "prompt": 64, "completions": 8, "completion": 8, "heads": 9, "kv": 3, "width": 64},
    "long_prompt": {"prompts": 1, "prompt": 512, "completions": 8, "completion": 32, "heads": 9, "kv": 3, "width": 64},
    "long_completions": {
        **{"prompts": 1, "prompt": 64, "completions": 8, "completion": 512},
        **{"heads": 9, "kv": 3, "width": 64},
    },
    "tiny": {"prompts": 64, "prompt": 20, "completions": 8, "completion": 4, "heads": 4, "kv": 4, "width": 32},
}
RAGGED = ("smollm2_full", "long_completions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    result: dict[str, object] = {"threads": arguments.threads, "torch": torch.__version__}
    for name, case in CASES.items():
        result[name] = found = measure(case, arguments.rounds)
        print(f"{name:16} {found}", flush=True)
    for name in RAGGED:
        result[f"{name}, lengths from 1"] = found = measure_bunches(CASES[name], arguments.rounds)
        print(f"{name:16} lengths from 1: {found}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(case: dict[str, int], rounds: int) -> dict[str, float]:
    """Milliseconds of both ways, and the median of their ratios."""
    from covary.attention import Forest

    lengths = [case["completion"]] * (case["prompts"] * case["completions"])
    ways = Forest._at_once, Forest._in_parts
    patches = [patch.multiple(Forest, _at_once=way, _in_parts=way) for way in ways]
    return compare(("at_once_ms", "in_parts_ms"), patches, case, lengths, rounds)


def measure_bunches(case: dict[str, int], rounds: int) -> dict[str, float]:
    """The same of one block and of bunches."""
    from covary import partial_attention

    rows = case["prompts"] * case["completions"]
    lengths = [1 + row * (case["completion"] - 1) // (rows - 1) for row in range(rows)]
    patches = [patch.object(partial_attention, "_MOST_BUNCHES", most) for most in (1, partial_attention._MOST_BUNCHES)]
    return compare(("one_block_ms", "bunches_ms"), patches, case, lengths, rounds)


def compare(
    names: tuple[str, str], patches: Sequence[Any], case: dict[str, int], lengths: list[int], rounds: int
) -> dict[str, float]:
    """Milliseconds under both patches, and the median of their ratios."""
    import torch

    from covary.attention import Forest

    prompts = [case["prompt"]] * case["prompts"]
    tree = [row // case["completions"] for row in range(len(lengths))]
    tensors = [
        torch.randn(sum(prompts) + sum(lengths), heads, case["width"], requires_grad=True)
        for heads in (case["heads"], case["kv"], case["kv"])
    ]
    outer = torch.randn_like(tensors[0])

    def seconds(under: Any) -> float:
        with under:
            forest = Forest.of(prompts, lengths, tree, torch.device("cpu"))
            begun = time.perf_counter()
            torch.autograd.grad(forest.attend(torch.nn.Identity(), *tensors, None, None), tensors, outer)
            return time.perf_counter() - begun

    pairs = [tuple(map(seconds, patches)) for _ in range(rounds + 1)][1:]
    first, second = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return {names[0]: round(first, 2), names[1]: round(second, 2), "ratio": round(ratio, 2)}


if __name__ == "__main__":
    main()
