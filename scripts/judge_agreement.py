"""Compare a recipe's judge with the grader `math` on completions that are there already.

    python scripts/judge_agreement.py RECIPE SAMPLES.jsonl [...] [--limit N] [--json FILE]

RECIPE is any recipe whose `reward` is a judge; SAMPLES are files with `id`, `prompt`, `answer` and `completion` in each
line, such as a run's rollouts/step-*.jsonl. Rows without an answer are left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from covary.config import load_recipe, validate_reward
from covary.jsonlines import read_jsonl
from covary.models.rewards import build_model_reward
from covary.rewards import build_reward
from covary.rewards.agreement import Agreement, agreement
from covary.types import Example, UserError

SHOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("samples", type=Path, nargs="+")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        compare(arguments)
    except UserError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace) -> None:
    reward = load_recipe(arguments.recipe).get("reward")
    if not isinstance(reward, dict) or "judge" not in reward:
        raise UserError(f"{arguments.recipe}: reward: takes a judge here, reward: {{judge: {{model: NAME}}}}")
    judge = build_model_reward(validate_reward(reward, where=str(arguments.recipe)), "reward", "auto")
    rows = [row for path in arguments.samples for _, row in read_jsonl(path) if row.get("answer") is not None]
    rows = list(islice(rows, arguments.limit))
    if not rows:
        raise UserError("no row of the samples has an answer")
    examples = [Example(row["id"], row["prompt"], str(row["answer"])) for row in rows]
    texts = [row["completion"] for row in rows]
    math = build_reward("math")
    try:
        second = math(examples, texts)
    finally:
        math.close()
    first = judge(examples, texts)
    found = agreement(first, second)
    for line in report(found, judge.name):
        print(line)
    for i in found.disagreements[:SHOWN]:
        says, checks = first[i].value, second[i].value
        print(
            f"  {examples[i].id}: judge {says:g}, math {checks:g}: answer {examples[i].answer!r}, completion {texts[i][-80:]!r}"
        )
    for name, graded in (("judge", first), ("math", second)):
        if error := next((g.error for g in graded if g.error), None):
            print(f"  the first that {name} could not score: {error}")
    if arguments.json is not None:
        figures = {**asdict(found), "share": found.share, "kappa": found.kappa}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def report(found: Agreement, name: str) -> list[str]:
    """The table, as Markdown."""
    return [
        f"| | math: right | math: wrong |\n|---|---|---|\n| {name}: right | {found.both_right} | {found.only_first} |\n"
        f"| {name}: wrong | {found.only_second} | {found.both_wrong} |",
        f"agreement {found.share:.3f} of {found.scored}, kappa {found.kappa:.3f}; unscorable: {found.first_unscorable} by "
        f"the judge, {found.second_unscorable} more by math",
    ]


if __name__ == "__main__":
    main()
