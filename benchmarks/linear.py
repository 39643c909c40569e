"""A decode step's matrix products with plain and with reordered weights (covary/rollout/linear.py).

    python benchmarks/linear.py [--rows 1,2,4,8,32,64,256] [--rounds 9] [--threads 2] [--json FILE]

The linear layers of a random model of SmolLM2-135M's shape, each with weights of its own, one after the other as a
decode step does it. Plain and reordered alternate; numbers are medians. Also the time that reordering takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,32,64,256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch
    from torch import nn

    from covary.rollout.linear import reordered_weights

    torch.set_num_threads(arguments.threads)
    shapes = [(576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576)] * 30 + [
        (576, 49152)
    ]
    layers = nn.ModuleList(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in shapes)

    def seconds(rows: int) -> float:
        given = {width: torch.randn(rows, width) for width in (576, 1536)}
        start = time.perf_counter()
        for layer in layers:
            layer(given[layer.in_features])
        return time.perf_counter() - start

    result: dict[str, object] = {"threads": arguments.threads, "torch": torch.__version__}
    with torch.no_grad():
        start = time.perf_counter()
        with reordered_weights([layers], None):
            result["reordering_s"] = round(time.perf_counter() - start, 3)
        for rows in map(int, arguments.rows.split(",")):
            pairs = []
            for _ in range(arguments.rounds + 1):
                plain = seconds(rows)
                with reordered_weights([layers], None):
                    pairs.append((plain, seconds(rows)))
            plain, reordered = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
            ratio = statistics.median(a / b for a, b in pairs[1:])
            result[str(rows)] = {
                "plain_ms": round(1e3 * plain, 1),
                "reordered_ms": round(1e3 * reordered, 1),
                "ratio": round(ratio, 2),
            }
            print(
                f"{rows:4} rows: plain {1e3 * plain:.1f} ms, reordered {1e3 * reordered:.1f} ms, ratio {ratio:.2f}",
                flush=True,
            )
    print(f"reordering {result['reordering_s']} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
