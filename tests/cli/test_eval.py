"""`covary eval`: benchmarks, presets, folders, servers, comparisons; mistakes are told before a model is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from covary.cli import main
from covary.presets import PRESETS
from covary.tasks import BENCHMARKS
from tests.models import save_random_model
from tests.servers import choice, serving

QUESTIONS = [{"question": f"What is {i} + 0?", "answer": f"#### {i}"} for i in range(6)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("eval") / "model"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run a command in an empty folder that holds a benchmark's file; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["covary", "eval", *map(str, arguments), "--quiet"])
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return code, *capsys.readouterr()

    return run


GSM8K = ("--task", "gsm8k", "--data-dir", "data", "--max-tokens", 4)


def test_shards_resume_and_comparison(call, model: str, tmp_path: Path) -> None:
    for shard in ("0/2", "1/2"):
        code, out, err = call(model, *GSM8K, "-n", 2, "--out", "a", "--shard", shard, "--batch", 3)
        assert code == 0, err
    assert "gsm8k: its rows are not those that covary's tests read" in out
    assert "eval/gsm8k/majority@2" in out
    code, out, err = call(model, *GSM8K, "-n", 2, "--out", "b", "--json", "b.json")
    assert code == 0, err
    results = [json.loads((tmp_path / name / "gsm8k" / "results.json").read_text()) for name in "ab"]
    assert results[0] == results[1]
    assert json.loads((tmp_path / "b.json").read_text()) == results[0]["metrics"]
    code, out, err = call("--compare", "a", "b")
    assert code == 0, err
    assert (
        out
        == "gsm8k 0.000 -> 0.000, +0.000 (+0.000 to +0.000), 6 questions; greedy 0.000 -> 0.000, +0.000 (+0.000 to +0.000)\n"
    )
    code, _, err = call(model, *GSM8K, "-n", 3, "--out", "a")
    assert code == 2
    assert "holds an evaluation with other settings (sampling.samples)" in err


def test_a_server(call, model: str, tmp_path: Path) -> None:
    def knows(body: dict[str, Any]) -> tuple[int, Any]:
        """Right at temperature 0; otherwise right for every other seed."""
        question = bytes(b for b in body["prompt"] if b < 256)
        number = next(i for i in range(6) if len(question) > 0 and prompts[i] == body["prompt"])
        right = body["temperature"] == 0 or body["seed"] % 2
        return choice(rf"It is \boxed{{{number if right else 77}}}.")

    from covary.models.loading import load_tokenizer
    from covary.prompts import load_template, prompt_group
    from covary.tasks import Benchmark

    tokenizer = load_tokenizer(model)
    rows = Benchmark("gsm8k", data_dir="data").load().test
    prompts = [prompt_group(row, load_template("chat"), tokenizer).contexts["prompt"] for row in rows]
    with serving(knows) as (url, seen):
        arguments = (model, *GSM8K, "-n", 4, "--pass-at", "1,4", "--server", url, "--served", "big")
        code, _, err = call(*arguments, "--out", "out")
        assert code == 0, err
        code, _, err = call(*arguments, "--out", "out")  # nothing is left
    assert code == 0, err
    assert len(seen) == 6 * 5
    assert {body["model"] for body in seen} == {"big"}
    metrics = json.loads((tmp_path / "out" / "gsm8k" / "results.json").read_text())["metrics"]
    assert metrics["eval/gsm8k/greedy"] == 1
    share = sum(body["seed"] % 2 for body in seen if body["temperature"] > 0) / 24
    assert metrics["eval/gsm8k/accuracy"] == metrics["eval/gsm8k/pass@1"] == pytest.approx(share)
    settings = json.loads((tmp_path / "out" / "gsm8k" / "settings.json").read_text())
    assert settings["model"] == {"engine": "server", "model": "big"}


def test_a_server_that_is_not_there(call, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covary.http.time.sleep", lambda seconds: None)
    code, _, err = call(model, *GSM8K, "--server", "http://127.0.0.1:9/v1")
    assert code == 1
    assert err.startswith("stopped: http://127.0.0.1:9/v1/completions gave no answer in")
    code, _, err = call(model, *GSM8K, "--server", "localhost:8000")
    assert code == 2
    assert "takes an address such as" in err


def test_presets(call, model: str, tmp_path: Path) -> None:
    assert all(set(preset.samples) <= BENCHMARKS.keys() for preset in PRESETS.values())
    assert PRESETS["gvpo"].samples["aime24"] == 32
    assert {(preset.temperature, preset.max_tokens) for preset in PRESETS.values()} == {(0.6, 4096)}
    folder = tmp_path / "data" / "aime24"
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps({"problem": "?", "answer": "025"}) + "\n")
    code, _, err = call(
        model, "--preset", "gvpo", "--task", "aime24", "--data-dir", "data", "--max-tokens", 4, "--out", "out"
    )
    assert code == 0, err
    settings = json.loads((tmp_path / "out" / "aime24" / "settings.json").read_text())
    assert settings["sampling"] == {
        "samples": 32, "greedy": False, "temperature": 0.6, "max_tokens": 4, "stop": [], "seed": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a model, or two evaluations with --compare A B"),
        (("m",), "--task: names no task"),
        (("m", "--task", "gsm9k"), "'gsm9k' is no file, recipe, benchmark (aime24,"),
        (("m", "--task", "gsm8k", "--data-dir", "nowhere"), "there is no folder nowhere/gsm8k"),
        (("m", *GSM8K, "--preset", "other"), "--preset: takes one of gvpo, covrl, got 'other'"),
        (("m", *GSM8K, "--preset", "gvpo"), "--preset: gvpo has no number of samples for gsm8k; give -n, or one of aime24,"),
        (("m", *GSM8K, "-n", 2, "--pass-at", "4"), "pass@4: gsm8k has 2 samples per question; k goes from 1 to that"),
        (("m", *GSM8K, "--pass-at", "0"), "--pass-at: takes whole numbers above 0"),
        (("m", *GSM8K, "--temperature", "0"), "--temperature: takes a number above 0"),
        (("m", *GSM8K, "--shard", "0/2"), "--shard: belongs to --out, which is missing"),
        (("m", *GSM8K, "--batch", 8), "--batch: belongs to --out, which is missing"),
        (("m", *GSM8K, "--out", "o", "--shard", "2"), "--shard: takes i/n"),
        (("m", *GSM8K, "--served", "x"), "--served: belongs to --server, which is missing"),
        (("m", *GSM8K, "--concurrency", 2), "--concurrency: belongs to --server, which is missing"),
        (("m", "--task", "gsm8k,gsm8k", "--data-dir", "data"), "two tasks report eval/gsm8k; evaluate them apart"),
        (("m", "--compare", "a", "b"), "--compare: takes two folders and evaluates nothing"),
        (("--compare", "a", "b"), "--compare: a holds no evaluation"),
        (("m", "--task", "chain_sum", "--data-dir", "data"), "--data-dir: belongs to benchmarks (aime24,"),
        (("m", "--task", "chain_sum", "--limit", "3"), "--limit: belongs to benchmarks (aime24,"),
    ],
)  # fmt: skip
def test_mistakes(call, arguments: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("covary.measure.load_model", loaded)
    code, _, err = call(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_recipe_is_graded_by_its_own_reward_and_any_task_by_the_one_named(call, model: str, tmp_path: Path) -> None:
    """`eval.reward`, else `reward`, as in a run of the recipe."""
    (tmp_path / "mine.py").write_text(
        "def half(completion, answer):\n    return 0.5\n\ndef third(completion, answer):\n    return 0.25\n"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "answer": "x"}) + "\n" for i in range(8))
    )
    recipe = "steps: 1\nalgorithm: {name: gvpo}\ntask: {name: jsonl, path: rows.jsonl, test: 2}\n"
    trained = recipe + "reward: mine.py:half\n"
    limits = ("--max-tokens", 2, "--no-greedy")

    def reward(text: str, *options: Any) -> float:
        (tmp_path / "r.yaml").write_text(text)
        code, _, err = call(model, "--task", "r.yaml", *limits, "--json", "f.json", *options)
        assert code == 0, err
        return json.loads((tmp_path / "f.json").read_text())["eval/rows/reward"]

    assert reward(recipe) == 0
    assert reward(trained) == 0.5
    code, _, err = call("no/such/model", *GSM8K, "--reward", "maths")
    assert code == 2
    assert "there is no grader 'maths'; did you mean 'math'?" in err


def test_a_recipe_is_evaluated_with_the_prompts_of_its_run() -> None:
    from covary.cli import _task

    templates = {name: _task(name, None, None, None)[0].template for name in ("quickstart", "covrl_quickstart", "rlpr")}
    assert templates == {"quickstart": "chat", "covrl_quickstart": "think", "rlpr": "rlpr"}
