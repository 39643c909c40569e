"""What happened in a run, from its files alone: reward by step, the questions that never come right, what was pushed.

    python examples/read_rollouts.py RUN_FOLDER

`rollouts/step-NNNNNN.jsonl` has a line for every completion; docs/concepts.md explains its keys.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean


def read(run: Path) -> dict[int, list[dict]]:
    """Rows by step."""
    files = sorted(run.glob("rollouts/step-*.jsonl"))
    if not files:
        sys.exit(f"{run} has no rollouts")
    return {int(f.stem.removeprefix("step-")): [json.loads(line) for line in f.read_text().splitlines()] for f in files}


def question(row: dict) -> str:
    """The last turn of a chat prompt, or the text."""
    return row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]


def main(run: Path) -> None:
    """Print three tables."""
    steps = read(run)
    if not any(row["reward"] is not None for rows in steps.values() for row in rows):
        sys.exit(f"{run} has no rewards: its method learns from completions alone")
    print("step  reward  right  distinct  truncated")
    for step, rows in steps.items():
        rewards = [row["reward"] for row in rows if row["reward"] is not None] or [float("nan")]
        distinct = len({(row["id"], row["completion"]) for row in rows}) / len(rows)
        right, cut = mean(reward >= 1 for reward in rewards), mean(row["finish"] == "length" for row in rows)
        print(f"{step:4}  {mean(rewards):6.3f}  {right:5.2f}  {distinct:8.2f}  {cut:9.2f}")

    by_question = defaultdict(list)
    for row in (row for rows in steps.values() for row in rows if row["reward"] is not None):
        by_question[question(row)].append(row)
    never = [rows for rows in by_question.values() if max(row["reward"] for row in rows) < 1]
    print(f"\n{len(never)} of {len(by_question)} questions never came right; some of them:")
    for rows in sorted(never, key=len, reverse=True)[:5]:
        tried = sorted({row["completion"] for row in rows})[:4]
        print(f"  {question(rows[0])!r} (answer {rows[0]['answer']}): {tried}")

    weighed = [row for rows in by_question.values() for row in rows if row["weight"] is not None]
    weighed.sort(key=lambda row: row["weight"])
    print("\npushed hardest up, and down:")
    for row in weighed[-1:] + weighed[:1]:
        print(f"  {row['weight']:+.3f}  {question(row)!r} -> {row['completion']!r}, reward {row['reward']:g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) == 2 else sys.exit("usage: python examples/read_rollouts.py RUN_FOLDER"))
