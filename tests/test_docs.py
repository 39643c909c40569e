"""The documentation says what the code does: its examples run, its tables, commands, links and paths are checked."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from covary import doctor, settings
from covary.algorithms import ALGORITHMS, GVPO
from covary.batch import Batch
from covary.cli import app
from covary.config import RunConfig, apply_overrides, load_recipe, validate
from covary.evaluate import Sample
from covary.presets import PRESETS
from covary.samples import RESULTS, SETTINGS
from covary.tasks import BENCHMARKS, TASKS
from covary.tasks.rows import Rows
from tests.loop.mini import metrics, needs, run
from tests.models import save_random_model

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))])

SECTIONS: dict[str, type] = {
    "model": settings.Model,
    "rollout": settings.Rollout,
    "optimizer": settings.Optimizer,
    "engine": settings.Engine,
    "eval": settings.Eval,
    "checkpoint": settings.Checkpoint,
    "log": settings.Log,
}
PARTS: dict[str, tuple[str, type]] = {
    "vLLM": ("rollout.server", settings.RolloutServer),
    "Reward models": ("reward", settings.RewardModel),
    "Likelihood of the answer": ("reward", settings.LikelihoodReward),
    "Judges": ("reward.judge", settings.Judge),
    "Servers of judges": ("reward.judge.server", settings.JudgeServer),
    "Teachers in this process": ("teacher", settings.Teacher),
    "Teachers behind a server": ("teacher", settings.TeacherServer),
}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_MATH = re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL)


def fences(page: Path, *languages: str) -> list[str]:
    """Contents of the fenced blocks in one of `languages`."""
    return [text for language, text in _FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def section(page: Path, title: str) -> str:
    """What stands under the heading of that text, up to the next heading of its level or above."""
    text = prose(page)
    headings = list(_HEADING.finditer(text))
    start = next(h for h in headings if h[2] == title)
    ends = [h.start() for h in headings if h.start() > start.start() and len(h[1]) <= len(start[1])]
    return text[start.end() : min(ends, default=len(text))]


def table(text: str) -> dict[str, list[str]]:
    """Rows of a text's tables by their first cell; code marks are taken off a cell that is nothing but code."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    first = {row[0]: row[1:] for row in cells if row[0].startswith("`")}
    assert len(first) == sum(row[0].startswith("`") for row in cells), "a table names something twice"
    return {code(name): [code(cell) for cell in rest] for name, rest in first.items()}


def code(cell: str) -> str:
    return cell[1:-1] if re.fullmatch(r"`[^`]*`", cell) else cell


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return list(value) if isinstance(value, tuple) else value


def read(cell: str) -> Any:
    """A cell as a recipe's value."""
    return apply_overrides({}, [f"value={cell}"])["value"]


# -- authoring.md --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which every file of authoring.md was written and every command of it was run."""
    folder = tmp_path_factory.mktemp("authoring")
    model = str(save_random_model(folder / "model"))
    page = DOCS / "authoring.md"
    for block in fences(page, "python", "yaml"):
        named = re.match(r"# (\w+\.(?:py|yaml))\n", block)
        assert named, f"an example without a file name in its first line: {block[:60]!r}"
        text = block.replace("name: tiny", f"name: {model}").replace('"tiny"', repr(model))
        (folder / named[1]).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in fences(page, "bash"):
            for line in block.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "covary"
                app([*arguments, "--quiet"] if arguments[0] == "train" else arguments, standalone_mode=False)
        patch.syspath_prepend(folder)
        runpy.run_path(str(folder / "my_run.py"), run_name="__main__")
    yield folder
    for name in ("my_algorithm", "my_task"):
        sys.modules.pop(name, None)


def test_the_examples_of_authoring_run(authored: Path) -> None:
    python = {path.name for path in authored.glob("*.py")}
    assert python == {"my_algorithm.py", "my_selective.py", "my_reward.py", "my_task.py", "my_run.py"}
    mine, selective, script = (metrics(authored / "runs" / name) for name in ("mine", "selective", "script"))
    assert [row["step"] for row in mine] == [0, 1, 2, 3]  # two steps, and one more by --resume
    assert [row["step"] for row in selective] == [row["step"] for row in script] == [0, 1, 2]
    for row in [*mine[1:], *script[1:]]:
        assert row["grad_norm"] > 0
        assert row["leave_one_out/max_advantage"] > 0
        assert row["kl/initial"] >= 0
        assert row["rows/unscorable"] <= 8  # completions of no characters only
    assert "eval/doubling/accuracy" in mine[0]
    rollout = (authored / "runs" / "mine" / "rollouts" / "step-000001.jsonl").read_text()
    rows = [json.loads(line) for line in rollout.splitlines()]
    assert len(rows) == 8 * 4
    assert all(row["finish"] != "stop_string" or "\n" not in row["completion"] for row in rows)  # the template's stop


# -- variance-and-entropy.md ---------------------------------------------------------------------------------


def test_the_numbers_of_variance_and_entropy_are_those_of_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "variance-and-entropy.md"
    (script,), (printed,) = fences(page, "python"), fences(page, "text")
    exec(compile(script, str(page), "exec"), {})
    assert capsys.readouterr().out == printed
    number = re.compile(r"-?\d+\.\d{3,}|-?\d+(?:\.\d+)?e-\d+")
    assert set(number.findall(_LINK.sub("", prose(page)))) <= set(number.findall(printed))


def test_what_variance_and_entropy_says_of_the_loss() -> None:
    """Its group's minimum is that of GVPO itself, and without the variance there is none, whatever the entropy's weight."""
    rewards, uniform = torch.tensor([0.0, 0, 1, 1, 1]), torch.full((5, 1), 0.2)
    batch = Batch(
        tokens=torch.zeros(5, 1, dtype=torch.long),
        mask=torch.ones(5, 1, dtype=torch.bool),
        answer_mask=torch.zeros(5, 1, dtype=torch.bool),
        group=torch.zeros(5, dtype=torch.long),
        rewards=rewards,
        learn=torch.ones(5, dtype=torch.bool),
        truncated=torch.zeros(5, dtype=torch.bool),
        source=("policy",) * 5,
        max_tokens=1,
        numbers={"reference": uniform.log()},
    ).with_totals()

    def loss(algorithm: GVPO, rare: float) -> tuple[float, float]:
        """Value, and slope along the logits of the wrong tokens."""
        logits = torch.tensor([rare, rare, 0.0, 0, 0], dtype=torch.float64).requires_grad_()
        logp = logits.log_softmax(0)
        entropy = -(logp.exp() * logp).sum().expand(5, 1)
        value = algorithm.loss({"policy": logp.unsqueeze(1), "entropy": entropy}, batch)
        value.backward()
        assert logits.grad is not None
        return float(value.detach()), float(logits.grad[:2].sum())

    assert loss(GVPO(), -10.0)[1] == pytest.approx(0, abs=1e-6)  # a / c = exp(-1 / beta)
    assert loss(GVPO(), -10.1)[1] < 0 < loss(GVPO(), -9.9)[1]
    for coef in (0.1, 10.0):
        ablation = GVPO(terms=("covariance",), entropy_coef=coef)
        values = [loss(ablation, rare)[0] for rare in (0.0, -(10.0**3), -(10.0**4), -(10.0**5))]
        assert values[1] > values[2] > values[3]
        assert values[0] > values[2]


# -- tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_page_names_every_field_with_its_default(name: str) -> None:
    page = DOCS / "algorithms" / f"{name}.md"
    documented = {field: read(cells[0]) for field, cells in table(section(page, "Fields")).items()}
    assert documented == {f.name: default_of(f) for f in dataclasses.fields(ALGORITHMS[name]) if f.init}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_page_names_every_metric_of_its_own(name: str, tmp_path: Path) -> None:
    page = DOCS / "algorithms" / f"{name}.md"
    run(tmp_path, **{"algorithm": {"name": name}, "steps": 1, **needs({"name": name}, tmp_path)})
    names = metrics(tmp_path / "run")[-1]
    assert {n for n in names if n.startswith(f"{name}/")} == set(table(section(page, "Metrics")))
    if name == "sft":
        assert not [n for n in names if n.startswith(("kl/", "reward/", "entropy"))]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_commands_of_an_algorithms_page_are_valid(name: str) -> None:
    lines = [line for block in fences(DOCS / "algorithms" / f"{name}.md", "bash") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("covary train ")]
    assert commands
    for _, _, recipe, *overrides in commands:
        config = validate(apply_overrides(load_recipe(ROOT / recipe), overrides), where=recipe)
        assert type(config.algorithm) is ALGORITHMS[name]


def test_every_recipe_key_is_documented_with_its_default() -> None:
    page = DOCS / "recipes.md"
    named = {"task", "algorithm", *SECTIONS}
    top = {f.name: default_of(f) for f in dataclasses.fields(RunConfig) if f.name not in named}
    assert {key: read(cells[1]) for key, cells in table(section(page, "Top level")).items()} == top
    families = {name: ("task", cls) for name, cls in TASKS.items()}
    sections = {name: (name, cls) for name, cls in SECTIONS.items()}
    for title, (prefix, cls) in {**sections, **families, **PARTS}.items():
        common = section(page, "Rows of data") if issubclass(cls, Rows) else ""
        documented = {key: read(cells[1]) for key, cells in table(common + section(page, title)).items()}
        real = {f"{prefix}.{f.name}": default_of(f) for f in dataclasses.fields(cls)}
        assert documented == real, title
        assert list(documented) == list(real), f"{title}: another order than in the code"
    listed = set(re.findall(r"algorithms/(\w+)\.md", section(page, "algorithm")))
    assert listed == set(ALGORITHMS)


def test_metrics_and_their_tables_are_the_same(tmp_path: Path) -> None:
    page = DOCS / "concepts.md"
    always = {
        name.replace("<task>", "sums").replace("<N>", "2")
        for name in table(section(page, "In every run that samples and is rewarded"))
    }
    sometimes = set(table(section(page, "Where they apply")))
    own = set(table(section(DOCS / "algorithms" / "gvpo.md", "Metrics")))
    run(tmp_path, eval={"samples": 2})
    written = {name for row in metrics(tmp_path / "run") for name in row}
    assert written == always | own
    assert set(metrics(tmp_path / "run")[0]) == {"step", *(name for name in always if name.startswith("eval/"))}
    other = tmp_path / "other"
    other.mkdir()
    run(other, steps=1, reference="initial")
    more = set(metrics(other / "run")[-1])
    assert more - always - own == sometimes


def test_the_evaluation_page_lists_benchmarks_presets_and_files() -> None:
    page = DOCS / "evaluation.md"
    listed = {name: (cells[0] or None, cells[1]) for name, cells in table(section(page, "Benchmarks")).items()}
    assert listed == {name: (source.hub, source.grader) for name, source in BENCHMARKS.items()}
    presets = {
        name: (dict(re.findall(r"`(\w+)` \((\d+)\)", cells[0])), float(cells[1]), int(cells[2]))
        for name, cells in table(section(page, "Presets")).items()
    }
    assert presets == {
        name: ({task: str(n) for task, n in preset.samples.items()}, preset.temperature, preset.max_tokens)
        for name, preset in PRESETS.items()
    }
    files = table(section(page, "Samples and seeds"))
    assert set(files) == {SETTINGS, RESULTS, "samples.jsonl"}
    named = re.findall(r"`(\w+)`", files["samples.jsonl"][0])
    assert named == [field.name for field in dataclasses.fields(Sample)]


def test_the_doctors_page_names_every_finding_with_its_patience_and_thresholds() -> None:
    findings = table(section(DOCS / "doctor.md", "Findings"))
    assert {name: int(cells[0]) for name, cells in findings.items()} == {
        name: patience for name, (patience, _) in doctor.SYMPTOMS.items()
    }
    numbers = {name: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", cells[1])] for name, cells in findings.items()}
    first = doctor.FIRST_STEPS
    thresholds = {
        "past_end": [100 * doctor.PAST_END],
        "truncated": [100 * doctor.TRUNCATED],
        "sampling_drift": [doctor.SAMPLING_KL],
        "shorter": [doctor.SHORTER, first],
        "longer": [doctor.LONGER, first, 100 * doctor.LONGER_TRUNCATED],
        "old_kl": [doctor.OLD_KL],
        "initial_kl": [doctor.INITIAL_KL],
    }
    assert {name: numbers[name] for name in thresholds} == thresholds
    options = table(prose(DOCS / "doctor.md").split("## Findings")[0])
    assert list(options)[1:] == list(get_args(get_type_hints(RunConfig, localns={"Algorithm": Any})["doctor"]))


def test_a_line_of_rollouts_has_the_documented_keys(authored: Path) -> None:
    first = (authored / "runs" / "mine" / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0]
    paragraph = re.search(r"A line of `rollouts/` has (.*?)\n\n", prose(DOCS / "concepts.md"), re.DOTALL)
    assert paragraph
    assert set(json.loads(first)) <= set(re.findall(r"`(\w+)`", paragraph[1]))


# -- links and paths -----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = (title for _, title in _HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for target in _LINK.findall(_MATH.sub("", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_package_that_pages_name_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/.-])(?:covary|tests)/[\w/]+(?:\.\w+)?", page.read_text(encoding="utf-8")))
    assert not [path for path in named if not (ROOT / path).exists()]
