"""The command line. Exit code 0 on success, 2 for a user's mistake (one line on stderr), 1 otherwise.

Heavy modules are imported inside the commands: `covary --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
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
    model: Annotated[str, typer.Argument(help="Shipped name, folder, hub id, or a run folder.")],
    task: Annotated[
        str,
        typer.Option(help="Recipe files, .jsonl or .parquet files, or Reasoning Gym task names, separated by commas."),
    ],
    samples: Annotated[int, typer.Option("-n", "--samples", min=1, help="Completions per question.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit per completion; default: the recipe's, else 256.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a completion; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; default: the recipe's, else 0.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the metrics to this file.")] = None,
    quiet: Quiet = False,
) -> None:
    """Accuracy over the test split of one or more tasks, with n samples per question."""
    if not temperature > 0:
        raise UserError(f"--temperature: takes a number above 0, got {temperature} (greedy accuracy is always shown)")
    if json_file is not None and not json_file.parent.is_dir():
        raise UserError(f"--json: there is no folder {json_file.parent}")
    tasks = [_task(name.strip()) for name in task.split(",") if name.strip()]
    if not tasks:
        raise UserError("--task: names no task")
    from covary import api
    from covary.log import Screen

    screen = Screen(quiet)
    metrics: dict[str, float] = {}
    for one, limits in tasks:
        found = api.evaluate(
            model,
            one,
            samples=samples,
            temperature=temperature,
            max_tokens=max_tokens or limits.get("max_tokens", 256),
            stop=stop or limits.get("stop", ()),
            seed=limits.get("seed", 0) if seed is None else seed,
            on_progress=screen.completions,
        )
        if found.keys() & metrics.keys():
            raise UserError(f"--task: two tasks report {min(found.keys() & metrics.keys())}; evaluate them apart")
        metrics |= found
    for name, value in metrics.items():
        screen.say(f"{name} {value:.4g}")
    if json_file is not None:
        json_file.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


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
    for line in run_sweep(checked, cores or os.cpu_count() or 1, threads, screen):
        screen.say(line)
    screen.say(f"results: {checked.out}")


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
        sys.stderr.write(f"error: {_one_line(error)}\n")
        sys.exit(2)
    except RunError as error:
        sys.stderr.write(f"stopped: {_one_line(error)}\n")
        sys.exit(1)


def _config(recipe: str | None, overrides: list[str], default_out: bool = False) -> Any:
    from covary.config import apply_overrides, load_recipe, validate

    if recipe is None:
        raise UserError("train: name a recipe file, or --resume RUN; `covary list recipes` shows the shipped ones")
    path = _recipe_path(recipe)
    data = apply_overrides(load_recipe(path), overrides)
    if default_out and data.get("out") is None:
        data["out"] = f"runs/{path.stem}"
    return validate(data, where=str(path))


def _recipe_path(name: str) -> Path:
    """A file, or the name of a shipped recipe."""
    path = Path(name)
    return path if path.exists() else _recipe_files().get(name, path)


def _task(name: str) -> tuple[Any, dict[str, Any]]:
    """A task family's object from a recipe, a data file, or a Reasoning Gym task's name; and the recipe's limits."""
    if name.endswith((".yaml", ".yml")) or name in _recipe_files():
        config = _config(name, [])
        limits = {
            "max_tokens": config.eval.max_tokens or config.rollout.max_tokens,
            "stop": config.rollout.stop,
            "seed": config.seed,
        }
        return config.task, limits
    from covary.tasks import TASKS

    for family, endings in (("jsonl", (".jsonl", ".json")), ("parquet", (".parquet",))):
        if name.endswith(endings):
            return TASKS[family](path=name, test_path=name, train=0), {}
    return TASKS["reasoning_gym"](tasks={name: {}}, train=0), {}


def _algorithms() -> list[str]:
    from covary.algorithms import ALGORITHMS

    return [f"{name}: {_summary(cls)}" for name, cls in ALGORITHMS.items()]


def _tasks() -> list[str]:
    from covary.tasks import TASKS

    return [f"{name}: {_summary(cls)}" for name, cls in TASKS.items()]


def _rewards() -> list[str]:
    from covary.rewards import GRADERS

    return [
        *(f"{name}: {_summary(f)}" for name, f in GRADERS.items()),
        "path/to/file.py:function: your own",
        "{model: NAME}: a reward model",
        "{judge: {model: NAME}}: a language model that compares with the reference answer",
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


def _one_line(error: Exception) -> str:
    from covary.log import printable

    return printable(" ".join(str(error).split()))
