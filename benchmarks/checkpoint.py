"""What a checkpoint costs: seconds to write one, of that the digests, seconds for a resume to check one, and its size.

    python benchmarks/checkpoint.py [MODEL] [--repeat 3]        MODEL: models/smollm2-135m-instruct (default), tiny, ...

The optimizer's state is there, as after a step. Medians of `--repeat` writes into a temporary folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from covary import checkpoint
from covary.engines.local import LocalEngine
from covary.models.loading import load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/smollm2-135m-instruct")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    engine = LocalEngine(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.step(1e-5)
    state = dict.fromkeys(
        ("progress", "recipe", "fingerprints", "rollout", "doctor", "metrics_position", "row"), 0
    )  # what else is in it is small
    written, checked = [], []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, arguments.repeat + 1):
            begun = time.perf_counter()
            path = checkpoint.save(
                Path(folder), step, model=model, tokenizer=tokenizer, engine_state=engine.state_dict(), state=state,
                keep_last=1,
            )  # fmt: skip
            written.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            assert not checkpoint.Checkpoint(path, step).changed()
            checked.append(time.perf_counter() - begun)
        size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    print(
        f"{arguments.model}: {size:.0f} MB, written in {statistics.median(written):.2f} s, checked in "
        f"{statistics.median(checked):.2f} s (that long the digests take of the writing too)"
    )


if __name__ == "__main__":
    main()
