"""Replayed and given completions are part of a group, scored anew, counted apart, and survive a resume."""

from __future__ import annotations

import json

import pytest

import covary
from covary.api import read_given
from covary.rollout.given import GivenRollout
from covary.rollout.replay import ReplayRollout
from covary.types import Completion, Example, Group, Request, Sampling, UserError
from tests.loop.mini import Sums, comparable, metrics, rollouts, run, vowels
from tests.models import byte_tokenizer


class Counting:
    """Samples numbered completions."""

    def __init__(self) -> None:
        self.made = 0

    def generate(self, plans, groups, sampling, seed):
        made = []
        for plan, group in zip(plans, groups, strict=True):
            texts = range(self.made, self.made + sum(request.count for request in plan))
            self.made += len(texts)
            made.append(
                Group(group.example, group.contexts, [Completion([t + 1], str(t), "eos", logps=[-1.0]) for t in texts])
            )
        return made

    def observe(self, groups):
        """Nothing to remember."""

    def load_weights(self, state, version):
        """Nothing to load."""

    def state(self):
        return {"made": self.made}

    def load_state(self, state):
        self.made = state["made"]


def step(engine, seed: int, k: int = 4, reward=lambda text: 1.0) -> Group:
    group = Group(Example("a", "q"), {"prompt": [1]})
    (made,) = engine.generate([[Request(k)]], [group], Sampling(4), seed)
    made.rewards = [reward(c.text) for c in made.completions]
    engine.observe([made])
    return made


def test_portfolio_of_history_and_fresh():
    engine = ReplayRollout(Counting(), history=2, size=5)
    first = step(engine, 0)
    assert [c.source for c in first.completions] == ["policy"] * 4  # nothing is stored yet
    seen = set()
    for seed in range(1, 60):
        made = step(engine, seed)
        assert [c.source for c in made.completions] == ["policy", "policy", "replay", "replay"]
        past = [int(c.text) for c in made.completions[2:]]
        assert len(set(past)) == 2
        newest = int(made.completions[0].text)
        # Of the five newest before this step, and never two of a row's own numbers shared with another step.
        assert all(newest - 5 <= text < newest for text in past)
        assert all(c.logps is None and c.numbers == {} and c.weight is None for c in made.completions[2:])
        seen |= {newest - text for text in past}
    assert seen == {1, 2, 3, 4, 5}


def test_what_no_reward_could_grade_is_forgotten_and_what_needs_none_is_kept():
    engine = ReplayRollout(Counting(), history=1, size=8)
    step(engine, 0, reward=lambda text: None if text in "013" else 1.0)
    assert {step(engine, seed).completions[-1].text for seed in range(1, 4)} & {"0", "1", "3"} == set()
    (made,) = (engine := ReplayRollout(Counting(), history=1, size=8)).generate(
        [[Request(4)]], [Group(Example("a", "q"), {"prompt": [1]})], Sampling(4), 0
    )
    assert made.rewards is None  # distillation: there is no reward to wait for
    engine.observe([made])
    assert step(engine, 1).completions[-1].source == "replay"


def test_history_is_uniform_without_replacement():
    engine = ReplayRollout(Counting(), history=2, size=4)
    step(engine, 0, k=4)
    counts = dict.fromkeys(range(4), 0)
    for seed in range(2000):
        for completion in engine._draw("a", seed):
            counts[int(completion.text)] += 1
    assert all(abs(count - 1000) < 120 for count in counts.values())


def test_rows_without_a_reward_and_other_sources_are_not_remembered():
    engine = ReplayRollout(Counting(), history=1, size=9)
    step(engine, 0, reward=lambda text: None if text == "2" else 0.0)
    assert [c.text for c in engine._past["a"]] == ["0", "1", "3"]
    step(engine, 1)
    assert [c.text for c in engine._past["a"]] == ["0", "1", "3", "4", "5", "6"]  # the replayed one is not stored twice


def test_state_is_json_and_restores_the_draws():
    engine = ReplayRollout(Counting(), history=2, size=5)
    for seed in range(3):
        step(engine, seed)
    other = ReplayRollout(Counting(), history=2, size=5)
    other.load_state(json.loads(json.dumps(engine.state())))
    assert [c.text for c in step(other, 9).completions] == [c.text for c in step(engine, 9).completions]


def test_plans_of_other_things_are_refused():
    engine = ReplayRollout(Counting(), history=1, size=2)
    step(engine, 0)
    group = Group(Example("a", "q"), {"prompt": [1]})
    for plan in ([Request(3), Request(1, decoding="greedy")], [Request(3, context="other")], [Request(1)]):
        with pytest.raises(ValueError, match="needs a plan of more policy samples"):
            engine.generate([plan], [group], Sampling(4), 1)


def test_given_completions_take_the_place_of_fresh_ones():
    engine = GivenRollout(Counting(), {"a": ["x", "y", "longer"]}, 2, byte_tokenizer())
    made = step(engine, 0)
    assert [c.source for c in made.completions] == ["policy", "policy", "dataset", "dataset"]
    group = Group(Example("b", "q"), {"prompt": [1]})
    (other,) = engine.generate([[Request(4)]], [group], Sampling(4), 0)
    assert [c.source for c in other.completions] == ["policy"] * 4


REPLAY = {"prompts": 4, "completions": 4, "max_tokens": 6, "replay": {"history": 1, "size": 4}}


def test_a_run_with_replay_saves_sampling_and_resumes_bit_for_bit(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    task = Sums(rows=8)
    run(whole, steps=6, rollout=REPLAY, task=task)
    rows = metrics(whole / "run")
    assert [row.get("replay/rows", 0) for row in rows[1:]] == [
        0,
        0,
        4,
        4,
        4,
        4,
    ]  # each prompt is seen once in two steps
    assert rows[4]["tokens/generated"] < rows[1]["tokens/generated"]
    replayed = [row for row in rollouts(whole / "run", 4) if row["source"] == "replay"]
    earlier = {(r["id"], r["completion"]) for s in (1, 2, 3) for r in rollouts(whole / "run", s)}
    assert len(replayed) == 4
    assert all((row["id"], row["completion"]) in earlier for row in replayed)
    assert all(row["weight"] is not None for row in replayed)
    assert all(row["kl/sampling"] < 1e-6 for row in rows[1:])  # old log-probs of replayed rows are not compared
    run(halves, steps=3, rollout=REPLAY, task=task)
    covary.train(resume=halves / "run", steps=6, quiet=True, reward=vowels)
    assert [comparable(row) for row in metrics(halves / "run")] == [comparable(row) for row in rows]


def test_a_run_with_a_file(tmp_path):
    path = tmp_path / "given.jsonl"
    path.write_text('{"id": "sum/4", "completion": "AEI"}\n{"prompt": "5 + 0 =", "completion": ["OU", "EE"]}\n')
    run(
        tmp_path, steps=3, task=Sums(rows=4),
        rollout={"prompts": 4, "completions": 4, "max_tokens": 6, "file": {"path": str(path), "count": 2}},
    )  # fmt: skip
    row = metrics(tmp_path / "run")[1]
    assert row["dataset/rows"] == 3
    assert row["dataset/reward"] == 1.0
    given = [r for r in rollouts(tmp_path / "run", 1) if r["source"] == "dataset"]
    assert {r["completion"] for r in given} == {"AEI", "OU", "EE"}
    assert all(r["weight"] > 0 for r in given)


@pytest.mark.parametrize(
    ("rollout", "algorithm", "message"),
    [
        (REPLAY, "grpo", r"rollout.replay: grpo needs samples of its own policy"),
        ({**REPLAY, "replay": {"history": 4}}, "gvpo", "takes less than rollout.completions"),
        ({**REPLAY, "replay": {"history": 3, "size": 2}}, "gvpo", "takes at least replay.history"),
        (
            {**REPLAY, "replay": {"histery": 3}},
            "gvpo",
            r"rollout.replay.histery: unknown key; did you mean rollout.replay.history",
        ),
        ({"file": {"path": "x.jsonl", "count": 8}}, "gvpo", "takes less than rollout.completions"),
        ({"file": {"path": "x.jsonl"}, "max_tokens": 6}, "gvpo", "x.jsonl: cannot be read"),
    ],
)
def test_mistakes(tmp_path, rollout, algorithm, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, algorithm={"name": algorithm}, rollout=rollout, optimizer={})
    assert not (tmp_path / "run").exists()


def test_rows_of_a_file_find_their_examples_and_others_are_left_out(tmp_path):
    chat = [{"role": "user", "content": "Answer: 1 + 1 ="}]
    examples = [Example("3", "2 + 2 ="), Example("b", chat, given_prompt="1 + 1 =")]
    rows = [
        {"id": 3, "completion": "4"},
        {"id": "elsewhere", "prompt": "1 + 1 =", "completion": ["2"]},
        {"prompt": chat, "completion": "two"},
        {"id": [1], "prompt": {"no": "text"}, "completion": "x"},
        {"prompt": "a held-out question", "completion": "x"},
    ]
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_given(str(tmp_path / "g.jsonl"), examples) == {"3": ["4"], "b": ["2", "two"]}


def test_a_prompt_that_recurs_in_a_batch_draws_its_history_anew():
    engine = ReplayRollout(Counting(), history=1, size=50)
    for seed in range(10):
        step(engine, seed)
    group = Group(Example("a", "q"), {"prompt": [1]})
    drawn = engine.generate([[Request(4)]] * 8, [group] * 8, Sampling(4), 99)
    assert len({made.completions[-1].text for made in drawn}) > 1


def test_a_file_that_names_no_example(tmp_path):
    (tmp_path / "g.jsonl").write_text('{"id": "nobody", "completion": "x"}\n')
    with pytest.raises(UserError, match=r"g.jsonl, line 1: neither its id nor its prompt"):
        run(
            tmp_path, rollout={"max_tokens": 6, "prompts": 4, "file": {"path": str(tmp_path / "g.jsonl")}}, optimizer={}
        )
