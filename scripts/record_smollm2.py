"""Train SmolLM2-135M-Instruct with the shipped recipe and write docs/results/smollm2.md.

    python scripts/fetch_smollm2.py
    python scripts/record_smollm2.py [--run runs/smollm2] [--samples 4]

The run may be cut: started again, it goes on from its newest checkpoint. Before and after are measured on the same
held-out questions with the same seeds of sampling; the interval is that of the mean of paired differences by question.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from covary.compare import differences
from covary.evaluate import Sample
from covary.samples import whole

RECIPE = Path("recipes/smollm2_reasoning_gym.yaml")
SECTIONS = ("rollout", "reward", "score", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/results/smollm2.md"))
    arguments = parser.parse_args()

    if (arguments.run / "config.yaml").is_file():
        command = ["train", "--resume", str(arguments.run)]
    else:
        command = ["train", str(RECIPE), f"out={arguments.run}"]
    subprocess.run([sys.executable, "-m", "covary", *command, "--quiet"], check=True)

    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    folders = [arguments.run / "evaluation" / name for name in ("before", "after")]
    for model, out in zip((recipe["model"]["name"], arguments.run), folders, strict=True):
        # As in the run: the same questions, seed and limit. Started again, it goes on.
        command = ["eval", str(model), "--task", str(RECIPE), "-n", str(arguments.samples), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "covary", *command, "--quiet"], check=True)
    before, after = ([s for own in read(folder).values() for s in own] for folder in folders)
    rows = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    arguments.out.write_text(page(recipe, before, after, rows, arguments.samples), encoding="utf-8")


def read(out: Path) -> dict[str, list[Sample]]:
    """Samples of a finished evaluation of one task, by question."""
    (settings,) = out.glob("*/settings.json")
    sampling = json.loads(settings.read_text(encoding="utf-8"))["sampling"]
    return whole(settings.parent, sampling["samples"] + sampling["greedy"])


def page(
    recipe: dict[str, Any], before: list[Sample], after: list[Sample], rows: list[dict[str, Any]], samples: int
) -> str:
    # A row a task: the first part of a question's id.
    parts = {sample.id.partition("/")[0] for sample in before}
    of = {name: [[s for s in own if s.id.startswith(f"{name}/")] for own in (before, after)] for name in sorted(parts)}
    lines = []
    for task, (old, new) in {**of, "all": [before, after]}.items():
        found = differences(task, old, new)[0]
        mean_, half = found.difference.mean, found.difference.half
        cells = [f"{found.a:.3f} → {found.b:.3f}", f"{mean_:+.3f} ({mean_ - half:+.3f} to {mean_ + half:+.3f})"]
        cells += [f"{found.greedy.a:.3f} → {found.greedy.b:.3f}"] if found.greedy else []
        lines.append(f"| {task} | {found.difference.problems} | {' | '.join(cells)} |")
    steps = [row for row in rows if "time/train" in row]
    curve = [
        f"| {row['step']} | {row['reward/mean']:.3f} | {row['completion/length']:.1f} | {row['completion/truncated']:.2f} "
        f"| {row['kl/old']:.4f} | {row['groups/zero_variance']:g} |"
        for row in steps
        if row["step"] == 1 or row["step"] % 5 == 0
    ]
    seconds = {name: mean(row[f"time/{name}"] for row in steps) for name in SECTIONS}
    split = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    rollout = recipe["rollout"]
    return f"""# SmolLM2-135M-Instruct on Reasoning Gym

`covary train {RECIPE}`: GVPO (k = {rollout["completions"]}, {rollout["prompts"]} prompts a step, {len(steps)} steps, full fine-tuning, bfloat16 autocast over float32 weights), rewarded by Reasoning
Gym's own scorers on the last number of each answer. No question of test occurs in training.

Held-out questions, {samples} samples each at temperature 1, before → after; the difference is paired by question, with its 95 % interval:

| task | questions | accuracy, temperature 1 | difference | greedy accuracy |
|---|---|---|---|---|
{chr(10).join(lines)}

Training, every fifth step (rewards include Reasoning Gym's partial credit):

| step | mean reward | tokens | truncated | KL to the old policy | groups without variance |
|---|---|---|---|---|---|
{chr(10).join(curve)}

Seconds a step, mean: {split}; {sum(seconds.values()):.1f} together.

Made by `python scripts/record_smollm2.py` on {platform.machine()}, torch {version("torch")}, transformers {version("transformers")}.
"""


if __name__ == "__main__":
    main()
