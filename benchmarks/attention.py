"""Attention of a layer over trees, branches at once (a fused kernel) and in parts (covary/attention.py).

    python benchmarks/attention.py [--rounds 15] [--threads 2] [--json FILE]

One layer's forward and backward pass over prompts and completions of one length each. The two ways alternate; numbers
are medians, the ratio is that of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
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
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(case: dict[str, int], rounds: int) -> dict[str, float]:
    """Milliseconds of both ways, and the median of their ratios."""
    import torch

    from covary.attention import Forest

    rows = case["prompts"] * case["completions"]
    lengths = [case["prompt"]] * case["prompts"], [case["completion"]] * rows
    tree = [row // case["completions"] for row in range(rows)]
    tensors = [
        torch.randn(sum(map(sum, lengths)), heads, case["width"], requires_grad=True)
        for heads in (case["heads"], case["kv"], case["kv"])
    ]
    outer = torch.randn_like(tensors[0])
    forest = Forest.of(*lengths, tree, torch.device("cpu"))
    ways = Forest._at_once, Forest._in_parts

    def seconds(way: object) -> float:
        with patch.multiple(Forest, _at_once=way, _in_parts=way):
            begun = time.perf_counter()
            torch.autograd.grad(forest.attend(torch.nn.Identity(), *tensors, None, None), tensors, outer)
            return time.perf_counter() - begun

    pairs = [tuple(map(seconds, ways)) for _ in range(rounds + 1)][1:]
    at_once, in_parts = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return {"at_once_ms": round(at_once, 2), "in_parts_ms": round(in_parts, 2), "ratio": round(ratio, 2)}


if __name__ == "__main__":
    main()
