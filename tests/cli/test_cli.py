"""The command line: exit code 0 on success, 2 with one clear line for a user's mistake, nothing half made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from covary.cli import main
from tests.loop.mini import comparable, metrics
from tests.models import save_random_model, save_with_another_end


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def recipe(tmp_path, model, monkeypatch) -> Path:
    """A recipe of two tiny steps, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    data = {
        "steps": 2,
        "model": {"name": str(model)},
        "task": {
            "name": "reasoning_gym", "train": 40, "test": 4,
            "tasks": {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}},
        },
        "algorithm": {"name": "gvpo", "beta": 0.1},
        "rollout": {"prompts": 4, "completions": 2, "max_tokens": 6},
        "optimizer": {"lr": 1e-3, "prompts": 2},
        "log": {"samples": 1},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def covary(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    monkeypatch.setattr(sys, "argv", ["covary", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def call(monkeypatch, capsys):
    return lambda *arguments: covary(monkeypatch, capsys, *arguments)


def test_train_resume_export_and_eval(call, recipe, tmp_path):
    code, out, err = call("train", recipe, "out=run", "--quiet")
    assert code == 0, err
    assert "step 2/2" in out
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"config.yaml", "metrics.jsonl", "rollouts", "checkpoints"}
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]

    code, out, err = call("train", "--resume", "run", "steps=4", "checkpoint.every=1", "--quiet")
    assert code == 0, err
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    # The written configuration reruns the run.
    code, _, err = call("train", tmp_path / "run" / "config.yaml", "out=again", "--quiet")
    assert code == 0, err
    again, first = metrics(tmp_path / "again"), metrics(tmp_path / "run")
    assert [comparable(row) for row in again] == [comparable(row) for row in first]

    code, out, err = call("export", "run", "--out", "exported")
    assert code == 0, err
    files = {p.name for p in (tmp_path / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert not {"state.json", "training.safetensors"} & files
    for name in ("exported", "run"):
        code, out, err = call(
            "eval", name, "--task", recipe, "-n", "2", "--max-tokens", "6", "--json", f"{name}.json", "--quiet"
        )
        assert code == 0, err
        assert "eval/chain_sum/accuracy" in out
    in_run = {k: v for k, v in metrics(tmp_path / "run")[-1].items() if k.startswith("eval/")}
    code, _, err = call("eval", "run", "--task", recipe, "--json", "same.json", "--quiet")
    assert code == 0, err
    assert (
        json.loads((tmp_path / "same.json").read_text()) == in_run
    )  # the same limits, seed and sampling as in the run
    exported, run = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("exported", "run"))
    assert exported == run
    assert exported["eval/chain_sum/pass@2"] >= exported["eval/chain_sum/accuracy"]
    code, _, err = call("export", "run", "--out", "exported")
    assert code == 2
    assert "not an empty folder" in err
    code, _, err = call("eval", "run", "--task", recipe, "--json", "nowhere/x.json")
    assert code == 2
    assert "there is no folder nowhere" in err
    code, _, err = call("eval", "run", "--task", f"{recipe},{recipe}", "--max-tokens", "2", "--quiet")
    assert code == 2
    assert "two tasks report" in err
    code, _, err = call("export", "run", "--out", "x", "--step", "1")
    assert code == 2
    assert "not 1" in err


def test_check(call, recipe, model, tmp_path):
    code, out, err = call("check", recipe)
    assert code == 0, err
    assert "2 steps of 4 prompts x 2 completions, 2 updates a step, 4 in all; 40 training and 4 test rows" in out
    assert "at most 96 completion tokens" in out
    assert out.count("State the final answer") == 2
    assert "<|im_start|>assistant" in out
    assert "reference answers: 44 of 44 graded rows get reward 1" in out
    assert "one tiny step ran" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.yaml"]
    code, out, _ = call("check", recipe, "--no-model", "optimizer.prompts=4")
    assert code == 0
    assert "tiny step" not in out
    assert "nothing holds the policy back" in out
    # A model that is not on this machine stops the check only where it is needed.
    assert call("check", recipe, "--no-model", "model.name=./nothere")[0] == 2
    code, out, err = call("check", recipe, "--no-model", "model.name=nobody/nowhere")
    assert code == 0, err
    assert "prompts are shown as messages" in out
    assert call("check", recipe, "model.name=nobody/nowhere")[0] == 2
    # A folder that is there has to have a tokenizer.
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text((model / "config.json").read_text())
    code, _, err = call("check", recipe, "--no-model", "model.name=m")
    assert code == 2
    assert "model.name: 'm'" in err


@pytest.mark.parametrize("key", ["model.name", "teacher.model"])
def test_a_check_without_the_model_needs_no_hub_id_and_no_gguf_file_but_a_folder(call, tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    for absent in ("nobody/nowhere", "models/nowhere.gguf"):
        code, out, err = call("check", "distill_quickstart", "--no-model", f"{key}={absent}")
        assert code == 0, err
        assert f"{absent} is not on this machine" in out
    code, _, err = call("check", "distill_quickstart", "--no-model", f"{key}=./nothere")
    assert code == 2
    assert f"{key}: no folder ./nothere" in err
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    code, _, err = call("check", "distill_quickstart", "--no-model", f"{key}=broken.gguf")
    assert code == 2
    assert f"{key}: " in err


def test_check_reports_a_chat_template_whose_end_ends_nothing(call, recipe, tmp_path):
    other = save_with_another_end(tmp_path / "other")
    code, out, err = call("check", recipe, f"model.name={other}", "--no-model")
    assert code == 0, err
    assert "warning: the chat template ends an answer with '<|im_end|>', which ends no completion" in out
    end_in_generation_config = json.loads((other / "generation_config.json").read_text()) | {"eos_token_id": [258, 257]}
    (other / "generation_config.json").write_text(json.dumps(end_in_generation_config))
    assert "ends no completion" not in call("check", recipe, "--no-model", f"model.name={other}")[1]


def test_check_reports_a_grader_that_refuses_the_gold_answers(call, recipe, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n{"prompt": "q", "answer": "b"}\n')
    (tmp_path / "mine.py").write_text("def never(completion, answer):\n    return 0.0\n")
    code, out, err = call("check", recipe, "--no-model", f"task={{name: jsonl, path: {path}}}", "reward=mine.py:never")
    assert code == 0, err
    assert "note: the gold answer 'a'" in out


def test_version(call):
    from covary import __version__

    assert call("--version")[1].strip() == __version__


def test_a_run_can_be_resumed_from_another_folder(call, recipe, tmp_path, monkeypatch):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def score(completion, answer):\n    return float(len(completion))\n")
    code, _, err = call("train", recipe, "out=run", "task={name: jsonl, path: data.jsonl}", "reward=mine.py:score")
    assert code == 0, err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = call("train", "--resume", "../run", "steps=3", "--quiet")
    assert code == 0, err


def test_eval_takes_data_files(call, recipe, tmp_path, model):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": i, "prompt": f"{i} + 1 =", "answer": i + 1} for i in range(3)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "held.parquet")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = call("eval", str(model), "--task", "held.parquet,lines.jsonl", "--max-tokens", "4", "--quiet")
    assert code == 0, err
    figures = [line.split() for line in out.splitlines() if line.startswith("eval/")]
    held, lines = ({k.split("/")[2]: v for k, v in figures if k.split("/")[1] == name} for name in ("held", "lines"))
    assert held == lines  # the same ids have the same seeds
    assert held.keys() >= {"accuracy", "greedy", "length"}


def test_given_completions_that_would_be_ignored_are_refused(call, recipe, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "1", "text": "x"}\n')
    code, _, err = call("check", recipe, "--no-model", "task={name: jsonl, path: data.jsonl, completion: text}")
    assert code == 2
    assert "task.completion: would be ignored" in err


def test_list(call):
    for what, word in (("algorithms", "gvpo"), ("tasks", "jsonl"), ("rewards", "math"), ("recipes", "quickstart")):
        code, out, _ = call("list", what)
        assert code == 0
        assert word in out
    code, _, err = call("list", "models")
    assert code == 2
    assert "takes one of algorithms, tasks, rewards, recipes, got 'models'" in err


LONG = "x " * 300


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.bta=1"], "algorithm.bta: unknown key; did you mean algorithm.beta?"),
        (["lr=1e-3"], "lr: unknown key; belongs under optimizer"),
        (["algorithm.name=gpvo"], "unknown algorithm 'gpvo'; did you mean gvpo?"),
        (["optimizer.lr=fast"], "optimizer.lr: takes a number from 0, got the text 'fast'"),
        (["steps=2.5"], "steps: takes an integer above 0"),
        (["rollout.completions=1"], "gvpo needs at least 2 completions per prompt, got rollout.completions: 1"),
        (["optimizer.prompts=3"], "optimizer.prompts: must divide rollout.prompts (4), got 3"),
        (["rollout.max_tokens=250"], "more than the model's context of 256"),
        ([f"task.instruction={LONG}"], "more than the model's context of 256"),
        (["model.name=./missing"], "model.name: no folder ./missing"),
        (["model.name=tinny"], "'tinny' is no shipped model (tiny, tiny_student, tiny_teacher, tiny_teacher_bytes, tiny_think) or"),
        (["task.tasks={chain_summ: {}}"], "chain_sum"),
        (["task.template=chatt"], "did you mean chat?"),
        (["reward=mth"], "did you mean 'math'?"),
        (["reward=missing.py:f"], "missing.py"),
        (["engine.device=cuda"], "torch sees no CUDA device"),
        (["nonsense"], "an override is key=value"),
        (["rollout.temperature=1e300"], "outside of any sensible range"),
        (["seed=-1"], "outside of any sensible range"),
        (["rollout.completions=99999999999"], "outside of any sensible range"),
        (["eval.reward=exat"], "did you mean 'exact'?"),
        (["eval.max_tokens=5000"], "more than the model's context of 256"),
        (["out=recipe.yaml/run"], "cannot be made"),
        (["rollout.engine=dataset", "task={name: jsonl, path: pairs.jsonl}"], "has no completions"),
    ],
)  # fmt: skip
def test_mistakes_exit_with_2_one_line_and_no_folder(call, recipe, tmp_path, overrides, message):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    code, _, err = call("train", recipe, "out=run", *overrides)
    assert code == 2, err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
    if not any(override.startswith(("out=", "model.name=", "engine.device=")) for override in overrides):
        # What stops a run stops its check, also without the model.
        code, _, err = call("check", recipe, "--no-model", *overrides)
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows"),
        (b'{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"\n', "data.jsonl, line 3: not valid JSON"),
        (b'{"prompt": "a", "answer": "1"}\n[1, 2]\n', "data.jsonl, line 2: not a JSON object"),
        (b'{"question": "a", "answer": "1"}\n', "prompt"),
        (b'{"prompt": "a", "answer": "1"}\n\xff\n', "data.jsonl, line 2: not valid UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": "b"}\n', "no row of task test_bad_data"),
    ],
)
def test_bad_data_names_file_and_line(call, recipe, tmp_path, content, message):
    (tmp_path / "data.jsonl").write_bytes(content)
    code, _, err = call("train", recipe, "out=run", "task={name: jsonl, path: data.jsonl}")
    assert code == 2, err
    assert message in err
    assert not (tmp_path / "run").exists()


def test_mark_missing_newline_and_line_separator_are_accepted(call, recipe, tmp_path):
    rows = '\ufeff{"prompt": "1 +\u2028 1 =", "answer": "2"}\n\n{"prompt": "2 + 2 =", "answer": "4"}'
    (tmp_path / "data.jsonl").write_bytes(rows.encode())
    code, out, err = call("check", recipe, "task={name: jsonl, path: data.jsonl}")
    assert code == 0, err
    assert "2 training and 0 test rows" in out


def test_an_existing_run_folder_is_refused_and_untouched(call, recipe, tmp_path):
    assert call("train", recipe, "out=run", "--quiet")[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, _, err = call("train", recipe, "out=run")
    assert code == 2
    assert "continue it with --resume run" in err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_resume_of_a_changed_recipe_says_which_keys(call, recipe, tmp_path):
    assert call("train", recipe, "out=run", "--quiet")[0] == 0
    code, _, err = call("train", "--resume", "run", "steps=3", "algorithm.beta=0.2", "rollout.max_tokens=7")
    assert code == 2
    assert "algorithm.beta, rollout.max_tokens" in err
    assert "a resume may change checkpoint, eval, log, steps only" in err
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1", 1))
    code, _, err = call("train", "--resume", "run", "steps=3")
    assert code == 2
    assert "changed: seed" in err
    for arguments, message in (
        (["--resume", "nowhere"], "is no run folder"),
        (["--resume", "run", str(recipe)], "takes its recipe from the run folder"),
        ([], "name a recipe file"),
    ):
        code, _, err = call("train", *arguments)
        assert code == 2
        assert message in err


def test_a_resume_below_the_steps_done_is_refused(call, recipe):
    assert call("train", recipe, "out=run", "--quiet")[0] == 0
    code, _, err = call("train", "--resume", "run", "steps=1")
    assert code == 2
    assert "already done 2 steps" in err


def test_a_broken_reward_exits_with_1_and_its_error(call, recipe, tmp_path):
    (tmp_path / "mine.py").write_text("def score(completion, answer):\n    return undefined_name\n")
    code, _, err = call("train", recipe, "out=run", "reward=mine.py:score", "--quiet")
    assert code == 1
    assert err.startswith("stopped: no completion of this step could be scored")
    assert "NameError" in err
    evil = "def score(completion, answer):\\n    raise ValueError('\\x1b]0;pwned\\x07')\\n"
    (tmp_path / "evil.py").write_text(evil.encode().decode("unicode_escape"))
    code, _, err = call("train", recipe, "out=run2", "reward=evil.py:score", "--quiet")
    assert code == 1
    assert "\x1b" not in err
    assert "pwned" in err
    assert err.count("\n") == 1


def test_completions_cannot_drive_the_terminal(call, recipe, tmp_path):
    """Escape sequences and markup in sampled text are shown, not obeyed."""
    code, out, _ = call("train", recipe, "out=run", "steps=4", "log.samples=4")
    assert code == 0
    assert "\x1b" not in out
    assert all(ord(c) >= 32 or c == "\n" for c in out)


def test_help_from_the_shell_is_quick_and_complete():
    result = subprocess.run([sys.executable, "-m", "covary", "--help"], capture_output=True, text=True, check=True)
    for command in ("train", "check", "eval", "export", "list"):
        assert command in result.stdout
    code = "import covary.cli, sys; print(any(m in sys.modules for m in ('torch', 'transformers', 'reasoning_gym')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_train_stays_the_function():
    import covary as package
    import covary.train

    assert callable(package.train)
    assert package.train.__module__ == "covary.api"
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        package.trian  # noqa: B018


def test_several_mistakes_have_a_line_each(call, recipe):
    code, _, err = call("train", recipe, "stepz=1", "optimizer.lr=fast")
    assert code == 2
    assert [line.split(": ")[2] for line in err.splitlines()] == ["stepz", "optimizer.lr"]
    assert all(line.startswith("error: ") and "and the command line: " in line for line in err.splitlines())


def test_a_run_folder_or_a_misspelt_recipe_in_place_of_a_recipe(call, recipe):
    assert call("train", recipe, "out=run", "--quiet")[0] == 0
    code, _, err = call("train", "run")
    assert code == 2
    assert "run is a run folder: continue it with `covary train --resume run`" in err
    code, _, err = call("train", "qickstart")
    assert code == 2
    assert "did you mean quickstart?" in err
    code, out, _ = call("train", "--resume", "run")
    assert code == 0
    assert "run has done its 2 steps; to go on, add steps=N" in out


def test_rows_without_answers_and_pairs_without_their_engine(call, recipe, tmp_path):
    rows = [{"question": f"{i}", "solution": f"{i}"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows_task = "task={name: jsonl, path: rows.jsonl, test: 2, prompt: question%s}"
    code, _, err = call("check", recipe, "--no-model", rows_task % "")
    assert code == 2
    assert "name the column of answers with task.answer (other columns: solution)" in err
    rows[3]["solution"] = rows[5]["solution"] = None
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = call("check", recipe, "--no-model", rows_task % ", answer: solution, grader: exact")
    assert code == 0
    assert re.search("[12] of 6 training rows have no answer to grade by", out)  # one may be held out
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 8)
    pairs = ("algorithm={name: dpo}", "task={name: jsonl, path: pairs.jsonl}")
    code, _, err = call("check", recipe, "--no-model", *pairs)
    assert code == 2
    assert "only rollout.engine: dataset learns from the completions of its rows" in err
    code, out, err = call("check", recipe, "--no-model", *pairs, "rollout.engine=dataset")
    assert code == 0, err
    assert "completion tokens" not in out
    assert "epochs of the training rows and their completions" in out
