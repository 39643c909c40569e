"""The command line. Exit code 0 on success, 2 for a user's mistake (one line on stderr), 1 otherwise.

Heavy modules are imported inside the commands: `covary --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.types import RunError, UserError

app = typer.Typer(
    help="Post-training of language models: GVPO and what it compares to.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from covary import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-training of language models: GVPO and what it compares to."""


Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, such as algorithm.beta=0.2 steps=12")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Plain lines, no progress bars.")]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe file (YAML).")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run folder.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train from a recipe, or continue a run."""
    from covary.api import resume_run, start_run
    from covary.log import Screen

    changes = list(overrides or [])
    if resume is not None:
        if recipe is not None and "=" in recipe:
            recipe, changes = None, [recipe, *changes]
        if recipe is not None:
            raise UserError(
                f"train --resume takes its recipe from the run folder; leave {recipe} out, and set what may change "
                "(steps, eval, checkpoint, log) as key=value"
            )
        trained = resume_run(resume, overrides=changes, screen=Screen(quiet))
    else:
        config = _config(recipe, changes, default_out=True)
        trained = start_run(config, None, Screen(quiet))
    Screen(quiet).say(f"run folder: {trained.folder}")


@app.command()
def check(
    recipe: Annotated[str, typer.Argument(help="A recipe file (YAML).")],
    overrides: Overrides = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Do not load the model or make a tiny step.")] = False,
) -> None:
    """Resolve a recipe without training: schedule, two prompts as the model sees them, gold answers graded."""
    config = _config(recipe, list(overrides or []))
    from covary.check import check as run_check
    from covary.log import Screen

    screen = Screen()
    run_check(config, with_model=not no_model, screen=screen)
    screen.say(f"{recipe}: ok")


@app.command("eval")
def evaluate(
    model: Annotated[str | None, typer.Argument(help="Shipped name, folder, hub id, or a run folder.")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Benchmarks, recipe files, .jsonl or .parquet files, or Reasoning Gym task names, separated by commas."
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Conditions of a paper: gvpo or covrl.")] = None,
    samples: Annotated[
        int | None,
        typer.Option("-n", "--samples", min=1, help="Completions per question; default: the preset's, else 1."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; default: the preset's, else 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit per completion; default: the preset's or recipe's, else 256.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a completion; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; default: the recipe's, else 0.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--no-greedy", help="Also a greedy completion; default: not with a preset.")
    ] = None,
    pass_at: Annotated[str | None, typer.Option(help="The k of pass@k, separated by commas; default: n.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with a folder per benchmark; default: from the hub.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many questions of each benchmark, drawn by a fixed seed.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt template of the benchmarks: chat, r1, or the path of your own.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="A grader, or path/to/file.py:function; default: the recipe's, else the task's own."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for settings, samples and results; started again, it goes on.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(help="i/n: every n-th question from i, for n processes on one --out.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Completions between two writes to --out; default: 256.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Ask the OpenAI-compatible server at this address (up to /v1).")
    ] = None,
    served: Annotated[str | None, typer.Option(help="The server's name for the model; default: MODEL.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests to the server at a time; default: 32.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two --out folders: paired differences, nothing is evaluated.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the metrics to this file.")] = None,
    quiet: Quiet = False,
) -> None:
    """Average@N, pass@k and majority over the test split of one or more tasks; or two evaluations compared."""
    from covary.log import Screen

    screen = Screen(quiet)
    if compare is not None:
        if model is not None or task is not None:
            raise UserError("--compare: takes two folders and evaluates nothing; leave the model and --task out")
        _compare(*compare, screen)
        return
    if model is None:
        raise UserError("eval: name a model, or two evaluations with --compare A B")
    if temperature is not None and not temperature > 0:
        raise UserError(f"--temperature: takes a number above 0, got {temperature} (greedy accuracy is shown beside)")
    if json_file is not None and not json_file.parent.is_dir():
        raise UserError(f"--json: there is no folder {json_file.parent}")
    parts = (("--shard", shard, "--out", out), ("--batch", batch, "--out", out))
    asking = (("--served", served, "--server", server), ("--concurrency", concurrency, "--server", server))
    for option, value, owner, there in (*parts, *asking):
        if value is not None and there is None:
            raise UserError(f"{option}: belongs to {owner}, which is missing")
    from covary.presets import conditions_of, tasks_of

    names = tasks_of(preset) if task is None and preset is not None else (task or "").split(",")
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise UserError("--task: names no task")
    _check_benchmark_options(names, {"--data-dir": data_dir, "--limit": limit, "--template": template})
    tasks = [_task(name, data_dir, limit, template) for name in names]
    given = {
        "samples": samples,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "stop": tuple(stop) if stop else None,
        "seed": seed,
        "greedy": greedy,
        "pass_at": _numbers("--pass-at", pass_at) if pass_at is not None else None,
    }
    chosen = {key: value for key, value in given.items() if value is not None}

    from covary import measure

    plans = [
        (
            measure.questions(one, reward if reward is not None else own),
            measure.Conditions(**limits | conditions_of(preset, name, "samples" in chosen) | chosen),
        )
        for name, (one, limits, own) in zip(names, tasks, strict=True)
    ]
    titles = [asked.task.name for asked, _ in plans]
    if len(set(titles)) < len(titles):
        twice = next(title for title in titles if titles.count(title) > 1)
        raise UserError(f"--task: two tasks report eval/{twice}; evaluate them apart")
    for title, (_, conditions) in zip(titles, plans, strict=True):
        conditions.check(title)
    store = None if out is None else measure.Store(out, measure.Shard.parse(shard or "0/1"), batch or 256, screen.say)
    policy = (
        measure.server_policy(model, server, served, concurrency or 32)
        if server is not None
        else measure.load_policy(model)
    )
    policy.rollout.on_progress = screen.completions
    metrics: dict[str, float] = {}
    for asked, conditions in plans:
        for note in asked.task.notes:
            screen.say(f"note: {note}")
        found = measure.measure(policy, asked, conditions, store=store)
        if found is None:
            screen.say(f"{asked.task.name}: this shard is done, others have questions left")
        metrics |= found or {}
    for name, value in metrics.items():
        screen.say(f"{name} {value:.4g}")
    if json_file is not None:
        json_file.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def _compare(a: Path, b: Path, screen: Any) -> None:
    from covary.compare import compare

    found, notes = compare(a, b)
    for note in notes:
        screen.say(f"note: {note}")
    for difference in found:
        screen.say(difference.line())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{option}: takes whole numbers above 0 separated by commas, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file (YAML): recipe, grid or points, seeds, metric.")],
    cores: Annotated[int | None, typer.Option(min=1, help="Cores to use; default: all.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Cores per run.")] = 1,
    quiet: Quiet = False,
) -> None:
    """Run a recipe over a grid and seeds in parallel; write a table and a plot. Started again, it goes on."""
    from covary.log import Screen
    from covary.sweep import load_sweep, run_sweep

    screen = Screen(quiet)
    checked = load_sweep(file, _recipe_path)
    lines, failed = run_sweep(checked, cores or os.cpu_count() or 1, threads, screen)
    for line in lines:
        screen.say(line)
    screen.say(f"results: {checked.out}")
    if failed:
        raise RunError(
            f"{len(failed)} of {len(checked.jobs)} runs failed and are not in the table; the same command tries again"
        )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option(help="Where the Hugging Face folder goes.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: the newest.")] = None,
) -> None:
    """Write a run's model as a plain Hugging Face folder."""
    from covary.export import export as run_export

    typer.echo(f"exported to {run_export(run, out, step)}")


@app.command("list")
def list_names(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, rewards or recipes")],
) -> None:
    """Names that a recipe may use."""
    listings = {"algorithms": _algorithms, "tasks": _tasks, "rewards": _rewards, "recipes": _recipes}
    if what not in listings:
        raise UserError(f"list: takes one of {', '.join(listings)}, got {what!r}")
    for line in listings[what]():
        typer.echo(line)


def main() -> None:
    """Entry point of the `covary` command."""
    # Threads that wait for each other sleep instead of spinning: beside another busy process, spinning made a
    # step of a small model 1.7 to 10 times slower. Read when torch is imported, which no command has done yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except UserError as error:
        for mistake in str(error).splitlines() or [""]:
            sys.stderr.write(f"error: {_one_line(mistake)}\n")
        sys.exit(2)
    except RunError as error:
        sys.stderr.write(f"stopped: {_one_line(str(error))}\n")
        sys.exit(1)


def _config(recipe: str | None, overrides: list[str], default_out: bool = False) -> Any:
    from covary.config import apply_overrides, load_recipe, validate

    if recipe is None:
        raise UserError("train: name a recipe file, or --resume RUN; `covary list recipes` shows the shipped ones")
    path = _recipe_path(recipe)
    data = apply_overrides(load_recipe(path), overrides)
    if default_out and data.get("out") is None:
        data["out"] = f"runs/{path.stem}"
    return validate(data, where=f"{path} and the command line" if overrides else str(path))


def _recipe_path(name: str) -> Path:
    """A file, or the name of a shipped recipe.

    Raises:
        UserError: neither, or a run folder.
    """
    path = Path(name)
    if (path / "config.yaml").is_file():
        raise UserError(
            f"{name} is a run folder: continue it with `covary train --resume {name}`, or start its recipe again from "
            f"{path / 'config.yaml'} with another out=..."
        )
    if path.exists():
        return path
    recipes = _recipe_files()
    if name not in recipes:
        near = get_close_matches(name, recipes, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{name}: no such file, and no shipped recipe of that name (covary list recipes){hint}")
    return recipes[name]


def _task(name: str, data_dir: Path | None, limit: int | None, template: str | None) -> tuple[Any, dict[str, Any], Any]:
    """A task family's object from a recipe, a data file, or a name of ours or Reasoning Gym's; the recipe's limits and reward."""
    if name.endswith((".yaml", ".yml")) or name in _recipe_files():
        config = _config(name, [])
        limits = {
            "max_tokens": config.eval.max_tokens or config.rollout.max_tokens,
            "stop": config.rollout.stop,
            "seed": config.seed,
        }
        task = config.task
        if getattr(task, "template", "") is None:  # the prompts that the recipe's own run has
            task = replace(task, template=config.algorithm.template)
        return task, limits, config.eval.reward or config.reward
    from covary.tasks import BENCHMARKS, TASKS, Benchmark, all_of_reasoning_gym

    for family, endings in (("jsonl", (".jsonl", ".json")), ("parquet", (".parquet",))):
        if name.endswith(endings):
            return TASKS[family](path=name, test_path=name, train=0), {}, None
    if name in BENCHMARKS:
        folder = None if data_dir is None else str(data_dir)
        return Benchmark(name, data_dir=folder, test=limit, template=template), {}, None
    if name == "reasoning_gym":
        return all_of_reasoning_gym(limit, template), {}, None
    try:
        return TASKS["reasoning_gym"](tasks={name: {}}, train=0), {}, None
    except UserError as error:
        raise UserError(
            f"--task: {name!r} is no file, recipe, benchmark ({', '.join(BENCHMARKS)}, reasoning_gym) or task of "
            f"Reasoning Gym ({error})"
        ) from error


def _check_benchmark_options(names: list[str], options: dict[str, Any]) -> None:
    """Refuse options of benchmarks where none is asked for."""
    from covary.tasks import BENCHMARKS

    for option, value in options.items():
        takers = [*BENCHMARKS, *([] if option == "--data-dir" else ["reasoning_gym"])]
        if value is not None and not set(names) & set(takers):
            raise UserError(f"{option}: belongs to benchmarks ({', '.join(takers)}), and none is asked for")


def _algorithms() -> list[str]:
    from covary.algorithms import ALGORITHMS

    return [f"{name}: {_summary(cls)}" for name, cls in ALGORITHMS.items()]


def _tasks() -> list[str]:
    from covary.tasks import BENCHMARKS, TASKS

    families = [f"{name}: {_summary(cls)}" for name, cls in TASKS.items()]
    sources = {name: source.hub or "a local file only" for name, source in BENCHMARKS.items()}
    return [*families, *(f"{name}: benchmark, {source}" for name, source in sources.items())]


def _rewards() -> list[str]:
    from covary.rewards import GRADERS

    return [
        *(f"{name}: {_summary(f)}" for name, f in GRADERS.items()),
        "path/to/file.py:function: your own",
        "{model: NAME}: a reward model",
        "{judge: {model: NAME}}: a language model that compares with the reference answer",
        "{likelihood: KIND}: the policy's own likelihood of the reference answer (sum, mean, prob, geo, mean_prob)",
    ]


def _recipes() -> list[str]:
    return [f"{name}: {path}" for name, path in _recipe_files().items()]


def _recipe_files() -> dict[str, Path]:
    """Shipped recipes by name (`grpo`, `paper/grpo`): inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


def _one_line(text: str) -> str:
    from covary.log import printable

    return printable(" ".join(text.split()))
