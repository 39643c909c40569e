"""Write docs/results/covrl.md from recorded sweeps of CoVRL and the verifier-free methods.

    covary sweep sweeps/covrl_methods.yaml --threads 1
    covary sweep sweeps/covrl_prior_share.yaml --threads 1
    python scripts/record_covrl.py [RUNS]

RUNS holds the sweeps' folders (default: runs/sweeps). The section on KL estimators is computed here, exactly, without runs.
"""

from __future__ import annotations

import argparse
import itertools
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import get_args

import torch
from jaxtyping import Float
from sweep_runs import (  # beside this file
    Curve,
    Points,
    Run,
    at,
    change,
    curve,
    difference,
    grid,
    order,
    plot,
    read,
    save,
    sign,
    signed,
    span,
    table,
)
from torch import Tensor

from covary.algorithms.covrl import Denominator, KLDenominator, log_denominator
from covary.ops import importance_k3, log_mixture
from covary.sweep import interval

SWEEPS = Path(__file__).parent.parent / "sweeps"
ACCURACY, LENGTH = "eval/chain_sum/accuracy", "completion/length"
SOURCES = ("prior", "posterior")
DYNAMICS = {
    "reward": "reward: log-prob of the answer, nats",
    "length": "length of a trace, tokens",
    "nll": "NLL of the answer, nats per token",
    "kl": "KL term, nats per token",
}
STEPS = (1, 5, 10, 15, 20)
WEIGHTS = (0.9, 0.5, 0.1, 0.01)
SPREADS = (0.3, 1.0, 3.0)
PAIRS = 200
KINDS: tuple[KLDenominator, ...] = get_args(KLDenominator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs/sweeps"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/covrl.md"))
    arguments = parser.parse_args()

    methods = read(SWEEPS / "covrl_methods.yaml", arguments.runs)
    shares = by_share(read(SWEEPS / "covrl_prior_share.yaml", arguments.runs))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page(methods, shares), encoding="utf-8")
    print(f"wrote {arguments.out}")
    draw(methods, shares, arguments.out.parent / "plots")


def by_share(points: Points) -> Points:
    """Points of the prior share's sweep under `alpha = ...`."""
    return {f"alpha = {runs[0].overrides['algorithm.prior_share']:g}": runs for runs in points.values()}


def by_source(runs: Sequence[Run], key: str) -> dict[str, Curve]:
    return {source: curve(runs, f"covrl/{source}/{key}") for source in SOURCES}


def movement(runs: Sequence[Run], key: str, window: int = 5) -> tuple[str, int]:
    """How a metric moved, from its mean over the first steps to that over the last: in words, and its sign.

    Means of a window, so that one step's noise decides nothing; the interval of the change is over runs.
    """
    steps = [[value for (value,) in curve([run], key).values()] for run in runs]
    starts, stops = (
        [mean(part) for part in parts] for parts in ([s[:window] for s in steps], [s[-window:] for s in steps])
    )
    average, _, half = interval([stop - start for start, stop in zip(starts, stops, strict=True)])
    moved = (average, half)
    return f"{mean(starts):.3g} → {mean(stops):.3g} ({signed(moved)})", sign(moved)


def tables(
    prior: Float[Tensor, "..."], posterior: Float[Tensor, "..."], length: int
) -> tuple[Float[Tensor, "Z T"], Float[Tensor, "Z T"], Float[Tensor, "Z T"], Float[Tensor, "Z T"]]:
    """Log-probs of every trace of a fixed length, token by token, and of the whole next-token laws behind them.

    Args:
        prior: log-probs [prefixes, V] of the next token behind every prefix, prefixes in the order of their lengths.
        posterior: the same under the posterior's prompt.
        length: tokens of a trace.
    """
    size = prior.shape[-1]
    starts = [sum(size**t for t in range(position)) for position in range(length)]
    traces = torch.tensor(list(itertools.product(range(size), repeat=length)))
    prefix = torch.zeros(len(traces), dtype=torch.long)
    picked, laws = [], []
    for position, start in enumerate(starts):
        rows = start + prefix
        picked.append((prior[rows, traces[:, position]], posterior[rows, traces[:, position]]))
        laws.append((prior[rows], posterior[rows]))
        prefix = prefix * size + traces[:, position]
    return tuple(torch.stack(own, 1) for own in (*zip(*picked, strict=True), *zip(*laws, strict=True)))  # type: ignore[return-value]


def estimates(
    spread: float,
    weight: float,
    kind: KLDenominator,
    share: float = 0.5,
    size: int = 4,
    length: int = 3,
    *,
    pairs: int,
) -> tuple[float, float, float, float]:
    """A KL estimator over every trace of random pairs of laws, by enumeration: exact KL, its mean, RMS error, maximum.

    Next-token laws behind each prefix are softmaxes of normal logits. The estimator is per token; the exact KL is that of
    the next-token laws at the trace's prefix, its mean taken over the prefixes that the two prompts' traces meet.

    Args:
        spread: standard deviation of the logits: how much the two prompts disagree.
        weight: a, the prior's weight in the composite.
        kind: the denominator, or `full`.
        share: alpha, the share of traces from the prior.
        size: tokens of the vocabulary.
        length: tokens of a trace.
        pairs: random pairs of laws.
    """
    generator = torch.Generator().manual_seed(0)
    prefixes = sum(size**t for t in range(length))
    exact_mean = estimate_mean = square = largest = 0.0
    for _ in range(pairs):
        logits = spread * torch.randn(2, prefixes, size, generator=generator, dtype=torch.float64)
        prior, posterior, prior_law, posterior_law = tables(*logits.log_softmax(-1), length)
        law = log_mixture(prior_law, posterior_law, weight)
        exact = (law.exp() * (law - prior_law)).sum(-1)
        for source, probability in (
            (True, share * prior.sum(-1).exp()),
            (False, (1 - share) * posterior.sum(-1).exp()),
        ):
            from_prior = torch.full((len(prior),), source)
            value = exact if kind == "full" else token_kl(kind, prior, posterior, from_prior, weight, share)
            chance = (probability / length).unsqueeze(-1)
            exact_mean += float((chance * exact).sum()) / pairs
            estimate_mean += float((chance * value).sum()) / pairs
            square += float((chance * (value - exact) ** 2).sum()) / pairs
            largest = max(largest, float(value.max()))
    return exact_mean, estimate_mean, square**0.5, largest


def token_kl(
    kind: Denominator,
    prior: Float[Tensor, "B T"],
    posterior: Float[Tensor, "B T"],
    from_prior: Tensor,
    weight: float,
    share: float,
) -> Float[Tensor, "B T"]:
    """The method's own estimator of KL(p' || p), token by token, at equal old and live log-probs."""
    composite = log_mixture(prior, posterior, weight)
    return importance_k3(composite, prior, log_denominator(kind, prior, posterior, from_prior, share))


def estimator_table() -> str:
    kinds = [kind for kind in KINDS if kind != "full"]  # which is the exact KL itself
    rows = []
    for spread, weight in itertools.product(SPREADS, WEIGHTS):
        found = [estimates(spread, weight, kind, pairs=PAIRS) for kind in kinds]
        cells = [f"{average:.3g}; {error:.3g}; {largest:.3g}" for _, average, error, largest in found]
        rows.append([f"{spread:g}", f"{weight:g}", f"{found[0][0]:.3g}", *cells])
    return table(["spread", "a", "exact KL (`full`)", *(f"`{kind}`" for kind in kinds)], rows)


def draw_estimators(path: Path) -> None:
    """One token's estimate against q / p: where the two sources' estimators are steep. It depends on nothing else."""
    figure, axes = grid(3, 3)
    ratios = torch.logspace(-2, 2, 400, dtype=torch.float64)
    prior = torch.full((400, 1), 1e-3, dtype=torch.float64).log()
    posterior = prior + ratios.log().unsqueeze(-1)
    drawn: tuple[tuple[str, Denominator, bool], ...] = (
        ("source: traces of the prior", "source", True),
        ("source: traces of the posterior", "source", False),
        ("hybrid: traces of either", "hybrid", True),
    )
    for own, (title, kind, from_prior) in zip(axes, drawn, strict=True):
        for weight in WEIGHTS:
            value = token_kl(kind, prior, posterior, torch.full((400,), from_prior), weight, share=0.5)
            own.plot(ratios.tolist(), value.squeeze(-1).tolist(), label=f"a = {weight:g}")
        own.set(title=title, xlabel="q / p of the token", ylabel="estimate, nats", xscale="log", ylim=(-0.1, 5))
        own.legend(fontsize="x-small", loc="upper center")
    save(figure, path)


def draw(methods: Points, shares: Points, folder: Path) -> None:
    plot(folder / "covrl.png", {"accuracy": {name: curve(runs, ACCURACY) for name, runs in methods.items()}})
    plot(folder / "covrl_dynamics.png", {title: by_source(methods["covrl"], key) for key, title in DYNAMICS.items()})
    of_share = {"accuracy": ACCURACY, "length of a trace, tokens": LENGTH}
    panels = {title: {name: curve(runs, key) for name, runs in shares.items()} for title, key in of_share.items()}
    plot(folder / "covrl_prior_share.png", panels)
    draw_estimators(folder / "covrl_kl.png")


def method_table(methods: Points) -> str:
    rows = [
        [
            name,
            change(runs, ACCURACY),
            span(runs, ACCURACY),
            signed(difference(runs, methods["covrl"], ACCURACY)) if name != "covrl" else "",
            change(runs, LENGTH, 1),
            str(len(runs)),
        ]
        for name, runs in methods.items()
    ]
    head = ["method", "accuracy", "95 % interval", "against covrl, by seed", "tokens of a completion", "seeds"]
    return table(head, rows)


def dynamics_table(runs: Sequence[Run]) -> str:
    rows = [
        [f"{title}, {source}", *at(values, STEPS).split(" | ")]
        for key, title in DYNAMICS.items()
        for source, values in by_source(runs, key).items()
    ]
    return table(["step", *map(str, STEPS)], rows)


def dynamics_words(runs: Sequence[Run]) -> str:
    """The paper's four observations, each against the first and the last five steps here."""
    curves = {key: by_source(runs, key) for key in DYNAMICS}
    reward = curves["reward"]
    steps = [step for step in reward["prior"] if step in reward["posterior"]]
    above = sum(mean(reward["posterior"][step]) > mean(reward["prior"][step]) for step in steps)
    words = [
        f"The posterior's mean reward is above the prior's at {above} of {len(steps)} steps (the paper: throughout)."
    ]
    claims = {
        "reward": ("Rewards", 1, "both rise"),
        "length": ("Lengths", 1, "they grow"),
        "nll": ("The NLL", -1, "it falls"),
        "kl": ("The KL term", -1, "it falls"),
    }
    for key, (what, direction, paper) in claims.items():
        cells = []
        for source in SOURCES:
            moved, moved_to = movement(runs, f"covrl/{source}/{key}")
            verdict = {direction: "as there", 0: "no change beyond the seeds' noise", -direction: "the opposite"}[
                moved_to
            ]
            cells.append(f"{source} {moved}, {verdict}")
        words.append(f"{what} (the paper: {paper}): {'; '.join(cells)}.")
    return (
        "Means of the first and of the last five steps, and the change with its interval over seeds:\n\n"
        + "\n".join(f"* {line}" for line in words)
    )


def share_words(shares: Points) -> str:
    """The paper's two comparisons of alpha."""
    words = []
    for better, worse in (("alpha = 0.1", "alpha = 0.9"), ("alpha = 0.5", "alpha = 0.1")):
        found = difference(shares[better], shares[worse], ACCURACY)
        verdict = {1: "seen here", 0: "not told apart here", -1: "the opposite here"}[sign(found)]
        words.append(f"* The paper has {better} above {worse}: {signed(found)} at equal seeds, {verdict}.")
    lengths = ", ".join(f"{name} {movement(shares[name], LENGTH)[0]}" for name in ("alpha = 0.1", "alpha = 0.9"))
    words.append(
        f"* The paper's traces grow at 0.1 and shrink at 0.9. Tokens, first and last five steps: {lengths}. Traces of one "
        "fixed form can hardly move."
    )
    return "\n".join(words)


def share_table(shares: Points) -> str:
    middle = "alpha = 0.5"
    rows = [
        [
            name,
            change(runs, ACCURACY),
            span(runs, ACCURACY),
            signed(difference(runs, shares[middle], ACCURACY)) if name != middle else "",
            change(runs, LENGTH, 1),
            *(movement(runs, f"covrl/{source}/kl")[0] for source in SOURCES),
        ]
        for name, runs in shares.items()
    ]
    return table(
        [
            "",
            "accuracy",
            "95 % interval",
            f"against {middle}, by seed",
            "tokens of a trace",
            "KL, prior",
            "KL, posterior",
        ],
        rows,
    )


def variant_words(methods: Points) -> str:
    """Presets and draws against the default."""
    variants = {
        "covrl elbo": "`preset: elbo` (all three terms divided by the traces' tokens, so that the answer's term weighs less)",
        "covrl per question": "`source_draw: question` (the paper's words: all traces of a question from one source)",
        "covrl_jsd": "`covrl_jsd` (a Jensen-Shannon term in the KL's place, appendix A.3)",
    }
    verdicts = {1: "ahead of", 0: "not told apart from", -1: "behind"}
    lines = []
    for name, words in variants.items():
        if name in methods:
            found = difference(methods[name], methods["covrl"], ACCURACY)
            lines.append(f"* {words}: {signed(found)}, {verdicts[sign(found)]} the default.")
    return "\n".join(lines)


def page(methods: Points, shares: Points) -> str:
    return f"""# CoVRL in small

CoVRL and what its paper compares it with, on the CoVRL quickstart's task: two-term sums from a shipped model of 0.4 M parameters that writes a trace in tags and
[was made to slip](../../covary/models/tiny_think/README.md) in it, in 65 % of its traces when it sees the question alone, in 20 % when it is shown the answer. Every run has 20 steps of 16 questions with 8 traces, 4 updates a step, learning rate 2e-4; figures are
of 200 held-out questions, 2 samples each at temperature 1, the answer under the prior's prompt and graded. **What this can show is small**: traces have one form and eight tokens, one trace decides the answer, and the posterior was made better than the prior. What depends on long traces,
on answers of many forms or on questions without a right trace among the prior's does not show here.

Intervals are 95 %, by Student's t over seeds; differences are paired by seed, which shares data and their order, and are not corrected for how many there are. The test questions are the same in all runs.

## Methods (Table 1)

`covary sweep sweeps/covrl_methods.yaml --threads 1`; means over seeds, before → after. All learn from the likelihood of the reference answer, but for the last: GRPO with the task's grader, on whole completions, for comparison.

{method_table(methods)}

![accuracy by step](plots/covrl.png)

Against covrl: {order(methods, "covrl", ACCURACY)}. {place(methods)}

* All have the same learning rate and the same number of sampled traces; none was tuned. LaTRO, JLB and VeriFree have no importance ratio and make four updates a rollout here like the others; the `_grpo` points are the forms that the paper trains (GRPO's loss on the method's reward).
* CoVRL, RAVR and their variants sample from the posterior too, so the lengths of their traces are means over both prompts.

## Presets and the source's draw

From the same sweep, at equal seeds:

{variant_words(methods)}

## Training dynamics (Fig. 4)

The runs `covrl` of the same sweep, means over seeds:

{dynamics_table(methods["covrl"])}

![reward, length, NLL and KL by step and source](plots/covrl_dynamics.png)

{dynamics_words(methods["covrl"])}

## Share of the prior (Fig. 5)

`covary sweep sweeps/covrl_prior_share.yaml --threads 1`: alpha, the probability that a trace comes from the prior. KL: the term in nats per token by the trace's source, means of the first and the last five steps.

{share_table(shares)}

![accuracy and length by step](plots/covrl_prior_share.png)

{share_words(shares)}

## The KL's estimators (Fig. 6)

No training: random next-token laws of the two prompts (softmax of normal logits of the given standard deviation, `spread`; 4 tokens, traces of 3, {PAIRS} pairs), and every trace enumerated, half of the weight on each source (alpha = 0.5). In each cell: mean of the
estimates; root mean square of their distance to the exact KL(p' || p) at the same prefix; the largest one. a is the prior's weight in the composite p'.

{estimator_table()}

![an estimate against q / p](plots/covrl_kl.png)

* All estimates are non-negative for every a. `source` (the paper's), `hybrid_exact` and `full` have the exact mean; `hybrid` has not behind the first token, since which prompt wrote a trace is no longer even odds there.
* The weights of `source` have no bound: where the prompts disagree (spread 3), rare tokens cost it hundreds of times the error of `hybrid`. `hybrid_exact` lies between: as the prefix gives the source away it becomes `source`. Where the prompts nearly agree (spread 0.3), the choice hardly matters.
* The plot is for one token, where `hybrid` and `hybrid_exact` are one. For a prior's trace the paper's estimator grows like q/p log q/p, for a posterior's like p/q; the mixture's weight is at most max(a / alpha, (1 - a) / (1 - alpha)).

Made by `python scripts/record_covrl.py` on {platform.machine()}, torch {version("torch")}, transformers {version("transformers")}.
"""


def place(methods: Points) -> str:
    """Whether CoVRL leads the methods without a verifier, as the paper has it."""
    others = [runs for name, runs in methods.items() if not name.startswith("covrl") and name != "grpo verifier"]
    signs = [sign(difference(runs, methods["covrl"], ACCURACY)) for runs in others]
    if max(signs, default=0) > 0:
        return "The paper has CoVRL first of the methods without a verifier; here it is not."
    if min(signs, default=0) < 0:
        return "The paper has CoVRL first of the methods without a verifier; here none is ahead of it, and what is not told apart may be as good."
    return "The paper has CoVRL first of the methods without a verifier; in small no order shows."


if __name__ == "__main__":
    main()
