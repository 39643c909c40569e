"""A teacher over HTTP, against a fake server: what is asked, what is believed, patience, and a clean end."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import covary
from covary.engines.local import LocalEngine
from covary.engines.reader import LocalLogProbs, Reader
from covary.engines.remote import ServerLogProbs, need_log_probs, server_log_probs
from covary.models.loading import load_model
from covary.scoring.reading import Reading
from covary.settings import TeacherServer
from covary.types import Completion, Example, Group, RunError, Score, Stream, UserError
from tests.engines.test_teachers import CHAT, SEQUENCE, TOKENS, groups_of, pair
from tests.loop.mini import Sums, comparable, metrics, run
from tests.models import random_llama
from tests.servers import Answer, serving


def logp(ids: list[int], t: int) -> float:
    """A made-up log-prob that tells token, position and what came before."""
    return -(ids[t] + 1) / 100 - t / 1000 - sum(ids[:t]) / 10_000


def vllm(body: dict[str, Any]) -> Answer:
    """What vLLM says: ids as text, no entry for the first token."""
    ids = body["prompt"]
    listed = [None, *({str(ids[t]): {"logprob": logp(ids, t), "rank": 3}} for t in range(1, len(ids)))]
    return 200, {"choices": [{"index": 0, "text": "x", "prompt_logprobs": listed}]}


def openai(body: dict[str, Any]) -> Answer:
    """The API's own way: the prompt echoed, with the token that had to be added."""
    ids = body["prompt"]
    values = [None, *(logp(ids, t) for t in range(1, len(ids))), -0.1]
    return 200, {
        "choices": [{"index": 0, "text": "x", "logprobs": {"token_logprobs": values if body["echo"] else [-0.1]}}]
    }


def group(prompt: list[int], *rows: list[int]) -> Group:
    return Group(Example(str(prompt), ""), {"prompt": prompt}, [Completion(row, "", "eos") for row in rows])


GROUPS = [group([5, 6], [7, 8, 9], [4]), group([1], [2, 3])]


def server(url: str, **changes: Any) -> ServerLogProbs:
    return ServerLogProbs(url, "m", **{"pause": 0.01, "attempts": 4, **changes})


def expected(groups: list[Group]) -> list[torch.Tensor]:
    values = []
    for g in groups:
        prompt = g.contexts["prompt"]
        for row in g.completions:
            ids = prompt + row.tokens
            values.append(torch.tensor([logp(ids, t) for t in range(len(prompt), len(ids))]))
    return values


@pytest.mark.parametrize("dialect", [vllm, openai])
def test_log_probs_of_the_completions_tokens(dialect: Any) -> None:
    with serving(dialect) as (url, seen):
        found = server(url, key="secret")(GROUPS)
    for value, right in zip(found, expected(GROUPS), strict=True):
        assert value is not None
        torch.testing.assert_close(value, right)
    assert sorted(body["prompt"] for body in seen) == [[1, 2, 3], [5, 6, 4], [5, 6, 7, 8, 9]]
    body = seen[0]
    assert (body["path"], body["key"], body["model"]) == ("/v1/completions", "Bearer secret", "m")
    assert (body["temperature"], body["max_tokens"], body["prompt_logprobs"]) == (1.0, 1, 0)


def test_answers_in_another_order_stay_with_their_requests() -> None:
    def slow(body: dict[str, Any]) -> Answer:
        time.sleep(0.08 / len(body["prompt"]))  # the longest first
        return vllm(body)

    with serving(slow) as (url, _):
        found = server(url)(GROUPS)
    for value, right in zip(found, expected(GROUPS), strict=True):
        torch.testing.assert_close(value, right)


def test_no_more_requests_at_a_time_than_asked_for() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def counted(body: dict[str, Any]) -> Answer:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return vllm(body)

    with serving(counted) as (url, _):
        found = server(url, concurrency=3)([group([1, 2], *([t] for t in range(12)))])
    assert len(found) == 12
    assert most == 3


@pytest.mark.parametrize(
    "swap",
    [
        lambda ids: [ids[0], *ids[2:], ids[1]],  # another request's tokens
        lambda ids: ids[:-1],  # a part of them
        lambda ids: [*ids, 3],
    ],
)
def test_log_probs_of_other_tokens_are_not_believed(swap: Any) -> None:
    with (
        serving(lambda body: vllm({"prompt": swap(body["prompt"])})) as (url, _),
        pytest.raises(RunError, match="other tokens than it was sent"),
    ):
        server(url)(GROUPS)
    with (
        serving(lambda body: openai(body | {"prompt": [*body["prompt"], 3, 3]})) as (url, _),
        pytest.raises(RunError, match="tokens for the"),
    ):
        server(url)(GROUPS)

    def named(body: dict[str, Any]) -> Answer:
        status, said = openai(body)
        said["choices"][0]["prompt_token_ids"] = list(reversed(body["prompt"]))
        return status, said

    with serving(named) as (url, _), pytest.raises(RunError, match="other tokens than it was sent"):
        server(url)(GROUPS)


def test_a_busy_server_is_asked_again() -> None:
    tries: dict[str, int] = {}

    def busy(body: dict[str, Any]) -> Answer:
        name = str(body["prompt"])
        tries[name] = tries.get(name, 0) + 1
        return (503, {"error": "busy"}) if tries[name] < 3 else vllm(body)

    with serving(busy) as (url, seen):
        found = server(url)(GROUPS)
    assert all(value is not None for value in found)
    assert len(seen) == 9


def test_a_server_that_stays_away_ends_the_call() -> None:
    with (
        serving(lambda body: (503, {"error": "starting"})) as (url, _),
        pytest.raises(RunError, match="no answer in 2 attempts; the last: 503 starting"),
    ):
        server(url, attempts=2)(GROUPS)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "x", "logprobs": None}]},
        {"choices": [{"text": "x", "prompt_logprobs": None}]},
        # llama.cpp: log-probs of what it sampled only.
        {"choices": [{"text": "x", "logprobs": {"token_logprobs": [-0.5]}}]},
    ],
)
def test_a_server_without_log_probs_of_prompts_is_told(answer: Any) -> None:
    with serving(lambda body: (200, answer)) as (url, _), pytest.raises(RunError, match="no log-probs of prompts"):
        need_log_probs(server(url), [1, 2], 3)


def test_a_probability_is_no_log_prob() -> None:
    def sure(body: dict[str, Any]) -> Answer:
        ids = body["prompt"]
        return 200, {"choices": [{"prompt_logprobs": [None, *({str(id): {"logprob": 0.7}} for id in ids[1:])]}]}

    with serving(sure) as (url, _), pytest.raises(RunError, match=r"returned a log-prob of 0\.7, and none is above 0"):
        server(url)(GROUPS)


@pytest.mark.parametrize("answer", [{"choices": []}, {}, {"choices": [{"prompt_logprobs": [None, 3, 4]}]}])
def test_an_answer_that_is_none_is_told(answer: Any) -> None:
    with serving(lambda body: (200, answer)) as (url, _), pytest.raises(RunError, match="without a completion"):
        server(url)([group([1], [2, 3])])


def test_a_refused_row_has_no_number_and_keeps_no_other_from_its_own() -> None:
    def short(body: dict[str, Any]) -> Answer:
        return vllm(body) if len(body["prompt"]) < 5 else (400, {"error": {"message": "context is 4 tokens"}})

    with serving(short) as (url, _):
        found = server(url)(GROUPS)
        with pytest.raises(RunError, match=r"refuses everything; the first: .*context is 4 tokens"):
            server(url)([group([1, 2, 3, 4], [5])])
    assert [value is None for value in found] == [True, False, False]


def test_a_token_without_a_chance_is_no_number() -> None:
    def never(body: dict[str, Any]) -> Answer:
        status, said = vllm(body)
        said["choices"][0]["prompt_logprobs"][-1][str(body["prompt"][-1])]["logprob"] = -9999.0
        return status, said

    with serving(never) as (url, _):
        (value,) = server(url)([group([1], [2, 3])])
    assert value is not None
    assert value.tolist()[-1] == -math.inf


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TeacherServer("http://localhost:1/v1", "tiny", api_key="TEACHER_KEY", concurrency=2)
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UserError, match="the environment variable TEACHER_KEY is not set"):
        server_log_probs(spec)
    monkeypatch.setenv("TEACHER_KEY", "k")
    made = server_log_probs(spec)
    assert (made.key, made.model, made.concurrency) == ("k", "tiny", 2)
    assert "TEACHER_KEY" not in repr(made)
    assert "'k'" not in repr(made)


def served(model: Any) -> Any:
    """A server that runs `model`."""
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> Answer:
        ids = body["prompt"]
        with lock, torch.no_grad():
            logps = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
        listed = [None, *({str(ids[t]): {"logprob": float(logps[t - 1, ids[t]])}} for t in range(1, len(ids)))]
        return 200, {"choices": [{"text": "", "prompt_logprobs": listed}]}

    return answer


def test_the_same_numbers_as_in_this_process() -> None:
    student, tokenizer, model = pair()
    reading = Reading(student, tokenizer, CHAT, end=tokenizer.eos_token_id)
    groups = groups_of(student, [["2", "the answer is 2"], ["12"]])
    with serving(served(load_model("tiny"))) as (url, _):
        there = LocalEngine(random_llama(), reader=Reader(reading, server(url))).score(groups, [SEQUENCE])
    here = Reader(reading, LocalLogProbs(model, 8192))(groups, [SEQUENCE])
    assert there["teacher_tokens"] == here["teacher_tokens"]
    assert there["teacher"] == pytest.approx(here["teacher"], abs=1e-4)


def test_a_server_with_the_students_tokens_gives_each_its_own() -> None:
    _, tokenizer, model = pair()
    reading = Reading(tokenizer, tokenizer, CHAT, end=tokenizer.eos_token_id, same_tokens=True)
    groups = groups_of(tokenizer, [["2", "12"]])
    with serving(served(load_model("tiny"))) as (url, _):
        there = Reader(reading, server(url))(groups, [TOKENS])["teacher"]
    here = LocalEngine(model).score(groups, [Score("teacher", Stream("policy"))])["teacher"]
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_a_run_whose_teacher_goes_away_keeps_its_last_step_and_goes_on(tmp_path: Path) -> None:
    """The third step finds no server: the second is saved, and a resume gives the run that never lost it."""
    changes: dict[str, Any] = {
        "algorithm": {"name": "gvpo_opd", "alpha": 0.5},
        "reward": None,
        "steps": 4,
        "checkpoint": {"every": None},
        "task": Sums(rows=2),  # both in every step, so that the failed one has replayed and remembered
        "rollout": {"prompts": 2, "completions": 4, "max_tokens": 6, "replay": {"history": 1}},
    }
    gone = threading.Event()
    asked: list[int] = []
    run_model = served(load_model("tiny"))

    def answer(body: dict[str, Any]) -> Answer:
        asked.append(1)
        if len(asked) > 1 + 2 * 8 and not gone.is_set():  # the start's request, and two steps
            return 503, {"error": "gone"}
        return run_model(body)

    with serving(answer) as (url, _):
        teacher = {"url": url, "tokenizer": "tiny", "attempts": 1}
        with pytest.raises(RunError, match=r"gave no answer.*step-000002, go on from it with: covary train --resume"):
            run(tmp_path, **changes, teacher=teacher)
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
        gone.set()
        covary.train(resume=tmp_path / "run", quiet=True)
        whole = tmp_path / "whole"
        whole.mkdir()
        (whole / "model").symlink_to(tmp_path / "model")
        run(whole, **changes, teacher=teacher)
    resumed, straight = metrics(tmp_path / "run"), metrics(whole / "run")
    assert [row["step"] for row in resumed] == [0, 1, 2, 3, 4]
    assert [comparable(row) for row in resumed] == [comparable(row) for row in straight]
    assert "gvpo_opd/teacher_length" in resumed[-1]
