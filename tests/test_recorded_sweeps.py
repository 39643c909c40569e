"""Pages of results from recorded sweeps: numbers, choices and verdicts on made-up runs, whole pages of the shipped sweeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from covary.sweep import load_sweep

ROOT = Path(__file__).parent.parent
SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import record_covrl  # pyright: ignore[reportMissingImports]
    import record_distillation  # pyright: ignore[reportMissingImports]
    import sweep_runs  # pyright: ignore[reportMissingImports]

    return {"covrl": record_covrl, "distillation": record_distillation, "runs": sweep_runs}


def recipe_path(name: str) -> Path:
    return ROOT / "recipes" / f"{name}.yaml"


def record(file: Path, folder: Path, rows: Callable[[str, int, int], list[dict[str, Any]]]) -> None:
    """Made-up runs of a sweep: `rows(point, seed, steps)` is each one's metrics."""
    sweep = load_sweep(file, recipe_path)
    for job in sweep.jobs:
        run = folder / sweep.out.name / job.folder.name
        run.mkdir(parents=True)
        lines = [json.dumps(row) + "\n" for row in rows(job.point, job.seed, job.steps)]
        (run / "metrics.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_a_shipped_sweep_is_valid(file: Path) -> None:
    sweep = load_sweep(file, recipe_path)
    assert sweep.out == Path("runs/sweeps") / file.stem
    assert sweep.jobs


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(
        "recipe: quickstart\nout: runs/small\nseeds: [0, 1, 2]\nset: {steps: 2}\nmetric: m\n"
        "points: {low: {optimizer.lr: 1e-4}, high: {optimizer.lr: 1e-3}}\n"
    )
    return file


def test_runs_are_read_by_point_and_what_is_missing_is_told(
    scripts: dict[str, ModuleType], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = scripts["runs"]
    with pytest.raises(SystemExit, match="holds no finished run; first: covary sweep"):
        runs.read(small, tmp_path)
    end = {"low": 0.5, "high": 0.8}
    record(small, tmp_path, lambda point, seed, steps: [
        {"step": 0, "m": 0.1, "x": None}, {"step": 1}, {"step": steps, "m": end[point] + 0.1 * seed, "x": 7}
    ])  # fmt: skip
    cut = tmp_path / "small" / "high-seed2" / "metrics.jsonl"
    cut.write_text('{"step": 0, "m": 0.1}\n{"step": 2, "m": 0.')  # half a line of a killed run
    points = runs.read(small, tmp_path)
    assert "1 of 6 runs" in capsys.readouterr().err
    low, high = points["low"], points["high"]
    assert [(run.seed, run.overrides["optimizer.lr"]) for run in high] == [(0, 1e-3), (1, 1e-3)]
    assert runs.change(low, "m") == "0.100 → 0.600"
    assert runs.span(low, "m") == f"{0.6 - 4.303 * 0.1 / 3**0.5:.3f} to {0.6 + 4.303 * 0.1 / 3**0.5:.3f}"
    assert runs.curve(low, "m") == {0: [0.1] * 3, 2: pytest.approx([0.5, 0.6, 0.7])}
    assert (low[0].first("x"), low[0].last("x")) == (7, 7)
    assert runs.difference(high, low, "m") == (pytest.approx(0.3), pytest.approx(0.0, abs=1e-9))  # common seeds only


def test_verdicts_follow_the_paired_intervals(scripts: dict[str, ModuleType]) -> None:
    runs = scripts["runs"]

    def point(*values: float) -> list[Any]:
        return [runs.Run(seed, {}, [{"step": 1, "m": value}]) for seed, value in enumerate(values)]

    points = {
        "a": point(0.5, 0.6, 0.7),
        "b": point(0.6, 0.71, 0.8),
        "c": point(0.2, 0.31, 0.4),
        "d": point(0.7, 0.6, 0.4),
    }
    assert runs.order(points, "a", "m") == (
        "ahead of it: b (+0.103 ± 0.014); behind it: c (-0.297 ± 0.014); not told apart from it: d (-0.033 ± 0.625)"
    )
    assert runs.sign((0.1, math.nan)) == 0  # one seed shows nothing
    assert runs.signed((math.nan, math.nan)) == ""


def test_the_best_rate_is_chosen_and_its_sweep_is_written(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    module = scripts["distillation"]
    rates = {"a": {1e-4: 0.5, 3e-4: 0.7, 1e-3: 0.7}, "b": {1e-4: 0.9, 1e-3: 0.1}}
    assert module.chosen(rates) == {"a": 3e-4, "b": 1e-4}  # the smaller of equal ones
    assert module.rate_table(rates).splitlines()[2] == "| a | 0.500 | **0.700** | 0.700 |"
    data = {
        "recipe": "distill_quickstart", "set": {"steps": 3}, "metric": "m",
        "points": {"a": {"algorithm": {"name": "gvpo_opd"}}, "b": {"algorithm": {"name": "seqkd"}, "teacher": {"model": "tiny_teacher"}}},
    }  # fmt: skip
    file = tmp_path / "methods.yaml"
    file.write_text(module.methods_sweep(data, module.chosen(rates)))
    sweep = load_sweep(file, recipe_path)
    assert {(job.point, dict(job.overrides)["optimizer.lr"]) for job in sweep.jobs} == {("a", 3e-4), ("b", 1e-4)}
    assert sorted(job.seed for job in sweep.jobs if job.point == "a") == [1, 2, 3, 4, 5]


def test_equal_runs_are_compared_in_every_common_metric(scripts: dict[str, ModuleType]) -> None:
    module, run = scripts["distillation"], scripts["runs"].Run

    def rows(gap: float, tokens: int) -> list[dict[str, float]]:
        return [
            {"step": 0, "eval/a": 0.5},
            {"step": 1, "tokens/generated": 9, "grad_norm": 4.0 + gap, "loss": gap * 100, "time/train": gap},
            {"step": 2, "tokens/generated": tokens, "grad_norm": 3.0, "eval/a": 0.6},
        ]

    rate = {"optimizer.lr": 1e-4}
    ours = [run(1, rate, [*rows(0.0, 9)]), run(2, rate, rows(0.0, 9))]
    theirs = [run(1, rate, rows(0.5, 8)), run(2, {"optimizer.lr": 1e-3}, rows(9.0, 1))]  # another rate: no pair
    points = {"gvpo_opd same tokens alpha 0": ours, "pg_opd_sequence same tokens": theirs}
    found, parted, pairs = module.equal(points, "same tokens")
    assert found == {"eval/a": (0.0, 0.6), "tokens/generated": (1, 9), "grad_norm": (0.5, 4.5)}
    assert (parted, pairs) == (2, 1)
    ours[0].rows[1]["gvpo_opd/log_ratio"], theirs[0].rows[1]["reward/mean"] = 3.0, -3.0
    assert module.equal(points, "same tokens")[0]["-gvpo_opd/log_ratio, reward/mean"] == (0.0, 3.0)


def test_the_page_of_distillation(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    module, runs = scripts["distillation"], scripts["runs"]

    def rows(point: str, seed: int, steps: int) -> list[dict[str, Any]]:
        end = 0.9 if "alpha 1" in point else 0.7 if "lr=0.0003" in point else 0.6
        measured = {0: 0.4 + 0.01 * seed, steps: end + 0.01 * seed}
        return [
            {
                "step": step,
                "completion/length": 20.0 - step * ("alpha=0.0," in f"{point},"),
                "tokens/generated": 5 + ("lr=0.001" in point and "pg" in point and step > 6),
            }
            | ({module.ACCURACY: measured[step], module.LENGTH: 21.0} if step in measured else {})
            for step in range(steps + 1)
        ]

    for file in (module.RATES, module.METHODS, module.ALPHA):
        record(file, tmp_path, rows)
    rates = runs.read(module.RATES, tmp_path)
    assert module.chosen(module.by_rate(rates))["seqkd same tokens"] == 3e-4
    methods, alpha = runs.read(module.METHODS, tmp_path), module.by_alpha(runs.read(module.ALPHA, tmp_path))
    assert list(alpha) == ["alpha = 0", "alpha = 0.25", "alpha = 0.5", "alpha = 0.75", "alpha = 1"]
    pair = [
        {"step": step, "gvpo_opd/log_ratio_variance": 100.0 - step, "gvpo_opd/log_ratio": 2.0,
         "gvpo_opd/student_length": 30.0, "gvpo_opd/teacher_length": 28.0, "gvpo_opd/truncated": 0.5}
        for step in range(1, 16)
    ]  # fmt: skip
    text = module.page(rates, methods, alpha, {"alpha = 0": pair, "alpha = 1": []})
    assert "| gvpo_opd alpha 1 | 0.0001 | 0.430 → 0.930 | 0.910 to 0.950 |  | 21.0 → 21.0 | 5 |" in text
    assert "| sft gold | 0.0001 | 0.430 → 0.630 | 0.610 to 0.650 | -0.300 ± 0.000 |" in text
    assert "here nothing is ahead of it" in text
    assert "At alpha = 0 completions fall from 20.0 to 0.0 tokens, as the paper's figure shows it." in text
    assert "so the paper's finding does not show in small" in text
    assert "With another tokenizer, 5 pairs of runs, which sampled as many tokens at every step" in text
    assert "other tokens, 0.0003: never; other tokens, 0.001: at step 7; same tokens, 0.0001: never" in text
    assert "the mean variance goes from 97.0 to 87.0 nats²" in text
    assert "A real pair" not in module.page(rates, methods, alpha, {})
    pytest.importorskip("matplotlib")
    module.draw(methods, alpha, {"alpha = 0": pair, "alpha = 1": []}, tmp_path / "plots")
    assert {path.name for path in (tmp_path / "plots").glob("*.png")} == {
        "distillation.png", "distillation_alpha.png", "distillation_length.png", "distillation_pair.png",
    }  # fmt: skip
    assert all(f"plots/{path.name}" in text for path in (tmp_path / "plots").glob("*.png"))


def test_the_page_of_covrl(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, runs = scripts["covrl"], scripts["runs"]
    monkeypatch.setattr(module, "SPREADS", (1.0,))
    monkeypatch.setattr(module, "WEIGHTS", (0.5,))
    monkeypatch.setattr(module, "PAIRS", 2)

    def rows(point: str, seed: int, steps: int) -> list[dict[str, Any]]:
        measured = {0: 0.4, steps: {"latro": 0.9, "prior_share=0.1": 0.8}.get(point, 0.6) + 0.01 * seed}
        own = {"reward": -2.0, "length": 8.0, "nll": 1.0, "kl": 0.5}
        return [
            {"step": step, "completion/length": 8.0}
            | ({module.ACCURACY: measured[step]} if step in measured else {})
            | {f"covrl/prior/{key}": value + 0.01 * step for key, value in own.items() if step}
            | {f"covrl/posterior/{key}": 0.5 * value - 0.01 * step for key, value in own.items() if step}
            for step in range(steps + 1)
        ]

    for name in ("covrl_methods", "covrl_prior_share"):
        record(ROOT / "sweeps" / f"{name}.yaml", tmp_path, rows)
    methods = runs.read(ROOT / "sweeps" / "covrl_methods.yaml", tmp_path)
    shares = module.by_share(runs.read(ROOT / "sweeps" / "covrl_prior_share.yaml", tmp_path))
    text = module.page(methods, shares)
    assert "| latro | 0.400 → 0.920 | 0.900 to 0.940 | +0.300 ± 0.000 | 8.0 → 8.0 | 5 |" in text
    assert "The paper has CoVRL first of the methods without a verifier; here it is not." in text
    assert "above the prior's at 20 of 20 steps" in text
    assert (
        "Rewards (the paper: both rise): prior -1.97 → -1.82 (+0.150 ± 0.000), as there; "
        "posterior -1.03 → -1.18 (-0.150 ± 0.000), the opposite." in text
    )
    assert "The paper has alpha = 0.1 above alpha = 0.9: +0.200 ± 0.000 at equal seeds, seen here." in text
    assert "The paper has alpha = 0.5 above alpha = 0.1: -0.200 ± 0.000 at equal seeds, the opposite here." in text
    pytest.importorskip("matplotlib")
    module.draw(methods, shares, tmp_path / "plots")
    drawn = {path.name for path in (tmp_path / "plots").glob("*.png")}
    assert drawn == {"covrl.png", "covrl_dynamics.png", "covrl_prior_share.png", "covrl_kl.png"}
    assert all(f"plots/{name}" in text for name in drawn)


def test_a_movement_is_of_windows_and_its_interval_over_runs(scripts: dict[str, ModuleType]) -> None:
    run = scripts["runs"].Run

    def rows(*values: float) -> list[dict[str, float]]:
        return [{"step": step, "m": value} for step, value in enumerate(values)]

    runs = [run(0, {}, rows(1, 3, 99, 5, 5)), run(1, {}, rows(2, 2, 99, 4, 4))]
    moved = scripts["covrl"].movement(runs, "m", window=2)
    assert moved == ("2 → 4.5 (+2.500 ± 6.353)", 0)  # changes 3 and 2: 12.706 * sqrt(0.5) / sqrt(2)
    assert scripts["covrl"].movement([runs[0], runs[0]], "m", window=2)[1] == 1


def test_estimators_have_the_exact_mean_where_the_page_says_so(scripts: dict[str, ModuleType]) -> None:
    estimates = scripts["covrl"].estimates
    for weight in (0.5, 0.1):
        found = {kind: estimates(1.0, weight, kind, pairs=5) for kind in ("source", "hybrid", "hybrid_exact", "full")}
        exact = found["full"][0]
        assert exact > 0
        for kind in ("source", "hybrid_exact", "full"):
            assert found[kind][1] == pytest.approx(exact, rel=1e-12), kind
        assert found["hybrid"][1] != pytest.approx(exact, rel=1e-4)  # the control: biased behind the first token
        assert found["full"][2] == 0 < found["hybrid"][2] < found["source"][2]
        one = estimates(1.0, weight, "hybrid", length=1, pairs=5)
        assert one[1] == pytest.approx(one[0], rel=1e-12)  # exact for one token


def test_traces_are_enumerated_with_the_laws_behind_their_prefixes(scripts: dict[str, ModuleType]) -> None:
    """Two tokens, two long: the second token's law is that of the row of its prefix."""
    prior = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.1, 0.9]], dtype=torch.float64).log()
    posterior = torch.tensor([[0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], dtype=torch.float64).log()
    p, q, p_law, q_law = scripts["covrl"].tables(prior, posterior, 2)
    assert torch.allclose(
        p.exp(), torch.tensor([[0.5, 0.25], [0.5, 0.75], [0.5, 0.1], [0.5, 0.9]], dtype=torch.float64)
    )
    assert torch.allclose(q.sum(-1).exp(), torch.tensor([0.06, 0.14, 0.32, 0.48], dtype=torch.float64))
    assert torch.equal(p_law[2], prior[[0, 2]])
    assert torch.equal(q_law[1], posterior[[0, 1]])


def test_the_page_of_covrl_on_smollm2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source that a step lacks leaves its cells empty; traces without the form are told."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import record_covrl_smollm2  # pyright: ignore[reportMissingImports]

    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    rows = [
        {"step": 1, "covrl/prior/reward": -12.5, "covrl/prior/nll": 3.0, "traces/truncated": 6, "traces/unclosed": 2},
        {"step": 2, "covrl/posterior/kl": 0.25, "covrl/prior/nll": 1.0},
    ]
    text = record_covrl_smollm2.page(rows, data, 2.0, 2)
    assert "| 1 | -12.5 | 3 |  |  |  |  |  |  | 0.75 |" in text
    assert "| 2 |  | 1 |  |  |  |  |  | 0.25 | 1.00 |" in text
    assert "of the steps: prior NLL, nats a token 3 → 1. A reward" in text
    assert "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356" in text  # sha256sum of the file
