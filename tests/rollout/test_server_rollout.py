"""Completions over HTTP: what is asked, what comes back, patience with a busy server, clear words about a bad one."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from covary.rollout.server import ServerRollout
from covary.types import Example, Group, Request, RunError, Sampling, UserError
from tests.models import byte_tokenizer
from tests.servers import Answer, choice, serving


def echo(body: dict[str, Any]) -> Answer:
    """The prompt's last token and the seed: tells which request an answer belongs to."""
    return choice(f"{body['prompt'][-1]} {body['seed']} {body['temperature']}")


def groups(count: int) -> list[Group]:
    return [Group(Example(f"e{i}", "q"), {"prompt": [5, i + 1]}) for i in range(count)]


PLAN = [Request(3), Request(1, decoding="greedy")]


def rollout(url: str, **changes: Any) -> ServerRollout:
    return ServerRollout(url, "m", byte_tokenizer(), **{"pause": 0.01, **changes})


def texts(found: list[Group]) -> list[list[str]]:
    return [[completion.text for completion in group.completions] for group in found]


def test_requests_and_their_order() -> None:
    delays = {1: 0.06, 2: 0.03, 3: 0.0}  # answers come in another order than requests

    def slow(body: dict[str, Any]) -> Answer:
        time.sleep(delays[body["prompt"][-1]])
        return echo(body)

    with serving(slow) as (url, seen):
        found = rollout(url, key="secret").generate([PLAN] * 3, groups(3), Sampling(16, 0.6, ("\n",)), seed=3)
        alone = rollout(url, concurrency=1).generate([PLAN], groups(3)[1:2], Sampling(16, 0.6, ("\n",)), seed=3)
    assert [[text.split()[0] for text in own] for own in texts(found)] == [["1"] * 4, ["2"] * 4, ["3"] * 4]
    assert texts(alone)[0] == texts(found)[1]  # a row's seed depends on its question and index alone
    assert len({text for own in texts(found) for text in own}) == 12
    assert [completion.greedy for completion in found[0].completions] == [False, False, False, True]
    assert found[0].completions[3].text.endswith(" 0.0")
    body = seen[0]
    assert (body["path"], body["key"]) == ("/v1/completions", "Bearer secret")
    assert (body["model"], body["max_tokens"], body["stop"]) == ("m", 16, ["\n"])
    # Nothing is left to the checkpoint's generation defaults.
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1, -1, 0, 1)
    assert all(0 <= body["seed"] < 2**31 for body in seen)


def test_ends() -> None:
    tokenizer = byte_tokenizer()
    answers = iter([choice("ab<|im_end|>"), choice("cd", "length"), choice("ef", "stop", stop_reason="\n")])
    with serving(lambda body: next(answers)) as (url, _):
        (found,) = rollout(url, concurrency=1).generate([[Request(3)]], groups(1), Sampling(4), seed=0)
    assert [(c.text, c.finish) for c in found.completions] == [("ab", "eos"), ("cd", "length"), ("ef", "stop_string")]
    assert [len(c.tokens) for c in found.completions] == [3, 2, 2]
    assert found.completions[0].tokens[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("said", [{"text": None, "finish_reason": "stop"}, {"message": {"content": "x"}}, "x"])
def test_what_is_no_text_is_no_completion(said: Any) -> None:
    with (
        serving(lambda body: (200, {"choices": [said]})) as (url, _),
        pytest.raises(RunError, match="answered without a completion"),
    ):
        rollout(url).generate([[Request(1)]], groups(1), Sampling(4), seed=0)


def test_a_busy_server_is_asked_again() -> None:
    trouble = iter([(503, {"error": {"message": "warming up"}}), (429, b"slow down")])
    with serving(lambda body: next(trouble, None) or echo(body)) as (url, seen):
        (found,) = rollout(url).generate([[Request(1)]], groups(1), Sampling(4), seed=0)
    assert texts([found])[0][0].startswith("1 ")
    assert len(seen) == 3
    assert len({json.dumps(body, sort_keys=True) for body in seen}) == 1


def test_a_server_that_stays_busy_ends_the_run() -> None:
    with serving(lambda body: (503, {"error": "no capacity"})) as (url, seen), pytest.raises(RunError) as caught:
        rollout(url, attempts=3).generate([[Request(1)]], groups(1), Sampling(4), seed=0)
    assert "no answer in 3 attempts; the last: 503 no capacity" in str(caught.value)
    assert len(seen) == 3


def test_no_server() -> None:
    with serving(echo) as (url, _):
        pass
    with pytest.raises(RunError, match=r"no answer in 2 attempts; the last: .*refused"):
        rollout(url, attempts=2).generate([[Request(1)]], groups(1), Sampling(4), seed=0)


@pytest.mark.parametrize("said", [{"error": {"message": "no model m"}}, {"detail": "no model m"}, b"no model m"])
def test_a_refusal_is_not_repeated_and_quoted(said: Any) -> None:
    with serving(lambda body: (404, said)) as (url, seen), pytest.raises(UserError) as caught:
        rollout(url, concurrency=1).generate([[Request(500)]], groups(1), Sampling(4), seed=0)
    assert str(caught.value) == f"{url}/completions refused the request: 404 no model m"
    assert len(seen) < 500  # the others were not started, but for those of the moment in which it was noticed


@pytest.mark.parametrize("said", [b"<html>", b"[1]", {"choices": []}, {"choices": [{"text": "x"}]}])
def test_an_answer_that_is_none(said: Any) -> None:
    with serving(lambda body: (200, said)) as (url, _), pytest.raises(RunError, match="answered"):
        rollout(url).generate([[Request(1)]], groups(1), Sampling(4), seed=0)


def test_the_number_of_requests_at_a_time_is_bounded() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def counted(body: dict[str, Any]) -> Answer:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return echo(body)

    progress: list[tuple[int, int]] = []
    with serving(counted) as (url, _):
        engine = rollout(url, concurrency=3, on_progress=lambda *numbers: progress.append(numbers))
        engine.generate([[Request(12)]], groups(1), Sampling(4), seed=0)
    assert most[0] == 3
    assert progress[-1] == (12, 12)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(rollout("http://x/v1", key="secret"))
