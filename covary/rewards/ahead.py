"""Grading that begins while other completions are still sampled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from covary.rewards.types import Graded, Reward, TokenIds
from covary.types import Example


class AheadReward:
    """One rollout's rewards, of a reward that is computed outside this process; batch after batch, in a thread.

    A verdict depends on the row and the text alone, so it is the same whenever it was asked for. Rows are told apart as
    objects: ids are the user's, and may occur twice.
    """

    def __init__(self, reward: Reward) -> None:
        """Nothing is asked for yet."""
        self.name = reward.name
        self._reward = reward
        self._verdicts: dict[tuple[int, str], Future[Graded]] = {}
        self._examples: list[Example] = []  # kept, so that no other takes the place of one in memory
        self._waiting: list[tuple[Example, str]] = []
        self._lock = threading.Lock()
        self._working = False

    def begin(self, example: Example, completion: str) -> None:
        """Grade `completion` as an answer to `example`, unless that was asked for before; returns at once."""
        with self._lock:
            if (id(example), completion) in self._verdicts:
                return
            self._verdicts[id(example), completion] = Future()
            self._examples.append(example)
            self._waiting.append((example, completion))
            if not self._working:
                self._working = True
                threading.Thread(target=self._work, daemon=True).start()

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Grade `completions[i]` as an answer to `examples[i]`, as far as that has not begun."""
        for example, completion in zip(examples, completions, strict=True):
            self.begin(example, completion)
        return [self._verdicts[id(e), text].result() for e, text in zip(examples, completions, strict=True)]

    def close(self) -> None:
        """Nothing: the reward belongs to whoever made it."""

    def _work(self) -> None:
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                if not batch:
                    self._working = False
                    return
                futures = [self._verdicts[id(example), text] for example, text in batch]
            try:
                verdicts = self._reward([example for example, _ in batch], [text for _, text in batch])
            except BaseException as error:  # raised where the verdicts are needed
                for future in futures:
                    future.set_exception(error)
            else:
                for future, verdict in zip(futures, verdicts, strict=True):
                    future.set_result(verdict)


def ahead(reward: Reward) -> AheadReward | None:
    """Rewards that can begin early, where `reward` is computed outside this process."""
    return AheadReward(reward) if getattr(reward, "elsewhere", False) else None
