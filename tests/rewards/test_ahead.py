"""Grading ahead: the same verdicts, begun early, each asked for once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from covary.rewards import Graded, build_reward
from covary.rewards.ahead import AheadReward, ahead
from covary.types import Example, RunError

EXAMPLES = [Example(f"e{i}", "q", str(i)) for i in range(4)]


class Slow:
    """Holds the first batch back until it is let go; notes what each batch held."""

    name = "slow"
    elsewhere = True

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, examples: Sequence[Example], completions: Sequence[str], token_ids=None) -> list[Graded]:
        self.batches.append(list(completions))
        self.begun.set()
        assert self.go.wait(5)
        if "broken" in completions:
            raise RunError("the grader is gone")
        pairs = zip(examples, completions, strict=True)
        return [Graded(float(text == example.answer), grade=None) for example, text in pairs]

    def close(self) -> None:
        raise AssertionError("the reward is the run's")


def test_what_begins_early_is_graded_in_batches_and_comes_in_order() -> None:
    slow = Slow()
    reward = ahead(slow)
    assert isinstance(reward, AheadReward)
    reward.begin(EXAMPLES[0], "0")
    assert slow.begun.wait(5)  # before anybody waits for the verdict
    for example, text in ((EXAMPLES[1], "1"), (EXAMPLES[1], "9"), (EXAMPLES[0], "0")):
        reward.begin(example, text)
    slow.go.set()
    verdicts = reward([EXAMPLES[1], EXAMPLES[0], EXAMPLES[1], EXAMPLES[0], EXAMPLES[2]], ["9", "0", "1", "0", "2"])
    assert [verdict.value for verdict in verdicts] == [0, 1, 1, 1, 1]
    assert slow.batches[0] == ["0"]
    assert sorted(text for batch in slow.batches for text in batch) == ["0", "0", "1", "2", "9"]  # each row once
    reward.close()


def test_a_pure_reward_grades_rows_of_one_text_together_and_only_those() -> None:
    slow = Slow()
    slow.pure = True  # pyright: ignore[reportAttributeAccessIssue]
    slow.go.set()
    reward = AheadReward(slow)
    for text in ("0", "1", "0"):
        reward.begin(EXAMPLES[0], text)
    verdicts = reward([EXAMPLES[0]] * 4 + [EXAMPLES[1]], ["0", "1", "0", "0", "1"])
    assert [verdict.value for verdict in verdicts] == [1, 0, 1, 1, 1]
    assert sorted(text for batch in slow.batches for text in batch) == ["0", "1", "1"]


def test_graders_are_pure_and_what_users_wrote_is_not(tmp_path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward(completion, answer):\n    return 1.0\n")
    rewards = [build_reward("exact"), build_reward(f"{file}:reward")]
    for reward in rewards:
        reward.close()
    assert [getattr(reward, "pure", False) for reward in rewards] == [True, False]


def test_rows_of_one_id_and_text_are_told_apart() -> None:
    slow = Slow()
    slow.go.set()
    reward = AheadReward(slow)
    first, second = Example("same", "q", "1"), Example("same", "q", "2")
    reward.begin(first, "2")
    reward.begin(second, "2")
    assert [graded.value for graded in reward([second, first], ["2", "2"])] == [1, 0]


def test_an_error_of_the_grader_is_raised_where_its_verdict_is_needed() -> None:
    slow = Slow()
    slow.go.set()
    reward = AheadReward(slow)
    reward.begin(EXAMPLES[0], "broken")
    with pytest.raises(RunError, match="the grader is gone"):
        reward([EXAMPLES[0]], ["broken"])


def test_a_grader_that_gives_too_few_verdicts_is_an_error_and_no_wait() -> None:
    slow = Slow()
    slow.go.set()
    reward = AheadReward(slow)
    slow.__class__ = type("Short", (Slow,), {"__call__": lambda self, *given: []})
    with pytest.raises(RuntimeError, match="slow gave 0 verdicts on 1 completions"):
        reward(EXAMPLES[:1], ["0"])


def test_what_has_not_begun_when_it_is_closed_is_not_graded() -> None:
    slow = Slow()
    reward = AheadReward(slow)
    reward.begin(EXAMPLES[0], "0")
    assert slow.begun.wait(5)
    reward.begin(EXAMPLES[1], "1")
    reward.close()
    slow.go.set()
    reward.begin(EXAMPLES[2], "2")
    assert reward([EXAMPLES[2]], ["2"])[0].value == 1
    assert "1" not in [text for batch in slow.batches for text in batch]


def test_rewards_of_this_process_are_left_alone() -> None:
    assert ahead(build_reward(lambda completion, answer: 1.0)) is None
    pooled = build_reward("exact")
    try:
        early = ahead(pooled)
        assert early is not None
        assert [graded.value for graded in early(EXAMPLES[:2], ["0", "5"])] == [1, 0]
    finally:
        pooled.close()
