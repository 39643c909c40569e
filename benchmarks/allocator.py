"""A step on a CPU that keeps freed memory (covary/memory.py), and one that leaves it to the C library's own rules.

    python benchmarks/allocator.py [--pairs 3] [--case smollm2_full] [--json FILE]

Covary's side of a case of `vs_trl.py`, each in a process of its own, in turn forwards and backwards: seconds of its
parts, medians of the steps that count, and the largest resident set. Ratios are without over with, medians over pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import vs_trl

WITHOUT = """
import runpy, sys
from contextlib import nullcontext
from importlib import import_module
import_module("covary.train").memory_for_training = lambda device: nullcontext()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", choices=vs_trl.CASES, default="smollm2_full")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    case = vs_trl.CASES[arguments.case]
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        settings = vs_trl.prepare(case, arguments.model, Path(folder)) | {
            "threads": arguments.threads,
            "warm_up": vs_trl.WARM_UP,
            "steps": case.steps,
            "algorithm": vs_trl.ALGORITHMS["grpo"],
        }
        for pair in range(arguments.pairs):
            for side in list(found) if pair % 2 == 0 else reversed(list(found)):
                found[side].append(measured(side, settings | {"seed": pair}, Path(folder)))
                print(f"{side:8} {found[side][-1]}", flush=True)
    result: dict[str, object] = {"case": arguments.case, "pairs": arguments.pairs, "threads": arguments.threads}
    for key in found["with"][0]:
        result[f"{key}_with"] = statistics.median(row[key] for row in found["with"])
        ratio = [a[key] / b[key] for a, b in zip(found["without"], found["with"], strict=True)]
        result[f"{key}_ratio"] = round(statistics.median(ratio), 3)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measured(side: str, settings: dict, folder: Path) -> dict[str, float]:
    """One process."""
    (folder / "settings.json").write_text(json.dumps(settings))
    threads = str(settings["threads"])
    script = [str(vs_trl.HERE / "vs_trl_side.py"), "covary", str(folder / "settings.json"), str(folder / "result.json")]
    start = ["-c", WITHOUT] if side == "without" else []
    subprocess.run([sys.executable, *start, *script], check=True, env=os.environ | {"OMP_NUM_THREADS": threads})
    result = json.loads((folder / "result.json").read_text())
    parts = {f"{part}_s": round(statistics.median(result[part]), 3) for part in vs_trl.PARTS}
    return parts | {"peak_mib": round(result["memory"])}


if __name__ == "__main__":
    main()
