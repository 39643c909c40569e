"""Traces with a reference answer behind them, through the whole loop: what only the loop can show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import covary
from covary.checkpoint import latest
from covary.types import RunError, UserError
from tests.loop.mini import Sums, metrics, on_traces, rollouts, run
from tests.models import save_random_model

FAULTS = ("truncated", "unclosed", "tagged", "empty")


@pytest.mark.parametrize("kind", ["sum", "mean", "prob", "geo", "mean_prob"])
def test_any_method_learns_from_the_answers_likelihood(tmp_path: Path, kind: str) -> None:
    changes = on_traces(tmp_path) | {"reward": {"likelihood": kind}, "steps": 1}
    run(tmp_path, algorithm={"name": "rloo", "kl_coef": 0.0}, **changes)
    # About 1/259 per byte of a random model, two or three bytes.
    low, high = {"sum": (-20, -8), "mean": (-7, -4), "prob": (1e-9, 1e-3)}.get(kind, (1e-3, 1e-2))
    rows = rollouts(tmp_path / "run", 1)
    assert all(low < row["reward"] < high for row in rows)
    for start in range(0, len(rows), 8):
        group = rows[start : start + 8]
        closed = [row["reward"] for row in group if row["finish"] == "stop_string"]
        if closed:
            assert all(row["reward"] == min(closed) for row in group if row["finish"] != "stop_string")
    assert metrics(tmp_path / "run")[-1]["grad_norm"] > 0


def test_faults_are_counted_and_evaluation_is_graded_as_ever(tmp_path: Path) -> None:
    run(tmp_path, algorithm={"name": "covrl"})
    for step, row in enumerate(metrics(tmp_path / "run")[1:], start=1):
        samples = rollouts(tmp_path / "run", step)
        assert row["traces/truncated"] == sum(s["finish"] == "length" for s in samples)
        assert row["traces/unclosed"] == sum(s["finish"] == "eos" for s in samples) > 0
        assert row["traces/tagged"] == row["prompts/tagged"] == 0
        assert sum(row[f"traces/{name}"] for name in FAULTS) < len(samples)
        assert {s["context"] for s in samples} == {"prompt", "posterior"}
        assert row["covrl/prior/rows"] + row["covrl/posterior/rows"] == len(samples) / 2  # two updates a step
    assert "eval/sums/accuracy" in metrics(tmp_path / "run")[0]


@pytest.mark.parametrize("kind", ["covrl", "covrl_jsd", "jlb"])
def test_a_rollout_without_a_closed_trace_is_no_crash(tmp_path: Path, kind: str) -> None:
    changes = on_traces(tmp_path)
    text = (tmp_path / "traces.yaml").read_text().replace('stop: "e"', 'stop: "never said"')
    (tmp_path / "never.yaml").write_text(text)
    changes |= {"task": Sums(template=str(tmp_path / "never.yaml")), "steps": 1}
    with pytest.raises(RunError, match="the run ended without one update: no step had a row to learn from"):
        run(tmp_path, algorithm={"name": kind}, **changes)
    assert metrics(tmp_path / "run")[-1]["traces/truncated"] > 0


def test_rows_that_hold_a_tag_are_skipped_when_drawn(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1 =" + ("</t>" if i % 2 else ""), "answer": str(i + 1)} for i in range(8)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "jsonl", "path": str(data), "template": on_traces(tmp_path)["task"].template}
    run(tmp_path, algorithm={"name": "covrl"}, task=task)
    for step, row in enumerate(metrics(tmp_path / "run")[1:], start=1):
        assert row["prompts/tagged"] > 0
        assert all("</t>" not in s["prompt"][0]["content"] for s in rollouts(tmp_path / "run", step))
    data.write_text(json.dumps({"prompt": "1 + 1 =", "answer": "<t>2"}) + "\n")
    with pytest.raises(UserError, match=r"its text holds <t>, which is a mark of the template"):
        run(tmp_path, out=str(tmp_path / "other"), algorithm={"name": "covrl"}, task=task)


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer_is_refused_before_a_model_loads(tmp_path: Path, answer: str | None) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "1 + 2 =", "answer": answer}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "jsonl", "path": str(data), "template": on_traces(tmp_path)["task"].template}
    with pytest.raises(UserError, match=r"'data/2' has no answer or an empty one.*task\.filter"):
        covary.train(model="none/such", task=task, algorithm={"name": "covrl"}, steps=1)
    covary.api.resolve(
        covary.config.validate(
            {"task": {**task, "filter": {"answer": "2"}}, "algorithm": {"name": "covrl"}, "steps": 1}, where="test"
        )
    )


def mistake(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        run(tmp_path, **changes)
    return str(caught.value)


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    traces = on_traces(tmp_path)
    own = mistake(tmp_path, algorithm={"name": "covrl"}, reward={"likelihood": "sum"})
    assert "reward: would be ignored, the algorithm makes its own rewards" in own
    bare = mistake(tmp_path, algorithm={"name": "grpo"}, reward={"likelihood": "sum"})
    assert "chat appends no answer, which the score 'likelihood' reads; think does" in bare
    wrong = mistake(tmp_path, algorithm={"name": "grpo"}, **traces | {"reward": {"likelihood": "log"}})
    assert "reward.likelihood: takes one of sum, mean, prob, geo, mean_prob, got the text 'log'" in wrong
    stop = mistake(tmp_path, algorithm={"name": "covrl"}, rollout={**traces["rollout"], "stop": ["x"]})
    assert "rollout.stop" in stop
    assert "ends a completion at 'e'" in stop
    context = mistake(tmp_path, algorithm={"name": "covrl"}, task=Sums(template="r1"))
    assert "r1 has no context 'posterior'" in context or "r1 appends no answer" in context
    long = mistake(tmp_path, algorithm={"name": "covrl"}, rollout={**traces["rollout"], "max_tokens": 240})
    assert "and the answer's" in long
    few = mistake(tmp_path, algorithm={"name": "ravr"}, rollout={**traces["rollout"], "completions": 2})
    assert "rollout.completions: ravr needs at least" in few


def test_the_posteriors_prompt_is_in_nobodys_context_but_the_posteriors(tmp_path: Path) -> None:
    """Every forward pass of a run, by what the model reads: the answer's scores come from the prior's prompt."""
    from covary.api import build, resolve
    from covary.config import validate
    from covary.log import Screen
    from covary.scoring import trees
    from covary.train import train

    model = save_random_model(tmp_path / "model")
    recipe = {
        "out": str(tmp_path / "run"), "model": {"name": str(model)}, "task": Sums(template=on_traces(tmp_path)["task"].template),
        "algorithm": {"name": "covrl"}, "steps": 1, "rollout": {"prompts": 4, "completions": 8, "max_tokens": 100},
    }  # fmt: skip
    built = build(resolve(validate(recipe, where="test")), Screen(silent=True))
    tokenizer, forward = built.tokenizer, trees.forward
    seen: list[tuple[str, str, bool]] = []

    def watched(model, groups, context):
        for group in groups:
            answered = any(row.role_positions("answer") for row in group.completions)
            seen.append((context, tokenizer.decode(group.contexts[context]), answered))
        return forward(model, groups, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "forward", watched)
        train(built)
    prior = {text for context, text, _ in seen if context == "prompt"}
    posterior = {text for context, text, _ in seen if context == "posterior"}
    assert prior
    assert posterior
    assert all("(" not in text for text in prior)
    assert all("(" in text for text in posterior)
    assert any(answered for context, _, answered in seen if context == "prompt")
    for score in (*built.algorithm.frozen, *built.algorithm.trained):
        if score.tokens == "answer":
            assert {stream.context for stream in score.stream_pair} == {"prompt"}


def test_a_traces_log_probs_under_both_prompts_are_those_of_plain_scoring(tmp_path: Path) -> None:
    from covary.engines.local import LocalEngine
    from covary.prompts import load_template, prompt_group
    from covary.rollout.pieces import append_answers
    from covary.types import Completion, Example, Score, Stream
    from tests.models import byte_tokenizer, random_llama

    tokenizer, model = byte_tokenizer(), random_llama(scale=3.0)
    template = load_template(on_traces(tmp_path)["task"].template)
    group = prompt_group(Example("e", [{"role": "user", "content": "2 + 3"}], answer="5"), template, tokenizer)
    group.completions = [
        Completion([1], "so it is", "stop_string"),
        Completion([1], "a", "stop_string", context="posterior"),
    ]
    (group,) = append_answers([group], template, tokenizer)
    scores = [
        Score("prior"), Score("posterior", Stream("policy", "posterior")), Score("answer", tokens="answer"),
        Score("kl", (Stream(), Stream("policy", "posterior")), ("mixture_kl", 0.3)),
    ]  # fmt: skip
    found = LocalEngine(model).score([group], scores)
    for i, row in enumerate(group.completions):
        with torch.no_grad():
            logps = {
                name: model(torch.tensor([ids + row.tokens])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
                for name, ids in group.contexts.items()
            }
        own = torch.arange(len(row.tokens)), torch.tensor(row.tokens)
        answer = row.role_positions("answer")
        trace = row.role_positions("sampled")
        assert tokenizer.decode([row.tokens[t] for t in answer]) == "5."
        torch.testing.assert_close(found["prior"][i][trace], logps["prompt"][own][trace], rtol=0, atol=1e-5)
        torch.testing.assert_close(found["posterior"][i][trace], logps["posterior"][own][trace], rtol=0, atol=1e-5)
        torch.testing.assert_close(found["answer"][i][answer], logps["prompt"][own][answer], rtol=0, atol=1e-5)
        p, q = logps["prompt"].exp(), logps["posterior"].exp()
        mixture = 0.3 * p + 0.7 * q
        kl = (mixture * (mixture.log() - p.log())).sum(-1)
        torch.testing.assert_close(found["kl"][i][trace], kl[trace], rtol=1e-3, atol=1e-6)


def test_rlprs_base_is_scored_once_per_question_and_its_state_survives(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"algorithm": {"name": "rlpr"}, "optimizer": {"lr": 1e-3}}
    run(tmp_path, steps=2, **changes)
    state = latest(tmp_path / "run").state()["progress"]["algorithm"]  # pyright: ignore[reportOptionalMemberAccess]
    assert state["draws"] == 2
    other = tmp_path / "other"
    other.mkdir()
    run(other, steps=1, **changes)
    covary.train(resume=other / "run", steps=2, quiet=True)
    assert rollouts(other / "run", 2) == rollouts(tmp_path / "run", 2)  # the base of the initial model is what it was
    rewards = [row["reward"] for row in rollouts(tmp_path / "run", 1)]
    assert all(0 <= reward <= 1 for reward in rewards)
    assert any(math.isclose(reward, 0.1, abs_tol=0.01) for reward in rewards)


def test_ravrs_prior_traces_are_not_learned_from(tmp_path: Path) -> None:
    run(tmp_path, algorithm={"name": "ravr"}, steps=1)
    for row in rollouts(tmp_path / "run", 1):
        assert row["context"] == "posterior" or row["weight"] is None


@pytest.mark.slow
def test_the_quickstart_learns_without_a_verifier(tmp_path: Path) -> None:
    recipe = Path(__file__).parent.parent.parent / "recipes" / "covrl_quickstart.yaml"
    covary.train(recipe, out=str(tmp_path / "run"), steps=20, quiet=True)
    before, first, *_, after = metrics(tmp_path / "run")
    assert after["eval/chain_sum/accuracy"] >= before["eval/chain_sum/accuracy"] + 0.2
    # Of one step's traces, so noisy; what training itself raises, read by no grader.
    assert after["covrl/prior/answer_prob"] > first["covrl/prior/answer_prob"] + 0.1
