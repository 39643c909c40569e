"""A step of covary against one of TRL 1.16's GRPOTrainer: same machine, weights, prompts and settings, in pairs.

    python benchmarks/vs_trl.py [--pairs 5] [--json benchmarks/results/vs_trl.json] [--case NAME] [--threads 2]

Sets up an environment with TRL by itself, with the torch and transformers of this one (`--env`, default
benchmarks/.trl). The model is SmolLM2-135M-Instruct as `scripts/fetch_smollm2.py` makes it (`--model`), and the shipped
one. A pair is a process of TRL, one of covary's `grpo`, one of its `gvpo` and one of the bare matrix products of a step
(how fast any program with this torch could be), in turn forwards and backwards; each does two
steps to warm up (the second still takes memory that the optimizer's state took away from the first) and a few that
count (`--steps`), at one update a rollout, and reports the medians of its own.

A time's ratio is TRL's over ours, memory's is ours over TRL's: the median over pairs, with its range. Cases:

* smollm2_full: 4 prompts of 64 tokens x 8 completions of exactly 48 tokens (the end token is one that is never sampled)
* smollm2_ragged: the same, ended by a frequent token
* tiny: the shipped model, 64 questions of the quickstart x 8 completions of at most 16 tokens
* smollm2_full_bf16, smollm2_ragged_bf16: TRL's `bf16`, covary's `engine.autocast: bfloat16`

A comparison is refused where the two sides did not see the same prompt tokens, or where their completions differ in
length by more than sampling explains.

The pairs use the settings of TRL that should be its fastest (`Case.trl_rows` in one pass, no gradient checkpointing,
which is TRL's default and saves memory for time). `--try-trl` measures TRL alone, once, under each of its settings that
change its speed and not its result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRL = "1.16.0"
WARM_UP = 2
PARTS = ("step", "rollout", "update")
ALGORITHMS = {"grpo": {"name": "grpo", "kl_coef": 0.0}, "gvpo": {"name": "gvpo", "beta": 0.1}}
NEVER = "<reponame>"
"""A token of SmolLM2 that its pre-training on text leaves without probability."""
FREQUENT = ","
PROMPT_TOKENS = 64
TEXTS = (
    "The river rises in a narrow valley between two ranges of low hills, and for the first thirty miles it runs almost "
    "straight to the south. Small farms lie on both sides of it. In spring, when the snow melts, the lower fields are "
    "under water for a week or two, and the farmers move their sheep to the higher ground. The oldest bridge was built",
    "A good experiment changes one thing at a time. Suppose that you want to know whether plants grow faster in warm "
    "soil. You take twenty pots of the same size, fill them with the same soil, and give each the same amount of water. "
    "Ten of them stand on a heated plate and ten on a plate that is not heated. After four weeks you measure",
    "When the library opened again after the repairs, the first visitor was a boy of about nine with a torn map under "
    "his arm. He asked for everything that was known about lighthouses. The librarian, who had grown up on the coast, "
    "led him to the third floor and showed him a shelf that nobody had touched for many years. On it he found",
    "To bake a simple loaf of bread you need flour, water, salt and a little yeast. Mix the flour and the salt in a "
    "large bowl, stir the yeast into the warm water, and pour it over the flour. Knead the dough for ten minutes, until "
    "it is smooth and no longer sticks to your hands. Then cover the bowl with a cloth and let it rest in a",
)


class NotComparable(Exception):
    """The two sides did different work."""


@dataclass(frozen=True)
class Case:
    """What one comparison runs.

    Attributes:
        tiny: the shipped model and questions of the quickstart; else SmolLM2 and `TEXTS`.
        ends: tokens that end a completion beside `NEVER`; SmolLM2 only.
        length: tokens that every completion must have; None: as they come.
        trl_rows: rows that TRL reads in one pass.
        micro_batch_tokens: covary's; 2048 takes a twentieth less time for SmolLM2's full case, and a sixth more memory.
    """

    tiny: bool = False
    ends: Sequence[str] = ()
    completions: int = 8
    max_tokens: int = 48
    length: int | None = None
    lr: float = 1e-6
    steps: int = 2
    bf16: bool = False
    trl_rows: int = 32
    micro_batch_tokens: int = 1024

    def trl_choices(self) -> Iterator[dict[str, Any]]:
        """TRL's settings that `--try-trl` measures: all rows a pass, or fewer; activations kept, or computed again."""
        for parts in (1, 2, 4):
            for again in (False, True):
                yield {"rows": (64 if self.tiny else 4) * self.completions // parts, "gradient_checkpointing": again}


CASES = {
    "smollm2_full": Case(length=48),
    "smollm2_ragged": Case(ends=[FREQUENT], micro_batch_tokens=2048),
    "tiny": Case(tiny=True, max_tokens=16, lr=1e-4, steps=10, trl_rows=512, micro_batch_tokens=8192),
    "smollm2_full_bf16": Case(length=48, bf16=True),
    "smollm2_ragged_bf16": Case(ends=[FREQUENT], bf16=True, micro_batch_tokens=2048),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="results by case; cases that are not run stay as they are")
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--steps", type=int, help="steps that count, a process (default: 2, tiny 10)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--env", type=Path, default=HERE / ".trl", help="where TRL is, or is put")
    parser.add_argument("--try-trl", action="store_true")
    arguments = parser.parse_args()
    names = [arguments.case] if arguments.case else list(CASES)
    if any(not CASES[name].tiny for name in names) and not arguments.model.is_dir():
        sys.exit(f"no folder {arguments.model}; make it with: python scripts/fetch_smollm2.py {arguments.model}")
    here = Path(sys.executable)
    pythons = {"trl": environment(arguments.env), "covary": here, "products": here}
    for name in names:
        steps = arguments.steps or CASES[name].steps
        with tempfile.TemporaryDirectory() as folder:
            settings = prepare(CASES[name], arguments.model, Path(folder))
            settings |= {"threads": arguments.threads, "warm_up": WARM_UP, "steps": steps}
            measure = Side(name, pythons, settings, Path(folder) / "result.json")
            if arguments.try_trl:
                found = [choice | numbers([measure("trl", trl=choice)]) for choice in CASES[name].trl_choices()]
                if arguments.json:
                    record(arguments.json, name, {"choices": found}, page_of_choices)
                continue
            try:
                result = compare(CASES[name], pairs(measure, arguments.pairs))
            except NotComparable as error:
                sys.exit(f"{name}: {error}")
        result |= {"threads": arguments.threads, "machine": platform.machine(), "steps": steps}
        print(f"{name:20} {ratios(result)}\n{'':20} gvpo: {ratios(result['gvpo'])}", flush=True)
        if arguments.json:
            record(arguments.json, name, result, page)


# -- the two sides -----------------------------------------------------------------------------------------------


def environment(folder: Path) -> Path:
    """The Python of an environment with TRL and this one's torch and transformers, made where it is missing."""
    wanted = {"trl": TRL, "torch": version("torch").split("+")[0], "transformers": version("transformers")}
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        print(f"making an environment with TRL {TRL} in {folder} (once; minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if installed(python, wanted) != wanted:
        pins = [f"{name}=={number}" for name, number in wanted.items()]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pins], check=True)
        found = installed(python, wanted)
        if found != wanted:
            sys.exit(f"{folder} has {found}, not {wanted}")
    return python


def installed(python: Path, names: Sequence[str] | dict[str, str]) -> dict[str, str | None]:
    """Versions of packages in another environment, without their local part."""
    code = (
        "import json, sys\nfrom importlib.metadata import PackageNotFoundError, version\nfound = {}\n"
        "for name in sys.argv[1:]:\n    try:\n        found[name] = version(name).split('+')[0]\n"
        "    except PackageNotFoundError:\n        found[name] = None\nprint(json.dumps(found))"
    )
    return json.loads(subprocess.run([str(python), "-c", code, *names], check=True, capture_output=True).stdout)


def prepare(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    """The settings that both sides read: a model folder, and prompts with the ids that both must make of them."""
    from covary.api import resolve
    from covary.config import load_recipe, validate
    from covary.models.loading import load_tokenizer, model_path

    if case.tiny:
        name = model_path("tiny")
        task = resolve(validate(load_recipe(HERE.parent / "recipes" / "quickstart.yaml"), where="quickstart")).task
        prompts: list[Any] = [task.train[i].prompt for i in range(64)]
        render = load_tokenizer(name).apply_chat_template
        ids = [render(p, add_generation_prompt=True, tokenize=True, return_dict=False) for p in prompts]
    else:
        name = str(with_ends(model, folder / "model", [NEVER, *case.ends]))
        tokenizer = load_tokenizer(name)
        ids = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in TEXTS]
        prompts = [tokenizer.decode(i) for i in ids]
    return {
        "model": name,
        "prompts": prompts,
        "prompt_ids": sorted(ids),
        "completions": case.completions,
        "max_tokens": case.max_tokens,
        "lr": case.lr,
        "bf16": case.bf16,
        "micro_batch_tokens": case.micro_batch_tokens,
        "trl": {"rows": case.trl_rows, "gradient_checkpointing": False},
    }


def with_ends(model: Path, folder: Path, ends: Sequence[str]) -> Path:
    """A model folder of the same weights in which other tokens end a completion; the first is the tokenizer's own end.

    That one must be special already: else the tokenizer would read other prompts.
    """
    from transformers import AutoTokenizer

    folder.mkdir()
    for file in model.absolute().iterdir():
        (folder / file.name).symlink_to(file)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer.encode(end, add_special_tokens=False)[0] for end in ends]
    edits = {
        "config.json": {"eos_token_id": ids},
        "generation_config.json": {"eos_token_id": ids},
        "tokenizer_config.json": {"eos_token": ends[0]},
    }
    for name, edit in edits.items():
        data = json.loads((model / name).read_text()) | edit
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(data))
    return folder


@dataclass
class Side:
    """Runs one side of a case in a process of its own."""

    case: str
    pythons: dict[str, Path]
    settings: dict[str, Any]
    result: Path

    def __call__(self, side: str, **changes: Any) -> dict[str, Any]:
        """Its result; one line is printed.

        Raises:
            NotComparable: it read other prompts.
        """
        file = self.result.with_name("settings.json")
        settings = {"seed": 0, **self.settings, **changes}
        file.write_text(json.dumps(settings))
        threads = str(self.settings["threads"])
        environ = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        command = [str(self.pythons[side]), str(HERE / "vs_trl_side.py"), side, str(file), str(self.result)]
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
        result = json.loads(self.result.read_text())
        if side == "covary":
            self.settings["lengths"] = result["lengths"][-1]  # for the products that they need
        parts = "  ".join(f"{part} {statistics.median(result[part]):.3f} s" for part in PARTS)
        length = statistics.mean(n for step in result["lengths"] for n in step)
        label = "  ".join(str(settings[key]) for key in ("algorithm", "trl") if key in changes)
        print(
            f"{self.case:20} {side:8} {parts}  {result['memory']:.0f} MiB  mean length {length:.1f}  {label}",
            flush=True,
        )
        if result["prompt_ids"] != settings["prompt_ids"]:
            raise NotComparable(f"{side} made other tokens of the prompts")
        return result


def pairs(measure: Callable[..., dict[str, Any]], count: int) -> dict[str, list[dict[str, Any]]]:
    """Results by side. The order turns around from pair to pair, so that a drift of the machine falls on all."""
    sides = ["trl", "grpo", "products", "gvpo"]
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for pair in range(count):
        for side in sides if pair % 2 == 0 else reversed(sides):
            algorithm = {"algorithm": ALGORITHMS[side]} if side in ALGORITHMS else {}
            results[side].append(measure("covary" if algorithm else side, seed=pair, **algorithm))
    return results


# -- numbers -----------------------------------------------------------------------------------------------------


def compare(case: Case, results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of `grpo`, those of `gvpo` beside them, and the numbers of each side.

    Raises:
        NotComparable: completions of one side are longer.
    """
    theirs = results["trl"]
    for algorithm in ALGORITHMS:
        check_lengths(case.length, lengths(theirs), lengths(results[algorithm]))
    return {
        **ratios_of(theirs, results["grpo"]),
        "gvpo": ratios_of(theirs, results["gvpo"]),
        "products": ratios_of(theirs, results["products"]),
        "pairs": len(theirs),
        "sides": {side: numbers(of_side) for side, of_side in results.items()},
    }


def ratios_of(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and range over pairs: their time over ours, our memory over theirs."""
    found: dict[str, Any] = {}
    for part in PARTS:
        each = [statistics.median(a[part]) / statistics.median(b[part]) for a, b in zip(theirs, ours, strict=True)]
        found |= {f"{part}_ratio": round(statistics.median(each), 3), f"{part}_ratio_range": bounds(each)}
    each = [b["memory"] / a["memory"] for a, b in zip(theirs, ours, strict=True)]
    return found | {"memory_ratio": round(statistics.median(each), 3), "memory_ratio_range": bounds(each)}


def numbers(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What one side measured over all pairs."""
    found: dict[str, Any] = {}
    for part in PARTS:
        seconds = [statistics.median(result[part]) for result in results]
        found[f"{part}_s"] = {"median": round(statistics.median(seconds), 4), "range": bounds(seconds)}
    memory = [result["memory"] for result in results]
    found["peak_mib"] = {"median": round(statistics.median(memory)), "range": bounds(memory)}
    found["mean_length"] = round(statistics.mean(lengths(results)), 2)
    for key, over in (("logp_error_mean", statistics.mean), ("logp_error_max", max)):
        if key in results[0]:
            found[key] = over(result[key] for result in results)
    return found | {"versions": results[0]["versions"]}


def lengths(results: list[dict[str, Any]]) -> list[int]:
    """Of every completion of one side."""
    return [length for result in results for step in result["lengths"] for length in step]


def check_lengths(expected: int | None, theirs: Sequence[int], ours: Sequence[int]) -> None:
    """Refuse to compare unequal work: every completion as long as expected, or means within four standard errors.

    Raises:
        NotComparable: naming the two sides' lengths.
    """
    if expected is not None:
        if {*theirs, *ours} != {expected}:
            raise NotComparable(f"completions should all have {expected} tokens, found {sorted({*theirs, *ours})}")
        return
    means = statistics.mean(theirs), statistics.mean(ours)
    allowed = 4 * math.sqrt(sum(statistics.pvariance(side) / len(side) for side in (theirs, ours)))
    if abs(means[0] - means[1]) > allowed:
        raise NotComparable(
            f"mean lengths {means[0]:.2f} (TRL) and {means[1]:.2f} differ by more than sampling explains ({allowed:.2f})"
        )


def bounds(values: Sequence[float]) -> list[float]:
    """Smallest and largest."""
    return [round(min(values), 4), round(max(values), 4)]


# -- reports -----------------------------------------------------------------------------------------------------


def ratios(result: dict[str, Any]) -> str:
    """A line for people."""
    parts = "  ".join(f"{part} {result[f'{part}_ratio']:.2f}x {result[f'{part}_ratio_range']}" for part in PARTS)
    return f"{parts}  memory {result['memory_ratio']:.2f}x"


def record(file: Path, name: str, result: dict[str, Any], page: Callable[[dict[str, Any]], str]) -> None:
    """Put a case's result into the file, and a page of tables beside it."""
    known = json.loads(file.read_text()) if file.exists() else {}
    known = {case: found for case in CASES if (found := {**known, name: result}.get(case)) is not None}
    file.write_text(json.dumps(known, indent=2) + "\n")
    file.with_suffix(".md").write_text(page(known))


def page_of_choices(results: dict[str, Any]) -> str:
    """TRL's settings beside each other, as a page."""
    lines = [
        "# TRL under its own settings",
        "",
        "Written by `python benchmarks/vs_trl.py --try-trl --json benchmarks/results/trl_choices.json`: which of TRL's",
        "settings that change its speed and not its result is the fastest; one process each. Seconds.",
        "",
        "| case | rows a pass | gradient checkpointing | step | rollout | update | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for found in result["choices"]:
            cells = [str(found["rows"]), "yes" if found["gradient_checkpointing"] else "no"]
            cells += [f"{found[f'{part}_s']['median']:.3g}" for part in PARTS]
            lines.append(f"| {name} | " + " | ".join([*cells, str(found["peak_mib"]["median"])]) + " |")
    return "\n".join(lines) + "\n"


def page(results: dict[str, dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [
        "# A step of covary against one of TRL",
        "",
        "Written by `python benchmarks/vs_trl.py --json benchmarks/results/vs_trl.json`, with the options below for each case;",
        "its docstring says what is run. Times in seconds, medians over pairs; a time's ratio is TRL's over ours, memory's ours",
        "over TRL's. TRL reads all rows in one pass and keeps its activations (its default computes them again, for less memory",
        "and more time); covary reads as many tokens a pass as `engine.micro_batch_tokens` says. `products` are the matrix",
        "products of a step alone (`vs_trl_side.py`): its ratio is what no program exceeds that reads as few tokens with this torch.",
        "",
        "| case | side | step | rollout | update | peak MiB | mean length | step ratio (range) | rollout | update | memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        compared = {"trl": None, "grpo": result, "gvpo": result["gvpo"], "products": result.get("products")}
        for side, found in result["sides"].items():
            cells = [f"{found[f'{part}_s']['median']:.3g}" for part in PARTS]
            cells += [f"{found['peak_mib']['median']}", f"{found['mean_length']}"]
            ratio = compared[side]
            if ratio is None:
                cells += [""] * 4
            else:
                low, high = ratio["step_ratio_range"]
                cells.append(f"{ratio['step_ratio']:.2f} ({low:.2f}-{high:.2f})")
                cells += [f"{ratio[f'{part}_ratio']:.2f}" for part in ("rollout", "update", "memory")]
            if side == "products":
                cells[3] = cells[-1] = ""  # its memory means nothing
            lines.append(f"| {name} | {side} | " + " | ".join(cells) + " |")
    half = {
        (name, side): found
        for name, result in results.items()
        for side, found in result["sides"].items()
        if "logp_error_mean" in found
    }
    if half:
        lines += ["", "Log-probs of bfloat16 against float32, same weights and tokens, nats per token:", ""]
        lines += ["| case | side | mean | largest |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {side} | {found['logp_error_mean']:.4f} | {found['logp_error_max']:.3f} |"
            for (name, side), found in half.items()
        ]
    lines.append("")
    for name, result in results.items():
        versions = {k: v for found in result["sides"].values() for k, v in found["versions"].items()}
        listed = ", ".join(f"{package} {number}" for package, number in sorted(versions.items()))
        lines.append(
            f"* {name}: `--case {name} --pairs {result['pairs']} --steps {result['steps']} --threads {result['threads']}`, "
            f"micro-batches of {CASES[name].micro_batch_tokens} tokens; {result['machine']}, {listed}."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
