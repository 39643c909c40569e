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
    return {
        int(file.stem.removeprefix("step-")): [json.loads(line) for line in file.read_text().splitlines()]
        for file in files
    }


def question(row: dict) -> str:
    """The last turn of a chat prompt, or the text."""
    return row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]


def main(run: Path) -> None:
    """Print three tables."""
    steps = read(run)
    print("step  reward  right  distinct  truncated")
    for step, rows in steps.items():
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        distinct = len({(row["id"], row["completion"]) for row in rows}) / len(rows)
        cut = mean(row["finish"] == "length" for row in rows)
        right = mean(reward >= 1 for reward in rewards)
        print(f"{step:4}  {mean(rewards):6.3f}  {right:5.2f}  {distinct:8.2f}  {cut:9.2f}")

    by_question = defaultdict(list)
    for row in (row for rows in steps.values() for row in rows if row["reward"] is not None):
        by_question[question(row)].append(row)
    never = [rows for rows in by_question.values() if max(row["reward"] for row in rows) < 1]
    print(f"\n{len(never)} of {len(by_question)} questions never came right; some of them:")
    for rows in sorted(never, key=len, reverse=True)[:5]:
        print(
            f"  {question(rows[0])!r} (answer {rows[0]['answer']}): {sorted({row['completion'] for row in rows})[:4]}"
        )

    weighed = [row for rows in steps.values() for row in rows if row["weight"] is not None]
    print("\npushed hardest up, and down:")
    for row in (max(weighed, key=lambda row: row["weight"]), min(weighed, key=lambda row: row["weight"])):
        print(f"  {row['weight']:+.3f}  {question(row)!r} -> {row['completion']!r}, reward {row['reward']:g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
