"""CoVRL on a real model and questions without a verifier: SmolLM2-135M-Instruct, one line of thought before the answer.

    python scripts/record_covrl_smollm2.py DATA [--steps 20] [--out docs/results/covrl_smollm2.md]

DATA: JSON Lines with `question` and `reference`, such as rows of WebInstruct-verified; its SHA-256 goes into the page. The
model: `python scripts/fetch_smollm2.py` makes its folder. Writes the curves of one run, per source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import covary
from covary.api import Trained

MODEL = "models/smollm2-135m-instruct"
SHOWN = {"reward": "log p(answer)", "nll": "NLL, nats a token", "length": "trace, tokens", "kl": "KL, nats a token"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/covrl_smollm2"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/covrl_smollm2.md"))
    arguments = parser.parse_args()
    start = time.perf_counter()
    trained = train(arguments.data, arguments.steps, arguments.folder)
    minutes = (time.perf_counter() - start) / 60
    lines = (trained.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    arguments.out.write_text(page(rows, arguments.data, minutes, arguments.steps), encoding="utf-8")


def train(data: Path, steps: int, folder: Path) -> Trained:
    """One run."""
    return covary.train(
        quiet=True,
        out=str(folder),
        steps=steps,
        model=MODEL,
        task={
            "name": "jsonl", "path": str(data), "prompt": "question", "answer": "reference", "test": 0,
            "template": "thought",
        },
        algorithm={"name": "covrl"},
        rollout={"prompts": 8, "completions": 4, "max_tokens": 48},
        optimizer={"lr": 1e-5, "prompts": 4, "warmup": 0.05},
        engine={"autocast": "bfloat16"},
        log={"samples": 1},
    )  # fmt: skip


def page(rows: list[dict[str, float]], data: Path, minutes: float, steps: int) -> str:
    """The page's text."""
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    columns = [f"{source} {what}" for source in ("prior", "posterior") for what in SHOWN.values()]
    table = [f"| step | {' | '.join(columns)} | closed traces |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        cells = [row.get(f"covrl/{source}/{key}") for source in ("prior", "posterior") for key in SHOWN]
        shown = ["" if cell is None else f"{cell:.3g}" for cell in cells]
        lost = sum(row.get(f"traces/{fault}", 0) for fault in ("truncated", "unclosed", "tagged", "empty"))
        table.append(f"| {row['step']:g} | {' | '.join(shown)} | {1 - lost / 32:.2f} |")
    return f"""# CoVRL on SmolLM2-135M-Instruct

One run of CoVRL (default settings, k = 4, 8 questions a step, two updates, learning rate 1e-5, traces of at most 48 tokens, template
`thought`) on rows of `question` and `reference`, without a verifier. File: {data.name}, SHA-256 `{digest}`.

{chr(10).join(table)}

Means of the first and of the last third of the steps: {_moves(rows)}. A reward is a sum over the answer's tokens, so it goes with the length of the drawn answers; the NLL is per token.
One seed, and whether the answers are right was not graded.

Made by `python scripts/record_covrl_smollm2.py {data.name} --steps {steps}` in {minutes:.0f} minutes ({platform.machine()},
torch {version("torch")}, transformers {version("transformers")}).
"""


def _moves(rows: list[dict[str, float]]) -> str:
    part = max(1, len(rows) // 3)
    found = []
    for source in ("prior", "posterior"):
        for key in ("nll", "kl", "length"):
            name = f"covrl/{source}/{key}"
            early, late = ([row[name] for row in own if name in row] for own in (rows[:part], rows[-part:]))
            if early and late:
                found.append(f"{source} {SHOWN[key]} {fmean(early):.3g} → {fmean(late):.3g}")
    return "; ".join(found)


if __name__ == "__main__":
    main()
