"""Run a quickstart with several seeds and write docs/results/<recipe>.md.

    python scripts/record_quickstart.py [quickstart | distill_quickstart | covrl_quickstart] [--seeds 0,1,2] [--out FILE]

Each run is the README's own command with another seed; times are of the whole command, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

TITLES = {
    "quickstart": """# Quickstart

`make quickstart` runs `covary train recipes/quickstart.yaml`: GVPO (k = 8) on Reasoning Gym `chain_sum`, two terms of up to two
digits, from the model that ships with covary (see covary/models/tiny/README.md for what it is).""",
    "distill_quickstart": """# Distillation quickstart

`covary train recipes/distill_quickstart.yaml`: GVPO-OPD (k = 8, f = 1) on Reasoning Gym `basic_arithmetic`, sums of two terms of up to two
digits, a byte-level student and a teacher with another tokenizer, both shipped (see covary/models/tiny_student/README.md for what they are).
No reward and no answer is read in training.""",
    "covrl_quickstart": """# CoVRL quickstart

`covary train recipes/covrl_quickstart.yaml`: CoVRL (k = 8) on Reasoning Gym `chain_sum`, two terms of up to two digits, from a shipped model
that reasons in tags (see covary/models/tiny_think/README.md for what it is). No verifier is used in training: traces are rewarded by the
likelihood of the reference answer. Graders read held-out completions only.""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart", choices=TITLES)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, help="default: docs/results/<recipe>.md")
    arguments = parser.parse_args()
    recipe = f"recipes/{arguments.recipe}.yaml"

    lines = []
    curves = []
    figures: dict[str, str] = {}
    for seed in arguments.seeds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "covary", "train", recipe, f"seed={seed}", f"out={folder}/run", "--quiet"]
            start = time.perf_counter()
            subprocess.run(command, check=True)
            seconds = time.perf_counter() - start
            text = (Path(folder) / "run" / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        prefix = next(key for key in rows[0] if key.endswith("/accuracy")).removesuffix("accuracy")
        of_any = next(key for key in rows[0] if "/pass@" in key).removeprefix(prefix)
        figures = {"accuracy": "accuracy, temperature 1", "greedy": "greedy accuracy", of_any: of_any}
        evaluated = [row for row in rows if f"{prefix}accuracy" in row]
        first, last = evaluated[0], evaluated[-1]
        cells = [f"{first[prefix + name]:.3f} → {last[prefix + name]:.3f}" for name in figures]
        lines.append(f"| {seed} | {' | '.join(cells)} | {seconds:.0f} |")
        curve = ", ".join(f"{row['step']}: {row[f'{prefix}accuracy']:.3f}" for row in evaluated)
        curves.append(f"- seed {seed}: {curve}")
        print(lines[-1], flush=True)
    samples = of_any.partition("@")[2]
    command_line = " ".join(["python scripts/record_quickstart.py", *sys.argv[1:]])
    out = arguments.out or Path(f"docs/results/{arguments.recipe}.md")
    out.write_text(
        f"""{TITLES[arguments.recipe]} Figures are of 200
held-out questions that neither this training nor the making of the models has seen, {samples} samples each, before → after.

| seed | {" | ".join(figures.values())} | seconds |
|---|---|---|---|---|
{chr(10).join(lines)}

Held-out accuracy at temperature 1 by step:

{chr(10).join(curves)}

Made by `{command_line}` on {os.cpu_count()} cores ({platform.machine()}),
torch {version("torch")}, transformers {version("transformers")}.
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
