"""GVPO and DPO on summarisation in small, by the measures of Table VII of GVPO++ (arXiv 2609.21432) that need no people.

    OMP_NUM_THREADS=1 python scripts/record_summarisation.py [--seeds 0,1,2,3,4] [--work runs/summarisation]

Per seed, scripts/build_tiny_summariser.py makes posts, an SFT model and a reward model; both methods learn from the same
samples of the SFT model, scored by the reward model, at each learning rate; nothing is chosen by its result. Seeds that
are in `--work` already are not made again. Writes docs/results/summarisation.md.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from build_tiny_summariser import MAX_TOKENS, SAMPLES, TRAINING_POSTS, build, chat, quality, sample

import covary
from covary.jsonlines import read_jsonl
from covary.models.loading import load_model, load_tokenizer
from covary.models.rewards import build_model_reward
from covary.preferences import prefers, wins
from covary.prompts import Template
from covary.settings import RewardModel
from covary.types import Example

METHODS: dict[str, dict[str, Any]] = {
    "gvpo": {"algorithm": {"name": "gvpo", "beta": 0.1}, "reference": "initial"},
    "dpo": {"algorithm": {"name": "dpo", "beta": 0.1}},  # its reference is the initial policy
}
RATES = (1e-4, 3e-4)
EPOCHS, PROMPTS = 3, 32
MEASURES = {
    "reward": "reward model, mean",
    "win_rate": "win rate against demonstrations, by the reward model",
    "preference": "preference accuracy",
    "judge": "win rate against demonstrations, by the judge",
}
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--work", type=Path, default=Path("runs/summarisation"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/summarisation.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    arguments.work.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in seeds:
        found = arguments.work / f"seed-{seed}.json"
        if not found.exists():
            found.write_text(
                json.dumps(one_seed(seed, arguments.work / f"seed-{seed}-{time.time_ns()}")), encoding="utf-8"
            )
        results.append(json.loads(found.read_text(encoding="utf-8")))
        print(f"seed {seed}: {json.dumps(results[-1])}", flush=True)
    if len(seeds) in T_975:
        arguments.out.write_text(page(results, arguments.seeds), encoding="utf-8")


def one_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Name of a policy -> measure -> number; `seconds` of processor time of the runs beside them."""
    build(folder, seed)
    measure = Measure(folder, seed)
    found: dict[str, Any] = {"demonstrations": measure.demonstrations(), "sft": measure(measure.sft), "seconds": []}
    for method, sections in METHODS.items():
        for rate in RATES:
            start = time.process_time()
            trained = covary.train(
                quiet=True,
                seed=seed,
                epochs=EPOCHS,
                model=str(folder / "sft"),
                task={"name": "jsonl", "path": str(folder / "samples.jsonl")},
                reward={"model": str(folder / "reward")},
                rollout={"engine": "dataset", "prompts": PROMPTS, "completions": SAMPLES, "max_tokens": MAX_TOKENS},
                optimizer={"lr": rate, "warmup": 0.05},
                log={"samples": 0},
                out=str(folder / f"{method}-{rate}"),
                **sections,
            )
            found["seconds"].append(time.process_time() - start)
            found[f"{method} {rate:g}"] = measure(trained.model)
    return found


class Measure:
    """The four measures of a policy, on test posts that nobody learned from."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.reward = build_model_reward(RewardModel(str(folder / "reward")), "reward", "cpu")
        self.sft = load_model(str(folder / "sft"))
        self.tokenizer = load_tokenizer(str(folder / "sft"))
        test = [row for _, row in read_jsonl(folder / "test.jsonl")]
        self.posts, self.written = [row["prompt"] for row in test], [row["answer"] for row in test]
        self.pairs = [
            (Example(f"pair {n}", chat(row["prompt"])), row["chosen"], row["rejected"])
            for n, row in read_jsonl(folder / "comparisons.jsonl")
        ]

    def __call__(self, policy: Any) -> dict[str, float]:
        """One summary of each post at temperature 1, the same seeds for every policy."""
        texts = [summary for (summary,) in sample(policy.eval(), self.tokenizer, self.posts, 1, self.seed + 1)]
        scores = self.scores(texts)
        preferred = prefers(policy, self.sft, self.pairs, Template("chat"), self.tokenizer, max_tokens=MAX_TOKENS)
        return {
            "reward": mean(scores),
            "win_rate": mean(wins(scores, self.scores(self.written))),
            "preference": mean(preferred),
            "judge": mean(wins(self.qualities(texts), self.qualities(self.written))),
            "quality": mean(self.qualities(texts)),
        }

    def demonstrations(self) -> dict[str, float]:
        """What people wrote; and `preference`, the reward model's own accuracy on the comparisons."""
        examples, chosen, rejected = zip(*self.pairs, strict=True)
        sides = [[g.value or 0.0 for g in self.reward(examples, texts)] for texts in (chosen, rejected)]
        return {
            "reward": mean(self.scores(self.written)),
            "preference": mean(float(a > b) for a, b in zip(*sides, strict=True)),
            "quality": mean(self.qualities(self.written)),
        }

    def scores(self, texts: list[str]) -> list[float]:
        """Of the reward model."""
        examples = [Example(f"post {i}", chat(post)) for i, post in enumerate(self.posts)]
        graded = self.reward(examples, texts)
        assert all(g.value is not None for g in graded), next(g.error for g in graded if g.error)
        return [g.value for g in graded if g.value is not None]

    def qualities(self, texts: list[str]) -> list[float]:
        """Of the rule that people go by."""
        return [quality(post, text) for post, text in zip(self.posts, texts, strict=True)]


def interval(values: list[float]) -> str:
    """Mean over seeds and its 95 % interval (Student's t)."""
    middle, half = mean(values), T_975[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{middle:.3f} ({middle - half:.3f} to {middle + half:.3f})"


def table(results: list[dict[str, Any]]) -> list[str]:
    def row(name: str, cells: list[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    columns = [*MEASURES, "quality"]
    lines = [row("policy", [*MEASURES.values(), "true quality"]), "|" + "---|" * (len(columns) + 1)]
    first = results[0]["demonstrations"]
    lines.append(
        row("demonstrations", [interval([r["demonstrations"][c] for r in results]) if c in first and c != "preference" else ""
                               for c in columns])
    )  # fmt: skip
    for name in ("sft", *(f"{method} {rate:g}" for rate in RATES for method in METHODS)):
        cells = [
            "ties" if name == "sft" and column == "preference" else interval([r[name][column] for r in results])
            for column in columns
        ]
        lines.append(row(name.replace("sft", "SFT").replace("gvpo", "GVPO, lr").replace("dpo", "DPO, lr"), cells))
    for rate in RATES:
        paired = [interval([r[f"gvpo {rate:g}"][c] - r[f"dpo {rate:g}"][c] for r in results]) for c in columns]
        lines.append(row(f"GVPO less DPO, lr {rate:g}", paired))
    return lines


def page(results: list[dict[str, Any]], seeds: str) -> str:
    slowest = max(second for result in results for second in result["seconds"])
    accuracy = interval([result["demonstrations"]["preference"] for result in results])
    return f"""# Summarisation in small

Table VII of GVPO++ (arXiv 2609.21432) compares GVPO with DPO on summaries of Reddit posts. Here the comparison is made in a world that a laptop can build: a post is nine words, three of them facts; a good
summary is the facts. Both methods learn from the same offline data, {SAMPLES} samples of the SFT model for each of {TRAINING_POSTS} posts, scored by a reward model (`reward: {{model: ...}}`), with the SFT model as reference, beta 0.1,
{PROMPTS} prompts an update, {EPOCHS} epochs. Learning rates are the same for both, and every one that was run is shown. Each seed makes its own posts, SFT model and reward model.

Means over {len(results)} seeds with their 95 % intervals (Student's t); the last rows are paired by seed:

{chr(10).join(table(results))}

* **Reward model, mean** and **win rate**: of one summary at temperature 1 for each test post, against what people wrote; ties count half.
* **Preference accuracy**: share of held-out comparisons by people in which the chosen summary has the larger log-ratio `log pi(y|x) - log pi_SFT(y|x)`. The paper prints a ratio of the two logs, which would reverse preferences; this is the difference.
  An untrained policy ties everywhere. The reward model itself agrees with {accuracy} of the comparisons.
* **Judge**: in the paper strong language models say which summary is better. There is no such model here; its place is taken by the rule that people go by in this world, which neither the policies nor the reward model was shown. So this column, and
  **true quality** (facts found less other words, in facts of the post, 1 at best), tell what was learned beyond the reward model.

What it shows, and what not: that the whole chain runs (offline samples, reward model, both methods, four measures), and how far rewards of an imperfect reward model carry over to what it stands for. It says nothing about real summaries: vocabulary,
models and people are toys, and with other learning rates, epochs or a better reward model the order of two methods can change.

Made by `OMP_NUM_THREADS=1 python scripts/record_summarisation.py --seeds {seeds}`; the slowest run took {slowest:.0f} s of processor time on one thread ({platform.machine()}, torch {version("torch")}, transformers {version("transformers")}).
"""


if __name__ == "__main__":
    main()
