"""How time and memory of scoring and of an update grow with k and with the lengths: packed trees against padded rows.

    python benchmarks/growth.py [--repeat 2] [--threads 2] [--out benchmarks/results/growth]

A random model of SmolLM2-135M's shape, float32, one group of k completions of one prompt, all in one forward pass
(`micro_batch_tokens` without bound). One of k (2..32), prompt (32..1024) and completion (16..512 tokens) changes at a
time; the others stay at 4, 128 and 32 (so that padded rows fit into 16 GB). Beside them the cell k 8, prompt 512,
completion 32.

Each cell and layout is a process of its own, which first does the same at a small size. Time is the least of `--repeat`:
of `LocalEngine.score` (no gradient) and of `LocalEngine.forward_backward` (GRPO's loss, no optimizer). Memory is the
largest resident set meanwhile, less what was resident before with model and gradients there. Exponents are slopes of a
least-squares line through the logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FACTORS = {
    "k": (2, 4, 8, 16, 32),
    "prompt": (32, 128, 256, 512, 1024),
    "completion": (16, 32, 128, 256, 512),
}
CENTRE = {"k": 4, "prompt": 128, "completion": 32}
LONG_PROMPT = {"k": 8, "prompt": 512, "completion": 32}
LAYOUTS = ("packed", "padded")
MEASURES = ("score_s", "score_mib", "update_s", "update_mib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    parser.add_argument("--cell", nargs=2, metavar=("LAYOUT", "SIZES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        layout, sizes = arguments.cell
        print(json.dumps(measure(layout, **json.loads(sizes), repeat=arguments.repeat, threads=arguments.threads)))
        return
    cells = []
    for sizes in all_sizes():
        cell: dict[str, Any] = dict(sizes)
        for layout in LAYOUTS:
            command = [sys.executable, __file__, "--cell", layout, json.dumps(sizes)]
            command += ["--repeat", str(arguments.repeat), "--threads", str(arguments.threads)]
            environ = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ)
            cell[layout] = json.loads(done.stdout)
            numbers = "  ".join(f"{name} {value:g}" for name, value in cell[layout].items())
            print(f"{json.dumps(sizes):50} {layout:7} {numbers}", flush=True)
        cells.append(cell)
    results = {"cells": cells, "exponents": exponents(cells), "threads": arguments.threads}
    text = page(results)
    print(text)
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        arguments.out.with_suffix(".md").write_text(text)


def all_sizes() -> list[dict[str, int]]:
    """Every cell once."""
    cells = [CENTRE | {factor: value} for factor, values in FACTORS.items() for value in values]
    return [cell for i, cell in enumerate([*cells, LONG_PROMPT]) if cell not in cells[:i]]


def measure(layout: str, *, k: int, prompt: int, completion: int, repeat: int, threads: int) -> dict[str, float]:
    """One cell in this process."""
    import torch
    from limits import smollm2_shape, update_input

    from covary.engines.local import LocalEngine
    from covary.scoring import trees
    from covary.types import Score, Stream

    torch.set_num_threads(threads)
    if layout == "padded":
        trees.use_trees = lambda model: "compared with padded rows"
    model, _, shape = smollm2_shape()
    engine = LocalEngine(model, micro_batch_tokens=2**30)
    assert (engine.not_packed is None) == (layout == "packed")
    draw = torch.Generator().manual_seed(0)
    small, large = (
        update_input(draw, shape.vocabulary, [(p, [c] * n)]) for p, c, n in ((8, 4, 2), (prompt, completion, k))
    )

    def score(groups: Any, batch: Any, algorithm: Any) -> None:
        engine.score(groups, [Score("old", Stream("old"))])

    found = {}
    engine.forward_backward(*small)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    before = resident("VmRSS")
    for name, run in (("score", score), ("update", engine.forward_backward)):
        run(*small)
        seconds = []
        for _ in range(repeat):
            begun = time.perf_counter()
            run(*large)
            seconds.append(time.perf_counter() - begun)
        found |= {f"{name}_s": round(min(seconds), 4), f"{name}_mib": round(resident("VmHWM") - before, 1)}
    return found


def resident(name: str) -> float:
    """MiB of this process's memory of a kind (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The b of values ~ a * sizes ** b: the slope of the least-squares line through the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - centre_x) ** 2 for a in x)


def along(cells: Sequence[dict[str, Any]], factor: str) -> list[dict[str, Any]]:
    """The cells in which that factor alone differs from the centre, in its order."""
    others = {name: value for name, value in CENTRE.items() if name != factor}
    line = [cell for cell in cells if all(cell[name] == value for name, value in others.items())]
    return sorted(line, key=lambda cell: cell[factor])


def exponents(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By factor, layout and measure."""
    return {
        factor: {
            layout: {
                name: round(exponent([c[factor] for c in line], [c[layout][name] for c in line]), 2)
                for name in MEASURES
            }
            for layout in LAYOUTS
        }
        for factor in FACTORS
        if (line := along(cells, factor))
    }


def page(results: dict[str, Any]) -> str:
    """The results as a page."""
    lines = [
        "# Growth of scoring and update",
        "",
        "Written by `python benchmarks/growth.py --out benchmarks/results/growth`, whose docstring says what is measured.",
        f"{results['threads']} threads; packed / padded, and padded over packed in brackets.",
        "",
        "| k | prompt | completion | score, s | score, MiB | update, s | update, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in results["cells"]:
        row = [str(cell[factor]) for factor in FACTORS]
        for name in MEASURES:
            packed, padded = cell["packed"][name], cell["padded"][name]
            row.append(f"{packed:.3g} / {padded:.3g} ({padded / packed:.1f}x)")
        lines.append("| " + " | ".join(row) + " |")
    lines += [
        "",
        "Fitted exponents, packed / padded:",
        "",
        "| in | score, s | score, MiB | update, s | update, MiB |",
        "|---|---|---|---|---|",
    ]
    for factor, found in results["exponents"].items():
        row = [f"{found['packed'][name]:.2f} / {found['padded'][name]:.2f}" for name in MEASURES]
        lines.append(f"| {factor} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
