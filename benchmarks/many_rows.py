"""Time and peak memory from a data file to the first draws, one process a format.

    python benchmarks/many_rows.py [--rows 1000000] [--json FILE]

Makes rows of about 580 bytes (prompt, answer, two more columns) as JSON Lines and as parquet in a temporary folder.
Each format is then loaded as a task with 1000 questions held out, gone over once more for the fingerprint that a resume
compares, and drawn from 64 x 50 times in training order. `load_s` and `survey_s` are seconds of processor time, with the
seconds that passed beside them. Memory is what the process holds beyond its imports: resident at most (pages mapped from
files, which the system may take back, count there), and its own at the end. `held` is the same rows as a plain list.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DRAWS, PROMPTS = 50, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("FORMAT", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        files = make(Path(folder), arguments.rows)
        for kind, file in [("jsonl", files[0]), ("parquet", files[1]), ("held", files[0])]:
            command = [sys.executable, __file__, "--one", kind, str(file)]
            results[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{kind:8} " + "  ".join(f"{name} {value:g}" for name, value in results[kind].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def make(folder: Path, rows: int) -> tuple[Path, Path]:
    from pyarrow import json as arrow_json
    from pyarrow import parquet

    rng = random.Random(0)
    words = [f"word{i}" for i in range(2000)]
    lines, table = folder / "rows.jsonl", folder / "rows.parquet"
    with open(lines, "w", encoding="ascii") as file:
        for i in range(rows):
            prompt = f"Question {i}: {' '.join(rng.choices(words, k=60))}"
            row = {"prompt": prompt, "answer": rng.randrange(1000), "level": i % 5, "source": "synthetic"}
            file.write(json.dumps(row) + "\n")
    parquet.write_table(arrow_json.read_json(lines), table)
    return lines, table


def measure(kind: str, file: str) -> dict[str, float]:
    from covary.api import Survey
    from covary.tasks import TASKS
    from covary.train import Sampler

    if kind == "parquet":
        import pyarrow.parquet  # noqa: F401  (its import is not the rows' memory)
    before, own_before = status("VmRSS"), status("RssAnon")
    start, start_cpu = time.perf_counter(), time.process_time()
    task = TASKS["jsonl" if kind == "held" else kind](path=file, test=1000).load()  # pyright: ignore[reportCallIssue]
    examples = list(task.train) if kind == "held" else task.train
    loaded, loaded_cpu = time.perf_counter(), time.process_time()
    Survey.of(examples)
    surveyed, surveyed_cpu = time.perf_counter(), time.process_time()
    sampler = Sampler(examples, seed=0)
    sampler.draw(1)
    ordered = time.perf_counter()
    for _ in range(DRAWS):
        sampler.draw(PROMPTS)
    drawn = time.perf_counter()
    return {
        "load_s": round(loaded_cpu - start_cpu, 1),
        "load_wall_s": round(loaded - start, 1),
        "survey_s": round(surveyed_cpu - loaded_cpu, 1),
        "survey_wall_s": round(surveyed - loaded, 1),
        "order_s": round(ordered - surveyed, 3),
        "draw_64_ms": round((drawn - ordered) / DRAWS * 1000, 2),
        "peak_mib": round(status("VmHWM") - before),
        "own_mib": round(status("RssAnon") - own_before),
    }


def status(name: str) -> float:
    """MiB of a kind of this process's memory (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


if __name__ == "__main__":
    main()
