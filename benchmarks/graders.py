r"""Items a second of the `math` grader in its worker processes, and the agreement of graders with case tables.

    python benchmarks/graders.py [--data FOLDER] [--repeat 3] [--workers 2] [--json FILE]

FOLDER (default: `$COVARY_SHARED/data`) holds `gsm8k/test.jsonl`, `math500/test.jsonl` and `verifier_cases/`. An item is a
right or a wrong completion (the next row's answer) in a box behind two sentences, graded against a row's answer. The first
pass over all items warms the workers up (imports, the grammar's tables, parsed references) and is not counted; every other
pass is, and the median is told. `cpu_ms_an_item` is processor time of a second pass in this process, which does not depend on
what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from covary.rewards import Grader, Pool, grade
from covary.rewards.extract import stated_answer
from covary.rewards.pool import Item

HOSTILE = {
    "tower of exponents": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "3000 brackets": r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "5 MB of braces": "{" * 5_000_000,
    "1 MB of boxes": r"\boxed{" * 150_000,
    "an integral": r"\boxed{\int_0^1 x^{x^{x}} dx}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("COVARY_SHARED", ".")) / "data")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name, answers in [
        ("gsm8k", [row["answer"] for row in rows(arguments.data / "gsm8k" / "test.jsonl")]),
        ("math500", [row["answer"] for row in rows(arguments.data / "math500" / "test.jsonl")]),
    ]:
        results[name] = throughput(items_of(answers), arguments.workers, arguments.repeat)
        print(f"{name:10}", results[name], flush=True)
    results["hostile"] = {name: seconds(text) for name, text in HOSTILE.items()}
    print("hostile, seconds an item:", results["hostile"], flush=True)
    cases = [row for row in rows(arguments.data / "verifier_cases" / "math_verify_cases.jsonl") if "gold" in row]
    results["agreement"] = agreement(cases)
    print("agreement:", results["agreement"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def items_of(answers: list[str]) -> list[Item]:
    stated = [stated_answer(answer) if "####" in answer else answer for answer in answers]
    texts = [f"First we add what is given. Then we divide by two.\nSo the answer is $\\boxed{{{s}}}$." for s in stated]
    right = [(text, answer, {}) for text, answer in zip(texts, answers, strict=True)]
    wrong = [(text, answer, {}) for text, answer in zip([*texts[1:], texts[0]], answers, strict=True)]
    return [*right, *wrong]


def throughput(items: list[Item], workers: int, repeat: int) -> dict[str, float]:
    pool = Pool(workers, deadline=30)
    pool.run(Grader("math"), items)
    wall, verdicts = [], []
    for _ in range(repeat):
        started = time.perf_counter()
        verdicts = pool.run(Grader("math"), items)
        wall.append(time.perf_counter() - started)
    pool.close()
    half = len(items) // 2
    return {
        "items": len(items),
        "items_a_second": round(len(items) / statistics.median(wall)),
        "cpu_ms_an_item": round(1000 * cpu_of_one_pass(items) / len(items), 3),
        "right_accepted": sum(v.value == 1 for v in verdicts[:half]),
        "wrong_accepted": sum(v.value == 1 for v in verdicts[half:]),
        "unscorable": sum(v.value is None for v in verdicts),
    }


def cpu_of_one_pass(items: list[Item]) -> float:
    """Processor seconds of a second pass over the items, in this process."""
    for text, answer, columns in items:
        grade("math", text, answer, columns)
    started = time.process_time()
    for text, answer, columns in items:
        grade("math", text, answer, columns)
    return time.process_time() - started


def seconds(text: str) -> float:
    pool = Pool(1)
    pool.run(Grader("math"), [("1", "2", {})])
    started = time.perf_counter()
    pool.run(Grader("math"), [(text, "7", {})])
    took = time.perf_counter() - started
    pool.close()
    return round(took, 2)


def agreement(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Of `math` and of plain Math-Verify with each row's `expected`, and milliseconds of processor time a row."""
    import math_verify

    def ours(row: dict[str, Any]) -> bool:
        columns = {"tolerance": 10.0 ** -row["precision"]} if row.get("precision", 6) < 6 else {}
        said = grade("math", row["pred"], row["gold"], columns)
        return said is not None and said.verdict == "correct"

    def theirs(row: dict[str, Any], **options: Any) -> bool:
        gold, said = (math_verify.parse(row[key], parsing_timeout=0) for key in ("gold", "pred"))
        return math_verify.verify(gold, said, timeout_seconds=None, **options)

    def with_options(row: dict[str, Any]) -> bool:
        options = {"allow_set_relation_comp": row.get("allow_set_relation_comp", False)}
        return theirs(row, float_rounding=row.get("precision", 6), strict=row.get("strict", True), **options)

    told: dict[str, Any] = {"rows": len(cases)}
    for name, judge in [("math", ours), ("math_verify", theirs), ("math_verify_row_options", with_options)]:
        for row in cases:
            judge(row)  # the grammar's tables
        started = time.process_time()
        agreed = sum(judge(row) == row["expected"] for row in cases)
        told[name] = {"agree": agreed, "ms": round(1000 * (time.process_time() - started) / len(cases), 2)}
    return told


if __name__ == "__main__":
    main()
