"""Write docs/results/distillation.md from recorded sweeps of the distillation methods.

    covary sweep sweeps/distillation_rates.yaml --threads 1
    python scripts/record_distillation.py --choose        writes sweeps/distillation_methods.yaml: a rate for each method
    covary sweep sweeps/distillation_methods.yaml --threads 1
    covary sweep sweeps/distillation_alpha.yaml --threads 1
    python scripts/record_distillation.py [RUNS] [--pair FOLDER]

RUNS holds the sweeps' folders (default: runs/sweeps). FOLDER holds runs of recipes/smollm2_gemma3.yaml (default: runs), of
alpha 0 in smollm2_gemma3 and of alpha 1 in smollm2_gemma3_alpha1; without them the page has no section on them.
"""

from __future__ import annotations

import argparse
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from sweep_runs import (  # beside this file
    Points,
    at,
    change,
    curve,
    difference,
    order,
    plot,
    read,
    read_rows,
    sign,
    signed,
    span,
    table,
)

from covary.config import load_recipe

SWEEPS = Path(__file__).parent.parent / "sweeps"
RATES, METHODS, ALPHA = (SWEEPS / f"distillation_{name}.yaml" for name in ("rates", "methods", "alpha"))
ACCURACY, LENGTH = (f"eval/basic_arithmetic/{name}" for name in ("accuracy", "length"))
OTHER, SAME = "gvpo_opd other tokens alpha 1", "gvpo_opd same tokens alpha 0.75"
PAIR = {"alpha = 0": "smollm2_gemma3", "alpha = 1": "smollm2_gemma3_alpha1"}
VARIANCE = "gvpo_opd/log_ratio_variance"
COLLAPSED = 0.25
"""Share of the first steps' length below which it is called a collapse (that of the doctor)."""
NEEDS_NO_TEACHER = "sft gold"
# What one update computes is compared; these are times, or another number by definition (see `equal`).
NOT_COMPARED = ("time/", "tokens_per_second", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs/sweeps"))
    parser.add_argument("--choose", action="store_true", help=f"write sweeps/{METHODS.name} and nothing else")
    parser.add_argument("--pair", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/distillation.md"))
    arguments = parser.parse_args()

    recorded = read(RATES, arguments.runs)
    if arguments.choose:
        rates = by_rate(recorded)
        METHODS.write_text(methods_sweep(load_recipe(RATES), chosen(rates)), encoding="utf-8")
        print(f"{rate_table(rates)}\nwrote {METHODS}")
        return
    methods, alpha = read(METHODS, arguments.runs), read(ALPHA, arguments.runs)
    pair = {name: read_rows(arguments.pair / folder / "metrics.jsonl") for name, folder in PAIR.items()}
    text = page(recorded, methods, by_alpha(alpha), pair)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.out}")
    draw(methods, by_alpha(alpha), pair, arguments.out.parent / "plots")


def by_rate(points: Points) -> dict[str, dict[float, float]]:
    """Final accuracy of each method by learning rate."""
    found: dict[str, dict[float, float]] = {}
    for point, (run,) in points.items():
        found.setdefault(point.rpartition(" lr=")[0], {})[float(run.overrides["optimizer.lr"])] = run.last(ACCURACY)
    return found


def chosen(rates: Mapping[str, Mapping[float, float]]) -> dict[str, float]:
    """The rate with the best accuracy of each method; the smallest of equal ones."""
    return {method: max(sorted(own), key=lambda lr: own[lr]) for method, own in rates.items()}


def methods_sweep(rates: Mapping[str, Any], best: Mapping[str, float]) -> str:
    """The text of sweeps/distillation_methods.yaml: the points of the rates' sweep, each with its rate."""
    lines = [
        "# The distillation methods, each at the learning rate that `scripts/record_distillation.py --choose` found in",
        "# distillation_rates.yaml: Table VI of GVPO++ in small (docs/results/distillation.md). Written by that command.",
        f"recipe: {rates['recipe']}",
        "out: runs/sweeps/distillation_methods",
        "seeds: [1, 2, 3, 4, 5]",
        f"set: {_flow(rates['set'])}",
        "points:",
    ]
    for name, overrides in rates["points"].items():
        lines.append(f"  {name}: {_flow({**overrides, 'optimizer.lr': best[name]})}")
    return "\n".join([*lines, f"metric: {rates['metric']}"]) + "\n"


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf).strip()


def by_alpha(points: Points) -> Points:
    """Points of the alpha sweep under `alpha = ...`."""
    return {f"alpha = {runs[0].overrides['algorithm']['alpha']:g}": runs for runs in points.values()}


def scenario(methods: Points, words: str, first: str) -> Points:
    """Points of a scenario without those words, GVPO-OPD with the paper's alpha first; SFT, which has no teacher, last."""
    names = [first, *(name for name in methods if words in name and name != first), NEEDS_NO_TEACHER]
    return {name.replace(f" {words}", ""): methods[name] for name in names if name in methods}


def rate_table(rates: Mapping[str, Mapping[float, float]]) -> str:
    columns = sorted({lr for own in rates.values() for lr in own})
    best = chosen(rates)
    rows = []
    for method, own in rates.items():
        cells = [f"{own[lr]:.3f}" if lr in own else "" for lr in columns]
        rows.append(
            [method, *(f"**{cell}**" if lr == best[method] else cell for lr, cell in zip(columns, cells, strict=True))]
        )
    return table(["method", *(f"{lr:g}" for lr in columns)], rows)


def method_table(points: Points) -> str:
    first = next(iter(points))
    rows = [
        [
            name,
            f"{runs[0].overrides['optimizer.lr']:g}",
            change(runs, ACCURACY),
            span(runs, ACCURACY),
            signed(difference(runs, points[first], ACCURACY)) if name != first else "",
            change(runs, LENGTH, 1),
            str(len(runs)),
        ]
        for name, runs in points.items()
    ]
    head = ["method", "rate", "accuracy", "95 % interval", f"against {first}, by seed", "length", "seeds"]
    return table(head, rows)


def equal(points: Points, words: str) -> tuple[dict[str, tuple[float, float]], int | None, int]:
    """GVPO-OPD with alpha 0 beside the sequence-level policy gradient, at equal seeds and rates, step by step.

    Returns:
        The largest difference, and the largest value, of every metric that both have; the first step at which they
        learned from other samples; the number of pairs of runs. Losses differ by definition: one is half a variance, the other a
        surrogate whose gradient is the same. The reward of the one is minus the log-ratio of the other.
    """
    found: dict[str, tuple[float, float]] = {}
    parted: list[int] = []
    pairs = 0
    for ours in points.get(f"gvpo_opd {words} alpha 0", []):
        for theirs in points.get(f"pg_opd_sequence {words}", []):
            if (ours.seed, ours.overrides["optimizer.lr"]) != (theirs.seed, theirs.overrides["optimizer.lr"]):
                continue
            pairs += 1
            for a, b in zip(ours.rows, theirs.rows, strict=True):
                if a.get("tokens/generated") != b.get("tokens/generated"):
                    parted.append(a["step"])
                pair = {key: (a[key], b[key]) for key in a if key in b and not key.startswith((*NOT_COMPARED, "step"))}
                if "gvpo_opd/log_ratio" in a and "reward/mean" in b:
                    pair["-gvpo_opd/log_ratio, reward/mean"] = (-a["gvpo_opd/log_ratio"], b["reward/mean"])
                for key, (x, y) in pair.items():
                    if x is not None and y is not None:
                        gap, size = found.get(key, (0.0, 0.0))
                        found[key] = (max(gap, abs(x - y)), max(size, abs(x), abs(y)))
    return found, min(parted, default=None), pairs


def place(points: Points) -> str:
    """Whether the first point leads, as the paper has it."""
    first, *others = points
    signs = [sign(difference(points[name], points[first], ACCURACY)) for name in others]
    if max(signs, default=0) > 0:
        return "The paper has GVPO first of all; here it is not."
    if min(signs, default=0) < 0:
        return (
            "The paper has GVPO first of all; here nothing is ahead of it, and what is not told apart may be as good."
        )
    return "The paper has GVPO first of all; in small no order shows."


def alpha_words(alpha: Points) -> str:
    """What became of the paper's finding that little or no length control is inferior."""
    found = difference(alpha["alpha = 0.75"], alpha["alpha = 0"], ACCURACY)
    words = {
        1: "as the paper finds",
        -1: "against the paper's finding",
        0: "so the paper's finding does not show in small",
    }
    return f"From alpha = 0 to 0.75 accuracy differs by {signed(found)}, {words[sign(found)]}."


def length_words(alpha: Points) -> str:
    """Whether completions collapse without length control."""
    start, *_, end = (mean(column) for column in curve(alpha["alpha = 0"], "completion/length").values())
    if end < start / 2:
        return f"At alpha = 0 completions fall from {start:.1f} to {end:.1f} tokens, as the paper's figure shows it."
    return (
        f"At alpha = 0 completions go from {start:.1f} to {end:.1f} tokens: the collapse of the paper's figure does not "
        "show in small, where completions have one of three fixed forms."
    )


def equal_section(methods: Points, recorded: Points) -> str:
    parts = []
    for words, title in (("other tokens", "another tokenizer"), ("same tokens", "the same tokenizer")):
        found, parted, pairs = equal(methods, words)
        if not pairs:
            parts.append(
                f"With {title} the two have different learning rates in the table above, so no runs can be laid side by side."
            )
            continue
        sampled = (
            "sampled as many tokens at every step"
            if parted is None
            else f"sampled as many tokens up to step {parted - 1}"
        )
        rows = [[f"`{key}`", f"{gap:.2g}", f"{size:.3g}"] for key, (gap, size) in found.items() if gap]
        same = sum(not gap for gap, _ in found.values())
        parts.append(
            f"With {title}, {pairs} pairs of runs, which {sampled}. Of {len(found)} metrics {same} are equal to the last bit, "
            f"accuracy {'among them' if not found[ACCURACY][0] else 'not'}. The others:\n\n"
            + table(["metric", "largest difference", "largest value"], rows)
        )
    return "\n\n".join([*parts, parting(recorded)])


def parting(recorded: Points) -> str:
    """At which learning rates of the rates' sweep rounding grew until the two sampled other tokens."""
    cells = []
    for words in ("other tokens", "same tokens"):
        for rate in sorted({float(runs[0].overrides["optimizer.lr"]) for runs in recorded.values()}):
            own = {name.removesuffix(f" lr={rate}"): runs for name, runs in recorded.items()}
            _, parted, pairs = equal(own, words)
            if pairs:
                cells.append(f"{words}, {rate:g}: {'never' if parted is None else f'at step {parted}'}")
    return (
        "On seed 0, in the table of learning rates, the two first sample other tokens as follows: "
        + "; ".join(cells)
        + ". "
        "Where a rate is too high for stable training, differences of rounding grow until a sampled token flips, and from there on the runs are two."
    )


def pair_section(pair: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """SmolLM2 and Gemma 3: the variance that training reduces and the length of completions, by step."""
    runs = {name: [row for row in rows if VARIANCE in row] for name, rows in pair.items()}
    runs = {name: rows for name, rows in runs.items() if rows}
    if not runs:
        return ""
    keys = {"variance, nats²": VARIANCE, "log-ratio, nats": "gvpo_opd/log_ratio", "tokens": "gvpo_opd/student_length"}
    head = ["step", *(f"{name}: {what}" for name in runs for what in keys)]
    steps = sorted({row["step"] for rows in runs.values() for row in rows})
    found = {name: {row["step"]: row for row in rows} for name, rows in runs.items()}
    lines = [
        [f"{step}", *(f"{found[n][step][key]:.1f}" if step in found[n] else "" for n in runs for key in keys.values())]
        for step in steps
    ]
    return f"""
## A real pair

[`recipes/smollm2_gemma3.yaml`](../../recipes/smollm2_gemma3.yaml): SmolLM2-135M-Instruct (49 k tokens) learns from Gemma-3-270M (262 k tokens, base, 4 bits) by the text, one seed each:
`covary train recipes/smollm2_gemma3.yaml out=runs/smollm2_gemma3` and `covary train recipes/smollm2_gemma3.yaml algorithm.alpha=1 algorithm.length_ref=32 out=runs/smollm2_gemma3_alpha1`. The group variance
is that of the log-ratio of student to teacher, which the loss is made of at alpha = 0; 0 only where the student says what the teacher would, or always the same.

{table(head, lines)}

![variance and length by step](plots/distillation_pair.png)

{chr(10).join(f"* {name}: {_moved(rows)}" for name, rows in runs.items())}

Completions are cut at 32 tokens. One seed and {len(steps)} steps of 8 prompts: nothing here is about how well the student answers.
"""


def _moved(rows: Sequence[Mapping[str, Any]]) -> str:
    few = max(1, min(5, len(rows) // 2))
    variance, length = (
        [mean(row[key] for row in part) for part in (rows[:few], rows[-few:])]
        for key in (VARIANCE, "gvpo_opd/student_length")
    )
    collapsed = length[1] < COLLAPSED * length[0]
    return (
        f"from the first {few} steps to the last {few} the mean variance goes from {variance[0]:.1f} to {variance[1]:.1f} nats², the mean length from "
        f"{length[0]:.1f} to {length[1]:.1f} tokens"
        + (": the length collapse of the paper's Fig. 3" if collapsed else "")
    )


def page(
    recorded: Points,
    methods: Points,
    alpha: Points,
    pair: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    rates = by_rate(recorded)
    other, same = scenario(methods, "other tokens", OTHER), scenario(methods, "same tokens", SAME)
    steps = [1, 5, 10, 15, 20]
    alphas = [
        [
            name,
            change(runs, ACCURACY),
            span(runs, ACCURACY),
            signed(difference(runs, alpha["alpha = 0"], ACCURACY)) if name != "alpha = 0" else "",
            change(runs, LENGTH, 1),
        ]
        for name, runs in alpha.items()
    ]
    lengths = [[name, *at(curve(runs, "completion/length"), steps, 1).split(" | ")] for name, runs in alpha.items()]
    return f"""# Distillation in small

GVPO-OPD and what GVPO++ (section VII) compares it with, on the distillation quickstart's task: sums of two terms of up to two digits, a byte-level student of 0.12 M parameters that knows three ways
of answering ([which](../../covary/models/tiny_student/README.md)), and two shipped teachers, one that reads words and one that reads the student's bytes. Every run has 20 steps of 16 prompts with 8 completions (SFT: the one given answer), one update a step;
figures are of 200 held-out questions, 2 samples each at temperature 1. **What this can show is small**: the teachers are right in 95 to 96 % of their samples, in a form that the student knows, so distilling is choosing among habits, and completions are some twenty bytes long.
What depends on long reasoning or on knowledge that the student lacks does not show here.

Intervals are 95 %, by Student's t over seeds; differences are paired by seed, which shares data and their order, and are not corrected for how many there are. The test questions are the same in all runs.

## A learning rate for each method

`covary sweep sweeps/distillation_rates.yaml --threads 1`: final accuracy by learning rate on seed 0, which the comparison does not use; the best of three is taken, as the paper does with its own three.
The choice is made on the test questions (on another seed than the comparison's), for every method alike; where the best is the smallest of the three, a still smaller one was not tried.

{rate_table(rates)}

## Two scenarios (Table VI)

`python scripts/record_distillation.py --choose`, then `covary sweep sweeps/distillation_methods.yaml --threads 1`. Means over seeds, before → after; lengths in the student's tokens, on the held-out questions.

### A teacher with another tokenizer

{method_table(other)}

Against {next(iter(other))}, the paper's alpha for this case: {order(other, next(iter(other)), ACCURACY)}. {place(other)}

### A teacher with the same tokenizer

{method_table(same)}

Against {next(iter(same))}, the paper's alpha for this case: {order(same, next(iter(same)), ACCURACY)}. {place(same)}

![accuracy by step](plots/distillation.png)

* SFT learns the task's own answers, which are bare numbers: it unlearns the working that makes the student's answers right. The paper's training data has worked solutions, so nothing is to be concluded about SFT.
* GVPO-OPD and `pg_opd_sequence` get one number a completion, the others (SFT aside) learn from each of its tokens: over twenty steps on twenty-byte completions that is an advantage. SeqKD, supervised_kd and half of GKD learn from the teacher's own samples,
  and where nearly all of those are right, imitating them is hard to beat, as [RAFT and SFT](methods.md) are without a teacher.
* No order of this table is evidence about the paper's: a tenth of a million parameters, one task, twenty steps.

## Alpha (Fig. 7)

`covary sweep sweeps/distillation_alpha.yaml --threads 1`: the teacher with the same tokenizer, learning rate 3e-4 throughout, length_ref 20.

{table(["", "accuracy", "95 % interval", "against alpha = 0, by seed", "length"], alphas)}

![accuracy by step](plots/distillation_alpha.png)

{alpha_words(alpha)} The paper finds 0 and 0.25 inferior to larger values, and 0.75 best with this kind of teacher.

## Length by step (Fig. 3)

The same runs: mean length of the sampled completions, in tokens.

{table(["step", *map(str, steps)], lengths)}

![length by step](plots/distillation_length.png)

{length_words(alpha)}

## Alpha = 0 is the sequence-level policy gradient

GVPO-OPD with f = 1 and one update a rollout is REINFORCE with the leave-one-out baseline and the log-ratio to the teacher as its reward, `pg_opd_sequence`. Runs of the two at equal seeds and rates (those of the tables above), over all steps; losses are left
out, since one is half a variance and the other a surrogate with the same gradient, and times.

{equal_section(methods, recorded)}
{pair_section(pair)}
Made by `python scripts/record_distillation.py` on {platform.machine()}, torch {version("torch")}, transformers {version("transformers")}.
"""


def draw(methods: Points, alpha: Points, pair: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    panels = {
        "another tokenizer: accuracy": scenario(methods, "other tokens", OTHER),
        "the same tokenizer: accuracy": scenario(methods, "same tokens", SAME),
    }
    accuracies = {title: {name: curve(runs, ACCURACY) for name, runs in own.items()} for title, own in panels.items()}
    plot(folder / "distillation.png", accuracies)
    plot(folder / "distillation_alpha.png", {"accuracy": {name: curve(runs, ACCURACY) for name, runs in alpha.items()}})
    lengths = {name: curve(runs, "completion/length") for name, runs in alpha.items()}
    plot(folder / "distillation_length.png", {"length of completions, tokens": lengths})
    panels = {"group variance of the log-ratio, nats²": VARIANCE, "length, tokens": "gvpo_opd/student_length"}
    curves = {
        title: {name: {row["step"]: [row[key]] for row in rows if key in row} for name, rows in pair.items() if rows}
        for title, key in panels.items()
    }
    if any(curves[title] for title in curves):
        plot(folder / "distillation_pair.png", curves)


if __name__ == "__main__":
    main()
