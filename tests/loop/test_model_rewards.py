"""Runs rewarded by models: reward models and judges in training and in evaluation, from recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import covary
from covary.check import check
from covary.config import load_recipe, validate
from covary.log import Screen
from covary.rewards.judge import verdict
from covary.types import RunError, UserError
from tests.loop.mini import Sums, comparable, metrics, rollouts, run
from tests.models import save_random_classifier, save_random_model
from tests.rewards.test_server import saying, serving


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_reward_model_rewards_training_and_evaluation(tmp_path: Path):
    reward = {"model": str(save_random_classifier(tmp_path / "rm"))}
    run(tmp_path, reward=reward, eval={"reward": reward})
    first, *_, last = metrics(tmp_path / "run")
    assert last["rows/unscorable"] == 0
    assert last["reward/std"] > 0
    assert first["eval/sums/reward"] not in (0, 1)  # the task's own grader gives nothing else
    assert first["eval/sums/unscorable"] == 0
    written = load_recipe(tmp_path / "run" / "config.yaml")
    assert written["reward"] == {**reward, "micro_batch_tokens": 8192}
    assert written["eval"]["reward"] == written["reward"]


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_random_classifier(tmp_path / "rm")
    monkeypatch.chdir(tmp_path)
    whole, cut = ({"out": str(tmp_path / name), "reward": {"model": "./rm"}} for name in ("whole", "cut"))
    run(tmp_path, **whole, steps=3)
    run(tmp_path, **cut, steps=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    covary.train(resume=tmp_path / "cut", steps=3, quiet=True)
    assert comparable(metrics(tmp_path / "cut")[-1]) == comparable(metrics(tmp_path / "whole")[-1])


def test_given_completions_are_scored_by_a_reward_model(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i} + 1 =", "completion": [f"{i}", "seven"]}) + "\n" for i in range(4))
    )
    run(
        tmp_path,
        reward={"model": str(save_random_classifier(tmp_path / "rm"))},
        task={"name": "jsonl", "path": str(data)},
        rollout={"engine": "dataset", "prompts": 4, "completions": 2, "max_tokens": 6},
        algorithm={"name": "dpo"},
    )
    rewards = [row["reward"] for row in rollouts(tmp_path / "run", 1)]
    assert len(set(rewards)) == 8
    assert metrics(tmp_path / "run")[-1]["dpo/accuracy"] >= 0


def judge_by_length(body: dict[str, Any], number: int) -> Any:
    student = body["messages"][0]["content"].partition("<student>\n")[2].partition("\n</student>")[0]
    return saying("Correct" if len(student) % 2 else "Incorrect" if len(student) % 4 else "Hm.")


def test_a_judge_behind_a_server_rewards_training_and_is_asked_once_for_equal_texts(tmp_path: Path):
    with serving(judge_by_length) as (url, got):
        judge = {"model": "judge", "server": {"url": url, "concurrency": 2}, "cache": str(tmp_path / "replies.jsonl")}
        run(tmp_path, reward={"judge": judge})
        asked = len(got)
        rows = [row for step in (1, 2) for row in rollouts(tmp_path / "run", step)]
        assert asked == len({(row["id"], row["completion"]) for row in rows})
        run(tmp_path, reward={"judge": judge}, out=str(tmp_path / "again"))
        assert len(got) == asked
    for row in rows:
        length = len(row["completion"])
        if "<" not in row["completion"]:  # tags get a space
            assert row["reward"] == (1.0 if length % 2 else 0.0 if length % 4 else None)
    assert sum(row["rows/unscorable"] for row in metrics(tmp_path / "run")[1:]) == sum(
        r["reward"] is None for r in rows
    )
    assert [comparable(row) for row in metrics(tmp_path / "again")] == [
        comparable(row) for row in metrics(tmp_path / "run")
    ]


def test_xverify_is_sent_the_users_copy_of_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompt = tmp_path / "xverify.txt"
    prompt.write_text("Question: {question}\nOutput: {output}\nAnswer: {answer}")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving(lambda body, number: saying("[Correct]" if number % 2 else "Incorrect")) as (url, got):
        server = {"url": url, "api_key": "JUDGE_KEY"}
        judge = {"model": "x", "style": "xverify", "prompt_file": str(prompt), "server": server}
        metrics = covary.evaluate(str(save_random_model(tmp_path / "m")), Sums(), max_tokens=4, reward={"judge": judge})
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(UserError, match=r"^reward.judge.server.api_key: .* JUDGE_KEY is not set"):
            covary.evaluate(str(tmp_path / "m"), Sums(), max_tokens=4, reward={"judge": judge})
        prompt.write_text("Output: {output}")
        with pytest.raises(UserError, match=r"^reward.judge.prompt_file: .* lacks \{question\}"):
            covary.evaluate(str(tmp_path / "m"), Sums(), max_tokens=4, reward={"judge": judge})
    assert len(got) == 8  # 4 questions, one sampled and one greedy completion
    first = min(g["messages"][0]["content"] for g in got)
    assert first.startswith("Question: 0 + 0 =\nOutput: ")
    assert first.endswith("\nAnswer: 0")
    assert {g["key"] for g in got} == {"Bearer secret"}
    assert metrics["eval/sums/unscorable"] == 0
    assert 0 < metrics["eval/sums/reward"] + metrics["eval/sums/greedy"] < 2


def test_a_judge_that_is_not_there_stops_the_run_and_says_where(tmp_path: Path):
    with serving(lambda *_: (401, {}, {"error": {"message": "no key"}})) as (url, _):
        judge = {"model": "judge", "server": {"url": url}}
        with pytest.raises(
            RunError,
            match=f"no completion of this step could be scored.*{url}/chat/completions refused the request: 401 no key",
        ):
            run(tmp_path, reward={"judge": judge})


def test_a_local_judge_reads_whole_messages_in_batches(tmp_path: Path):
    judge = {
        "model": str(save_random_model(tmp_path / "judge", context=2048)),
        "max_tokens": 3,
        "cache": str(tmp_path / "c"),
    }
    with pytest.raises(UserError, match=r"no completion of sums could be scored.*the judge's reply is no verdict"):
        covary.evaluate(str(save_random_model(tmp_path / "m")), Sums(), max_tokens=4, reward={"judge": judge})
    replies = [json.loads(line)["reply"] for line in (tmp_path / "c").read_text().splitlines() if line]
    assert len(replies) > 2
    assert all(verdict(reply) is None for reply in replies)
    small = {**judge, "model": str(save_random_model(tmp_path / "small", context=256))}
    with pytest.raises(UserError, match="more than the model's context of 256"):
        covary.evaluate(str(tmp_path / "m"), Sums(), max_tokens=4, reward={"judge": small})


def test_check_says_what_is_wrong_without_a_model_and_asks_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rewards = {"judge": {"model": "judge", "server": {"url": "http://127.0.0.1:9/v1"}}}
    data = {
        "steps": 1, "model": {"name": "tiny"}, "task": Sums(), "algorithm": {"name": "gvpo"}, "reward": rewards,
        "rollout": {"max_tokens": 6},
    }  # fmt: skip
    check(validate(data, where="r"), with_model=False, screen=Screen())
    assert "reference answers: not graded, the reward is a model's" in capsys.readouterr().out
    data["reward"] = {"model": str(save_random_classifier(tmp_path / "two", labels=2))}
    with pytest.raises(UserError, match="2 labels"):
        check(validate(data, where="r"), with_model=False, screen=Screen())
