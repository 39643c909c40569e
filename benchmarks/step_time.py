"""Where the time of a quickstart step goes, and the peak memory of the process.

    python benchmarks/step_time.py [--steps 20] [--threads 2] [--json FILE] [RECIPE] [key=value ...]

The first two steps are left out (first calls of kernels). Prints the median and the range of each part in
seconds; no evaluation, one checkpoint at the end (outside the parts).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
from pathlib import Path

PARTS = ("rollout", "reward", "score", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    from covary.api import build, resolve, run_and_close
    from covary.config import apply_overrides, load_recipe, validate
    from covary.log import Screen

    data = apply_overrides(load_recipe(arguments.recipe), arguments.overrides)
    warm_up = 2
    with tempfile.TemporaryDirectory() as folder:
        data |= {"out": f"{folder}/run", "steps": arguments.steps + warm_up, "log": {"samples": 0}}
        run = build(resolve(validate(data, where=arguments.recipe)), Screen(silent=True))
        run.evaluators = []
        run_and_close(run, None)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][1 + warm_up :]
    seconds = {part: [row[f"time/{part}"] for row in rows] for part in PARTS}
    seconds["step"] = [sum(row[f"time/{part}"] for part in PARTS) for row in rows]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{arguments.recipe}, {len(rows)} steps, {arguments.threads} threads, torch {torch.__version__}, {platform.machine()}"
    )
    result: dict[str, float] = {"peak_memory_gib": round(memory, 3)}
    for name, values in seconds.items():
        result[name] = statistics.median(values)
        print(f"{name:8} median {result[name]:.3f} s  (min {min(values):.3f}, max {max(values):.3f})")
    print(f"peak resident memory of the process {memory:.2f} GiB (graders' processes apart)")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
