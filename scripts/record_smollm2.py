"""Train SmolLM2-135M-Instruct with the shipped recipe and write docs/results/smollm2.md.

    python scripts/fetch_smollm2.py
    python scripts/record_smollm2.py [--run runs/smollm2] [--samples 4]

The run may be cut: started again, it goes on from its newest checkpoint. Before and after are measured on the same
held-out questions with the same seeds of sampling; the interval is that of the mean of paired differences by question.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from covary.api import build_evaluator
from covary.evaluate import is_correct

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
    before = accuracy(recipe["model"]["name"], recipe, arguments.samples)
    after = accuracy(arguments.run, recipe, arguments.samples)
    rows = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    arguments.out.write_text(page(recipe, before, after, rows, arguments.samples), encoding="utf-8")


def accuracy(model: Any, recipe: dict[str, Any], samples: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Task -> question id -> (share of correct samples at temperature 1, greedy answer correct)."""
    evaluator = build_evaluator(
        model,
        recipe["task"],
        samples=samples,
        temperature=1.0,
        max_tokens=recipe["rollout"]["max_tokens"],
        seed=recipe["seed"],
    )
    try:
        groups, errors = evaluator.graded()
    finally:
        evaluator.reward.close()
    assert not errors, errors[0]
    found: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for group in groups:
        *sampled, greedy = [float(is_correct(reward)) for reward in group.rewards or []]
        found[group.example.columns["task"]][group.example.id] = (mean(sampled), greedy)
    return found


def paired(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Mean paired difference at temperature 1, and half the width of its 95 % interval (normal)."""
    differences = [after[id][0] - before[id][0] for id in before]
    return mean(differences), 1.96 * stdev(differences) / math.sqrt(len(differences))


def page(recipe: dict[str, Any], before: Any, after: Any, rows: list[dict[str, Any]], samples: int) -> str:
    every = {name: {k: v for task in found.values() for k, v in task.items()} for name, found in
             (("before", before), ("after", after))}  # fmt: skip
    lines = []
    for task in [*sorted(before), "all"]:
        old, new = (every["before"], every["after"]) if task == "all" else (before[task], after[task])
        difference, half = paired(old, new)
        cells = (
            f"{mean(v[0] for v in old.values()):.3f} → {mean(v[0] for v in new.values()):.3f}",
            f"{difference:+.3f} ({difference - half:+.3f} to {difference + half:+.3f})",
            f"{mean(v[1] for v in old.values()):.3f} → {mean(v[1] for v in new.values()):.3f}",
        )
        lines.append(f"| {task} | {len(old)} | {' | '.join(cells)} |")
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

`covary train {RECIPE}`: GVPO (k = {rollout["completions"]}, {rollout["prompts"]} prompts a step, {len(steps)} steps, full fine-tuning in float32), rewarded by Reasoning
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
