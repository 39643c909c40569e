"""Grading that begins while other completions are still sampled."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future

from covary.rewards.types import Graded, Reward, TokenIds
from covary.types import Example


class AheadReward:
    """One rollout's rewards, of a reward that is computed outside this process; batch after batch, in a thread.

    Every row is graded once, as without it, but not all in one call; a reward that says the same of the same text
    (`pure`) grades rows of one text together. Examples are told apart as objects: ids are the user's, and may occur twice.
    What is computed elsewhere reads texts, not token ids.
    """

    def __init__(self, reward: Reward) -> None:
        """Nothing is asked for yet."""
        self.name = reward.name
        self._reward = reward
        self._pure = getattr(reward, "pure", False)
        self._begun: dict[tuple[int, str], deque[Future[Graded]]] = defaultdict(deque)
        self._examples: list[Example] = []  # kept, so that no other takes the place of one in memory
        self._waiting: list[tuple[Example, str, Future[Graded]]] = []
        self._lock = threading.Lock()
        self._working = False

    def begin(self, example: Example, completion: str) -> None:
        """Grade `completion` as an answer to `example`; returns at once. Every call is one row."""
        with self._lock:
            begun = self._begun[id(example), completion]
            if begun and self._pure:
                return
            future: Future[Graded] = Future()
            begun.append(future)
            self._examples.append(example)
            self._waiting.append((example, completion, future))
            if not self._working:
                self._working = True
                threading.Thread(target=self._work, daemon=True).start()

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Grade `completions[i]` as an answer to `examples[i]`, as far as that has not begun."""
        futures = []
        for example, completion in zip(examples, completions, strict=True):
            begun = self._begun[id(example), completion]
            if not begun:
                self.begin(example, completion)
            futures.append(begun[0] if self._pure else begun.popleft())
        return [future.result() for future in futures]

    def close(self) -> None:
        """Begin no more; the reward itself belongs to whoever made it."""
        with self._lock:
            self._waiting = []

    def _work(self) -> None:
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                if not batch:
                    self._working = False
                    return
            try:
                verdicts = self._reward([example for example, _, _ in batch], [text for _, text, _ in batch])
                if len(verdicts) != len(batch):
                    raise RuntimeError(f"{self.name} gave {len(verdicts)} verdicts on {len(batch)} completions")
            except BaseException as error:  # raised where the verdicts are needed
                for _, _, future in batch:
                    future.set_exception(error)
            else:
                for (_, _, future), verdict in zip(batch, verdicts, strict=True):
                    future.set_result(verdict)


def ahead(reward: Reward) -> AheadReward | None:
    """Rewards that can begin early, where `reward` is computed outside this process."""
    return AheadReward(reward) if getattr(reward, "elsewhere", False) else None
