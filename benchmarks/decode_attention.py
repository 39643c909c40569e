"""A layer's attention in a decode step, prompts shared and copied (covary/rollout/steps.py).

    python benchmarks/decode_attention.py [--rounds 60] [--threads 2] [--json FILE]

Some rows behind prompts of one length, in the middle of their completions. The two ways alternate; numbers are medians,
the ratio is that of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

SMOLLM2 = {"prompts": 4, "completion": 24, "heads": 9, "kv": 3, "width": 64}
CASES = {
    **{
        f"{rows} rows, prompt {prompt}": {**SMOLLM2, "rows": rows, "prompt": prompt}
        for rows in (4, 32)
        for prompt in (16, 64, 128, 256, 1024)
    },
    "tiny": {"rows": 512, "prompts": 64, "prompt": 22, "completion": 4, "heads": 4, "kv": 4, "width": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    result: dict[str, object] = {"threads": arguments.threads, "torch": torch.__version__}
    for name, case in CASES.items():
        result[name] = found = measure(case, arguments.rounds)
        print(f"{name:24} {found}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(case: dict[str, int], rounds: int) -> dict[str, float]:
    """Milliseconds of both ways, and the median of their ratios."""
    import torch

    from covary.rollout.steps import Cache, CopiedPrompts, SharedPrompts

    rows, prompts, prompt, completion = (case[name] for name in ("rows", "prompts", "prompt", "completion"))

    def numbers(sequences: int, tokens: int) -> torch.Tensor:
        return torch.randn(sequences, case["kv"], tokens, case["width"])

    tree = [row * prompts // rows for row in range(rows)]
    given = tree, [completion - 1] * rows, [prompt] * prompts
    device = torch.device("cpu")
    of_prompts = numbers(prompts, prompt), numbers(prompts, prompt)
    own = numbers(rows, completion), numbers(rows, completion)
    copied = (torch.cat([x[tree], y], dim=2) for x, y in zip(of_prompts, own, strict=True))
    ways = (
        (SharedPrompts.of(*given, device), Cache(*of_prompts, *own)),
        (CopiedPrompts.of(*given, prompt, device), Cache(*of_prompts, *copied)),
    )
    query = torch.randn(rows, case["heads"], case["width"])

    def seconds(way: tuple[SharedPrompts | CopiedPrompts, Cache]) -> float:
        step, cache = way
        begun = time.perf_counter()
        step.attend(cache, query, None, None)
        return time.perf_counter() - begun

    with torch.no_grad():
        pairs = [tuple(map(seconds, ways)) for _ in range(rounds + 5)][5:]
    shared_s, copied_s = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return {"shared_ms": round(shared_s, 3), "copied_ms": round(copied_s, 3), "ratio": round(ratio, 2)}


if __name__ == "__main__":
    main()
