"""Runs that are killed, stopped, starved of disk or fed nonsense, and what is left of them."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import covary
from covary.checkpoint import checkpoints, latest, save
from covary.lock import run_lock
from covary.types import RunError, UserError
from tests.loop.commands import DiesWhileSaving, finish, go_on, start, state_of, wait_until, write_recipe
from tests.loop.mini import STATE, Sums, comparable, metrics, rollouts, run, vowels
from tests.models import byte_tokenizer, random_llama


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[dict[str, Any], float]:
    """What the tiny run leaves when nobody disturbs it, and the seconds it takes."""
    recipe = write_recipe(tmp_path_factory.mktemp("undisturbed"))
    assert finish(go_on(recipe)) == 0  # the first one starts the server of forks
    shutil.rmtree(recipe.parent / "run")
    began = time.monotonic()
    assert finish(go_on(recipe)) == 0
    return state_of(recipe.parent / "run"), time.monotonic() - began


def kill_at_random_moments(folder: Path, undisturbed: tuple[dict[str, Any], float], kills: int) -> None:
    """Kill runs at uniformly random moments, from their first breath on, and compare each that reached its end."""
    expected, seconds = undisturbed
    moments = random.Random(kills)
    done, number = 0, 0
    while done < kills:
        number += 1
        (folder / str(number)).mkdir()
        recipe = write_recipe(folder / str(number))
        while True:
            process = go_on(recipe)
            process.join(moments.uniform(0, seconds))
            process.kill()
            if finish(process) == 0:
                break
            assert process.exitcode == -signal.SIGKILL, (recipe.parent / "output").read_text()
            done += 1
        assert state_of(recipe.parent / "run") == expected


def test_a_killed_run_resumes_to_the_same_bits(tmp_path, undisturbed):
    kill_at_random_moments(tmp_path, undisturbed, kills=3)


@pytest.mark.slow
def test_twenty_kills_change_no_bit(tmp_path, undisturbed):
    kill_at_random_moments(tmp_path, undisturbed, kills=20)


@pytest.mark.parametrize("moment", [4, 8, 9, 15])
def test_a_kill_while_a_checkpoint_is_written(tmp_path, undisturbed, moment):
    """Amid its files, before the rename, after it, and in the second checkpoint."""
    expected, _ = undisturbed
    recipe = write_recipe(tmp_path)
    killed = go_on(recipe, prelude=DiesWhileSaving(moment))
    assert finish(killed) == -signal.SIGKILL
    assert finish(go_on(recipe)) == 0
    assert state_of(tmp_path / "run") == expected


def test_a_half_written_line_of_metrics_is_written_again(tmp_path, undisturbed):
    expected, _ = undisturbed
    recipe = write_recipe(tmp_path)
    assert finish(go_on(recipe)) == 0
    path = tmp_path / "run" / "metrics.jsonl"
    for lines, half in ((6, 30), (5, 1)):  # killed in row 6 and in row 5, after the checkpoint of step 4
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000006")
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join(rows[:lines]) + rows[lines][:half])
        assert finish(go_on(recipe)) == 0
        assert state_of(tmp_path / "run")["metrics"] == expected["metrics"]


# -- signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_stops(tmp_path, undisturbed, number, code):
    expected, _ = undisturbed
    recipe = write_recipe(tmp_path, checkpoint={"every": None, "keep_last": 2})
    process = go_on(recipe)
    path = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("\n") == 3)
    os.kill(process.pid, number)
    assert finish(process) == code
    said = (tmp_path / "output").read_text()
    assert f"{number.name}: the run stops after this step and saves it" in said
    done = latest(tmp_path / "run").step
    assert 2 <= done < 6
    assert f"stopped; the newest checkpoint is {tmp_path}/run/checkpoints/step-{done:06d}" in said
    assert said.rstrip().endswith(f"covary train --resume {tmp_path / 'run'}")
    assert "Traceback" not in said

    assert finish(go_on(recipe)) == 0
    assert {**state_of(tmp_path / "run"), "checkpoints": None, "state": None} == {
        **expected, "checkpoints": None, "state": None,
    }  # fmt: skip
    assert f"resumed after step {done}" in (tmp_path / "output").read_text()


HANGS = """
import pathlib, time
def score(completions):
    here = pathlib.Path(__file__).parent
    if (here / "hang").exists() and (here / "run" / "checkpoints" / "step-000002").exists():
        (here / "hangs").touch()
        time.sleep(600)
    return [sum(c.isupper() for c in x) / 6 for x in completions]
"""


def hanging(folder: Path) -> tuple[Path, Any]:
    """A run in its third step, whose reward never returns."""
    recipe = write_recipe(folder, eval={"every": 3, "reward": "exact"})
    (folder / "reward.py").write_text(HANGS)
    (folder / "hang").touch()
    process = go_on(recipe)
    wait_until((folder / "hangs").exists)
    return recipe, process


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_second_signal_stops_at_once(tmp_path, number, code):
    recipe, process = hanging(tmp_path)
    os.kill(process.pid, number)
    wait_until(lambda: "stops after this step" in (tmp_path / "output").read_text())
    assert process.is_alive()
    os.kill(process.pid, number)
    assert finish(process, seconds=20) == code
    said = (tmp_path / "output").read_text()
    assert ("stopped at once; the newest checkpoint is" in said) == (number is signal.SIGINT)
    assert latest(tmp_path / "run").step == 2
    (tmp_path / "hang").unlink()
    assert finish(go_on(recipe)) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(7))


@pytest.fixture
def heard_signals():
    """A shell has a job in the background ignore SIGINT, and an ignored signal stays ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stop_during_the_first_evaluation_and_in_the_last_step(tmp_path, monkeypatch, heard_signals):
    """Nothing is skipped or repeated, and the file holds no row without its evaluation."""
    import sys

    loop = sys.modules["covary.train"]
    whole = tmp_path / "whole"
    whole.mkdir()
    run(whole, steps=2)
    evaluate, step = loop._evaluate, loop.train_step

    def stopped_by(name: str, original):
        def function(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            return original(*arguments)

        monkeypatch.setattr(loop, name, function)

    stopped_by("_evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, steps=2)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0]
    monkeypatch.setattr(loop, "_evaluate", evaluate)
    stopped_by("train_step", step)
    for rows in ([0, 1], [0, 1]):  # the second step is saved, and its row waits for its evaluation
        with pytest.raises(KeyboardInterrupt):
            covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
        assert [row["step"] for row in metrics(tmp_path / "run")] == rows
    covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert list(map(comparable, metrics(tmp_path / "run"))) == list(map(comparable, metrics(whole / "run")))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- two processes on one folder ---------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_a_kill_leaves_no_stale_lock(tmp_path):
    recipe, process = hanging(tmp_path)
    try:
        assert finish(start(tmp_path, "train", "--resume", tmp_path / "run", "--quiet")) == 2
        said = (tmp_path / "output").read_text().splitlines()[-1]
        assert said.startswith(f"error: {tmp_path / 'run'} is in use by process {process.pid} on ")
        assert finish(start(tmp_path, "train", recipe, f"out={tmp_path / 'run'}", "--quiet")) == 2
    finally:
        process.kill()
        process.join()
    (tmp_path / "hang").unlink()
    assert finish(go_on(recipe)) == 0


def test_two_that_start_the_same_run_at_once(tmp_path):
    """One trains; the other is refused, however close the race."""
    recipe = write_recipe(tmp_path)
    both = [start(tmp_path, "train", recipe, f"out={tmp_path / 'run'}", "--quiet") for _ in range(2)]
    assert sorted(finish(process) for process in both) == [0, 2]
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(7))


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A reward's process pool may outlive a killed run."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        with run_lock(tmp_path, print):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.write(write, str(child).encode())
            os._exit(0)
    os.waitpid(parent, 0)
    child = int(os.read(read, 20))
    try:
        os.kill(child, 0)
        with run_lock(tmp_path, print):
            assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    said: list[str] = []
    with run_lock(tmp_path, said.append):
        pass
    assert said == [
        f"note: {tmp_path}/lock cannot be locked here (Function not implemented); start no second process on this folder"
    ]


def test_a_folder_whose_recipe_was_never_written_is_as_good_as_none(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "config.yaml.partial").write_text("steps: ")
    with pytest.raises(UserError, match="is no run folder"):
        covary.train(resume=folder)
    run(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "lock",
        "metrics.jsonl",
        "rollouts",
    ]
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(UserError, match="exists"):
        run(tmp_path, out=str(other))


# -- a full disk -----------------------------------------------------------------------------------------


WRITES = [
    "pathlib.Path.mkdir", "transformers.LlamaForCausalLM.save_pretrained",
    "transformers.PreTrainedTokenizerFast.save_pretrained", "covary.checkpoint.save_file", "pathlib.Path.write_text",
    "pathlib.Path.chmod", "covary.checkpoint._sync", "os.rename",
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_disk_that_is_full_at_any_write_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, write):
    model, tokenizer = random_llama(), byte_tokenizer()
    state = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    arguments: dict[str, Any] = {
        "model": model, "tokenizer": tokenizer, "engine_state": state, "state": STATE, "keep_last": 1,
    }  # fmt: skip
    save(tmp_path, 1, **arguments)

    def full(*_a, **_k):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(write, full)
        with pytest.raises(RunError, match=r"checkpoint .*step-000002 could not be written \(.*No space left"):
            save(tmp_path, 2, **arguments)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert [c.step for c in checkpoints(tmp_path)] == [1]


def test_a_full_disk_ends_the_run_with_one_line(tmp_path):
    """A real one: a small tmpfs, on which the run finds less and less room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = 3 << 20
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        recipe = write_recipe(tmp_path, steps=2, checkpoint={"every": 1, "keep_last": -1})
        folder = disk / "run"
        assert finish(start(tmp_path, "train", recipe, f"out={folder}", "--quiet")) == 0
        one = sum(p.stat().st_size for p in latest(folder).folder.iterdir())
        for step, room in enumerate((one // 2, 0), start=2):
            filler = disk / "filler"
            filler.unlink(missing_ok=True)
            free = shutil.disk_usage(disk).free
            filler.write_bytes(b"\0" * max(0, free - room))
            before = [c.step for c in checkpoints(folder)]
            assert finish(start(tmp_path, "train", "--resume", folder, f"steps={step + 1}", "--quiet")) == 1
            said = (tmp_path / "output").read_text().splitlines()[-1]
            assert said.startswith("stopped: ")
            assert "could not be written" in said
            assert "No space left" in said
            assert [c.step for c in checkpoints(folder)] == before
            assert f"the newest checkpoint is {latest(folder).folder}" in said
            filler.unlink()
            assert finish(start(tmp_path, "train", "--resume", folder, f"steps={step + 1}", "--quiet")) == 0
        assert [row["step"] for row in metrics(folder)] == list(range(5))
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts/step-000002.jsonl"])
def test_a_log_that_cannot_be_written_names_the_way_on(tmp_path, name, monkeypatch):
    run(tmp_path, steps=1)
    path = tmp_path / "run" / name
    before = metrics(tmp_path / "run")

    class Full(io.TextIOWrapper):
        def write(self, text: str) -> int:
            super().write(text[:20])
            self.flush()
            raise OSError(28, "No space left on device")

    def opened(file, mode="r", **options):
        return Full(open(file, mode + "b"), **options) if file == path and mode in "wa" else open(file, mode, **options)

    monkeypatch.setattr("covary.log.open", opened, raising=False)
    with pytest.raises(
        RunError, match=rf"{path} could not be written .*No space left.*step-000001, go on from it with"
    ):
        covary.train(resume=tmp_path / "run", steps=2, quiet=True, reward=vowels)
    assert path.read_bytes()[-20:].count(b"\n") == 0  # half a line is there
    monkeypatch.undo()
    covary.train(resume=tmp_path / "run", steps=2, quiet=True, reward=vowels)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    assert comparable(metrics(tmp_path / "run")[0]) == comparable(before[0])


# -- checkpoints that may not be read -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "name"), [("model.safetensors", "pytorch_model.bin"), ("training.safetensors", "optimizer.pt")]
)
def test_a_pickle_checkpoint_is_refused(tmp_path, of, name):
    from covary.export import export

    run(tmp_path, steps=4, checkpoint={"every": 2})
    folder = latest(tmp_path / "run").folder
    (folder / of).unlink()
    torch.save({"a": torch.zeros(1)}, folder / name)
    for use in (
        lambda: covary.train(resume=tmp_path / "run", quiet=True, reward=vowels),
        lambda: export(tmp_path / "run", tmp_path / "out"),
        lambda: covary.evaluate(tmp_path / "run", Sums()),
    ):
        with pytest.raises(UserError, match=rf"step-000004 holds {name}: pickle files can run code"):
            use()


def test_a_run_without_a_usable_checkpoint_does_not_start_over_by_itself(tmp_path):
    run(tmp_path, steps=2)
    before = metrics(tmp_path / "run")
    (latest(tmp_path / "run").folder / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"step-000002 is damaged .* remove it to start from step 0"):
        covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert metrics(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert list(map(comparable, metrics(tmp_path / "run"))) == list(map(comparable, before))


def test_what_a_kill_left_of_checkpoints_goes_with_the_next_resume(tmp_path):
    run(tmp_path, steps=2)
    for name in ("step-000001.partial", "step-000099.partial"):
        (tmp_path / "run" / "checkpoints" / name).mkdir()
    covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]


# -- cases of real bug reports -------------------------------------------------------------------------------


def case(shared: Path, id: str) -> dict[str, Any]:
    lines = (shared / "cases" / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return next(row for row in map(json.loads, lines) if row["id"] == id)


def test_case_c01_the_newest_checkpoint_by_number(tmp_path, shared):
    """The case's names with our pattern (`step-`, however many digits) in place of its own (`step_`)."""
    given, expected = case(shared, "C01")["input"], case(shared, "C01")["expected"]

    def ours(names: list[str]) -> list[str]:
        return [name.replace("step_", "step-") for name in names]

    model = random_llama()
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    rest: dict[str, Any] = {"tokenizer": byte_tokenizer(), "engine_state": state, "state": STATE}
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ours(given["dirs"]):
        number = re.fullmatch(r"step-(\d+)", name)
        written = save(tmp_path / "other", int(number[1]) if number else 1, model=model, keep_last=-1, **rest)
        written.rename(folder / name)
    assert latest(tmp_path / "run").folder.name == ours([expected["latest"]])[0]
    before = {p.name for p in folder.iterdir()}
    assert given["keep_last"] == -1
    save(tmp_path / "run", 10001, model=model, keep_last=-1, **rest)
    shutil.rmtree(folder / "step-010001")
    assert before - {p.name for p in folder.iterdir()} == set(expected["deleted"])
    newest = folder / ours([expected["latest"]])[0]
    shutil.rmtree(newest)
    written = save(tmp_path / "run", 10000, model=model, keep_last=2, **rest).rename(newest)
    kept = [p.name for p in folder.iterdir() if p.name in ours(["step_500", "step_2500", "step_9000", written.name])]
    assert sorted(kept, key=lambda name: int(name[5:])) == ours(expected["keep_last_2_leaves"])


def test_case_c03_a_resume_restores_schedule_order_and_random_states(tmp_path, shared):
    """10 steps with a falling learning rate; 4 steps, a new process, resumed to 10."""
    expected = case(shared, "C03")["expected"]
    recipe = write_recipe(
        tmp_path, steps=10, checkpoint={"every": 4}, optimizer={"lr": 1e-3, "prompts": 2, "schedule": "linear"}
    )
    assert finish(start(tmp_path, "train", recipe, f"out={tmp_path / 'whole'}", "--quiet")) == 0
    killed = start(tmp_path, "train", recipe, f"out={tmp_path / 'run'}", "--quiet", prelude=DiesWhileSaving(15))
    assert finish(killed) == -signal.SIGKILL
    assert latest(tmp_path / "run").step == 4
    assert finish(go_on(recipe)) == 0
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")
    rows = metrics(tmp_path / "run")
    assert rows[5]["lr"] == pytest.approx(expected["lr_at_step_index_4"])
    drawn = [row["id"] for step in range(1, 11) for row in rollouts(tmp_path / "run", step)[::4]]
    for epoch in range(3):  # 12 rows, 4 a step
        assert len(set(drawn[12 * epoch : 12 * epoch + 12])) == 12


# -- numbers that are not finite ------------------------------------------------------------------------------


def broken_gvpo(loss):
    """GVPO whose loss is `loss(right one, number of the call)`."""
    from dataclasses import dataclass

    from covary.algorithms import GVPO

    calls = iter(range(1000))

    @dataclass(frozen=True)
    class Broken(GVPO):
        def loss(self, scores, batch):
            right = super().loss(scores, batch)
            return loss(right, next(calls)) if scores["policy"].requires_grad and right.requires_grad else right

    return Broken()


@pytest.mark.parametrize("micro_batch_tokens", [8192, 40])
@pytest.mark.parametrize("kind", ["nan loss", "infinite loss with a finite gradient", "nan gradient"])
def test_an_update_that_is_not_finite_changes_nothing(kind, micro_batch_tokens):
    from covary.collate import collate
    from covary.engines.local import LocalEngine
    from covary.types import Completion, Example, Group

    def loss(right, _):
        if kind == "nan gradient":
            return right + torch.sqrt(right * 0.0)  # its derivative is infinite times zero
        return right * float("nan") if kind == "nan loss" else right + float("inf")

    groups = [
        Group(
            Example(str(g), ""), {"prompt": [5, 6, 7 + g]},
            [Completion([8 + g, 9, 10 + k], "", "eos", numbers={"reference": -3.0 * torch.ones(3)}) for k in range(2)],
            [0.0, 1.0],
        )
        for g in range(2)
    ]  # fmt: skip
    engine = LocalEngine(random_llama(), micro_batch_tokens=micro_batch_tokens)
    right, broken = broken_gvpo(lambda value, _: value), broken_gvpo(loss)
    batch = collate(groups, 4).with_totals()
    engine.forward_backward(groups, batch, right)
    assert 0 < engine.step(1e-2) < float("inf")
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    assert any(name.startswith("optimizer.") for name in before)

    engine.forward_backward(groups, batch, broken)
    assert not float("-inf") < engine.step(1e-2) < float("inf")
    after = engine.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    engine.forward_backward(groups, batch, right)
    assert 0 < engine.step(1e-2) < float("inf")
    assert not torch.equal(before["model.lm_head.weight"], engine.state_dict()["model.lm_head.weight"])


def breaks_at(monkeypatch, updates: set[int]) -> None:
    """The named updates of the run (from 0) have a gradient that is not finite."""
    from covary.engines.local import LocalEngine

    original, calls = LocalEngine.step, iter(range(1000))

    def step(self, lr):
        if next(calls) in updates:
            next(iter(self._parameters.values())).grad[0, 0] = float("nan")
        return original(self, lr)

    monkeypatch.setattr(LocalEngine, "step", step)


def test_skipped_updates_are_counted_and_two_in_a_row_are_survived(tmp_path, monkeypatch, capsys):
    breaks_at(monkeypatch, {1, 2, 4, 5})
    run(tmp_path, steps=4)
    assert [row["updates/skipped"] for row in metrics(tmp_path / "run")[1:]] == [1, 1, 2, 0]
    assert latest(tmp_path / "run").state()["progress"]["updates"] == 4
    assert capsys.readouterr().out.count("warning: step 1 skipped 1 updates") == 1


def test_three_skipped_updates_in_a_row_stop_the_run(tmp_path, monkeypatch):
    breaks_at(monkeypatch, {3, 4, 5})
    checkpoint = {"every": 1}
    with pytest.raises(RunError, match=r"step 3: 3 updates in a row were skipped.*step-000002, go on from it with"):
        run(tmp_path, steps=4, checkpoint=checkpoint)
    assert [row["updates/skipped"] for row in metrics(tmp_path / "run")[1:]] == [0, 1]
    # The count goes on over a resume: one was skipped before the checkpoint, two more are three.
    breaks_at(monkeypatch, {0, 1})
    with pytest.raises(RunError, match="step 3: 3 updates in a row"):
        covary.train(resume=tmp_path / "run", quiet=True, reward=vowels)


# -- rewards that misbehave ------------------------------------------------------------------------------------


REWARDS = """
import os, signal, sys, time

def hang(completion):
    if odd(completion): time.sleep(600)
    return 1.0 * len(completion)

def die(completion):
    if odd(completion): os.kill(os.getpid(), signal.SIGKILL)
    return 1.0 * len(completion)

def chatter(completion):
    print('{"index": 0, "value": 5, "error": null, "spent": false}', flush=True)
    os.write(1, b'{"index": 1}\\n' * 100)
    print("loud", file=sys.__stdout__, flush=True)
    return 1.0 * len(completion)

def forge(completion):
    for number in range(3, 256):
        try:
            os.write(number, b'{"index": -5, "value": 5}\\n')
        except OSError:
            pass
    return 1.0 * len(completion)

def nothing(completion):
    return None if odd(completion) else float(len(completion))

def nan(completion):
    return float("nan") if odd(completion) else float(len(completion))

def text(completion):
    return "0.5" if odd(completion) else float(len(completion))

def short(completions):
    return [1.0] * (len(completions) - 1)

def odd(completion):
    return len(completion) % 3 == 1
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hang", "no verdict within 1 s"),
        ("die", r"the grader's process died \(signal 9\)"),
        ("nothing", "the reward gave None or NaN"),
        ("nan", "the reward gave None or NaN"),
        ("text", "TypeError: returned str, not a number or None"),
    ],
)
def test_a_reward_that_misbehaves_on_some_rows_costs_these_rows(tmp_path, monkeypatch, capsys, name, message):
    import re

    from covary.rewards import pool

    original = pool.Pool.__init__
    monkeypatch.setattr(pool.Pool, "__init__", lambda self, workers=2, deadline=1.0: original(self, workers, 1.0))
    (tmp_path / "mine.py").write_text(REWARDS)
    run(tmp_path, steps=1, reward=f"{tmp_path}/mine.py:{name}", eval={"reward": "exact"})
    rows = rollouts(tmp_path / "run", 1)
    lost = [row["reward"] is None for row in rows]
    assert lost == [len(row["completion"]) % 3 == 1 for row in rows]
    assert 0 < sum(lost) < len(rows)
    assert [row["reward"] for row in rows if row["reward"] is not None] == [
        len(row["completion"]) for row in rows if len(row["completion"]) % 3 != 1
    ]
    assert metrics(tmp_path / "run")[1]["rows/unscorable"] == sum(lost)
    said = capsys.readouterr().out
    assert re.search(
        rf"warning: {sum(lost)} of 16 completions could not be scored and left; the first: .*{message}", said
    )


def test_what_a_reward_prints_is_no_verdict(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(REWARDS)
    run(tmp_path, steps=1, reward=f"{tmp_path}/mine.py:chatter", eval={"reward": "exact"})
    assert all(row["reward"] == len(row["completion"]) for row in rollouts(tmp_path / "run", 1))
    out, err = capfd.readouterr()
    assert "loud" not in out
    assert "loud" in err


def test_a_reward_that_writes_into_every_pipe_ends_its_process_not_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    with pytest.raises(RunError, match="the grader's process sent nonsense"):
        run(tmp_path, steps=1, reward=f"{tmp_path}/mine.py:forge", eval={"reward": "exact"})


def test_a_reward_of_the_wrong_length_stops_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    message = r"no completion of this step could be scored.*returned 15 rewards for 16 completions.*no checkpoint yet"
    with pytest.raises(RunError, match=message):
        run(tmp_path, steps=1, reward=f"{tmp_path}/mine.py:short", eval={"reward": "exact"})
