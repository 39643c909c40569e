"""Whether memory stays flat: resident memory after every step of a run.

    python benchmarks/memory.py [--steps 200] [--json FILE] [RECIPE] [key=value ...]

Prints it at some steps, and its slope over the second half of the run (least squares), in MiB per 100 steps. The
graders' processes are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    from importlib import import_module

    import numpy as np

    from covary.api import build, resolve, run_and_close
    from covary.config import apply_overrides, load_recipe, validate
    from covary.log import Screen

    loop = import_module("covary.train")  # `covary.train` is the function
    resident: list[float] = []
    step = loop.train_step

    def watched(*args, **kwargs):
        row = step(*args, **kwargs)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20)
        return row

    loop.train_step = watched
    data = apply_overrides(load_recipe(arguments.recipe), arguments.overrides)
    with tempfile.TemporaryDirectory() as folder:
        data |= {"out": f"{folder}/run", "steps": arguments.steps, "log": {"samples": 0}}
        run = build(resolve(validate(data, where=arguments.recipe)), Screen(silent=True))
        run.evaluators = []
        run_and_close(run, None)
    half = len(resident) // 2
    slope = 100 * float(np.polyfit(np.arange(half, len(resident)), resident[half:], 1)[0])
    shown = {str(n): round(resident[n - 1], 1) for n in (1, 2, 10, 50, 100, 150, 200, 500, 1000) if n <= len(resident)}
    print(
        f"{arguments.recipe} {' '.join(arguments.overrides)}: MiB after step "
        + ", ".join(f"{n}: {mib}" for n, mib in shown.items())
    )
    print(f"slope over the second half {slope:+.1f} MiB per 100 steps")
    if arguments.json:
        result = {
            "recipe": arguments.recipe,
            "overrides": arguments.overrides,
            "mib": shown,
            "slope_mib_per_100_steps": round(slope, 2),
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
