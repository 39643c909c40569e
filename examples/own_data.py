"""Data and a reward of your own: JSON Lines with your column names, partial credit for near misses.

    python examples/own_data.py [FOLDER]

The reward is a function in TRL's convention: lists of prompts, completions and columns in, one number a row out. Columns
arrive as they stand in the file. (`completion, answer -> number`, one at a time, works as well.)
"""

import json
import random
import re
import sys
from pathlib import Path

import covary


def write_receipts(path: Path, count: int) -> None:
    """Pretend that this came out of your own system."""
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            prices = [rng.randrange(1, 60), rng.randrange(1, 40)]
            row = {
                "receipt": number,
                "question": f"{prices[0]} + {prices[1]} =",
                "total": sum(prices),
                "prices": prices,
            }
            file.write(json.dumps(row) + "\n")


def near(completions, total, prices, **columns):
    """1 for the total, less the further away, 0 from the larger price on; None where there is no number to judge."""
    rewards = []
    for text, right, parts in zip(completions, total, prices, strict=True):
        found = re.search(r"-?\d+", text)
        rewards.append(None if found is None else max(0.0, 1 - abs(int(found[0]) - right) / max(parts)))
    return rewards


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_data")
    folder.mkdir(parents=True, exist_ok=True)
    write_receipts(folder / "receipts.jsonl", 400)
    trained = covary.train(
        model="tiny",
        task={"name": "jsonl", "path": folder / "receipts.jsonl", "prompt": "question", "answer": "total", "test": 20},
        algorithm={"name": "gvpo", "beta": 0.1},
        reward=near,
        steps=4,
        rollout={"prompts": 16, "completions": 8, "max_tokens": 8},
        optimizer={"lr": 1e-4, "prompts": 8},
        out=folder / "run",
    )
    print(
        f"reward {trained.metrics['reward/mean']:.2f}, {trained.metrics['rows/unscorable']:.0f} rows without a number"
    )
