"""The nouns that need torch: the batch an algorithm sees, the algorithm, and the two engines.

B rows (completions), T completion tokens, G groups (prompts), K completions per prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from covary.types import Completion, Example, Group, Request, Sampling, Score

if TYPE_CHECKING:
    import numpy as np

Scores = dict[str, Tensor]
Reduce = Callable[[Tensor], Tensor]  # sum over ranks; the identity in one process


def one_process(x: Tensor) -> Tensor:
    """The sum over ranks where there is one rank."""
    return x


@dataclass(frozen=True)
class Batch:
    """Everything about a set of completions that is known before the update.

    It covers a rollout; `take` gives optimizer batches and micro-batches. `batch["name"]` is every
    other number known before the update: frozen scores, features, what `prepare` returned.

    Attributes:
        tokens: completion token ids, right-padded with 0.
        mask: tokens that the policy chose (roles `sampled`). Padding is known by position, never by value.
        answer_mask: tokens of an appended reference answer.
        group: dense group ids.
        rewards: NaN where unknown.
        learn: rows that reach the loss.
        truncated: rows that met the token limit.
        source: who produced each row.
        max_tokens: the rollout's token limit (the constant length of Dr. GRPO).
        numbers: (B,) or (B, T) tensors by name.
        totals: sums over the optimizer batch and all ranks, fixed before its first forward pass.
        current: frozen name -> trained name, where both are the same quantity at the current
            parameters (first update after a rollout). The engine fills a frozen number that is not
            there from its live twin, and needs no extra pass for one that is.
    """

    tokens: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    answer_mask: Bool[Tensor, "B T"]
    group: Int[Tensor, " B"]
    rewards: Float[Tensor, " B"]
    learn: Bool[Tensor, " B"]
    truncated: Bool[Tensor, " B"]
    source: tuple[str, ...]
    max_tokens: int
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    current: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.group.shape[0]

    def __contains__(self, name: str) -> bool:
        return name in self.numbers

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.numbers[name]
        except KeyError:
            known = ", ".join(sorted(self.numbers)) or "none"
            raise KeyError(
                f"the batch has no number {name!r} (it has: {known}); "
                "a frozen score that reward, select or prepare reads needs early=True"
            ) from None

    @property
    def num_groups(self) -> int:
        """Number of groups with at least one row."""
        return int(self.group.unique().numel())

    def source_is(self, name: str) -> Bool[Tensor, " B"]:
        """Rows that `name` (policy, teacher, mixed, dataset or replay) produced."""
        return torch.tensor([s == name for s in self.source], dtype=torch.bool, device=self.group.device)

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> Batch:
        """The same rows with more numbers. A name used twice is an error."""
        for name, value in numbers.items():
            if name in self.numbers:
                raise ValueError(f"two numbers of one batch are called {name!r}")
            if value.shape[:1] != self.group.shape or value.shape not in (self.group.shape, self.tokens.shape):
                raise ValueError(
                    f"number {name!r} has shape {tuple(value.shape)}, not (B,) or (B, T) = {tuple(self.tokens.shape)}"
                )
        return replace(self, numbers={**self.numbers, **numbers})

    def take(self, rows: Sequence[int] | Tensor) -> Batch:
        """The named rows (indices, or a boolean mask), with dense group ids. Totals stay those of the optimizer batch."""
        index = torch.as_tensor(rows, device=self.group.device)
        index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index.long()
        return replace(
            self,
            tokens=self.tokens[index],
            mask=self.mask[index],
            answer_mask=self.answer_mask[index],
            group=self.group[index].unique(return_inverse=True)[1],
            rewards=self.rewards[index],
            learn=self.learn[index],
            truncated=self.truncated[index],
            source=tuple(self.source[i] for i in index.tolist()),
            numbers={name: value[index] for name, value in self.numbers.items()},
        )

    def with_totals(self, normalisers: Sequence[str] = (), reduce: Reduce = one_process) -> Batch:
        """Fix the totals of this optimizer batch over all ranks."""
        names = ("groups", "rows", "tokens", *normalisers)
        # Without rows `prepare` was not asked, and other ranks may have some: this one still has its part in the sum.
        prepared = [float(self[name].double().sum()) if len(self) else 0.0 for name in normalisers]
        here = [self.num_groups, len(self), int(self.mask.sum()), *prepared]
        everywhere = reduce(torch.tensor(here, dtype=torch.float64))  # one collective
        return replace(self, totals=dict(zip(names, everywhere.tolist(), strict=True)))

    def total(self, name: str) -> float:
        """`groups`, `rows`, `tokens`, or a normaliser, of the optimizer batch over all ranks."""
        try:
            return self.totals[name]
        except KeyError:
            known = ", ".join(sorted(self.totals)) or "none: call with_totals first"
            raise KeyError(f"the batch has no total {name!r} (it has: {known})") from None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        moved["numbers"] = {name: value.to(device) for name, value in self.numbers.items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class Algorithm:
    """The one base class: every default of an algorithm. Subclasses are frozen dataclasses of their hyper-parameters.

    Write `loss`; the rest where the method needs it. An algorithm knows no model, device, rank,
    micro-batch, dtype, configuration or logging. Rows that reach `loss` are valid, finite and to be
    learned from.
    """

    min_group: ClassVar[int] = 1
    """Groups with fewer valid rows leave."""
    coupled: ClassVar[bool] = False
    """Rows of a group meet through live scores, so a loss needs whole groups."""
    any_sampler: ClassVar[bool] = False
    """May learn from completions that another policy sampled (replay, files)."""
    offline: ClassVar[bool] = False
    """Learns from given completions only."""
    needs_reward: ClassVar[bool] = True
    sources: ClassVar[tuple[str, ...]] = ("policy",)
    """Sources that a plan may ask for. May be a property."""
    normalisers: ClassVar[tuple[str, ...]] = ()
    """Names of prepared numbers whose totals the loss divides by."""
    frozen: ClassVar[tuple[Score, ...]] = ()
    """Scores without gradient, known before the update. May be a property."""
    trained: ClassVar[tuple[Score, ...]] = (Score("policy"),)
    """Scores with gradient. May be a property."""
    template: ClassVar[str] = "chat"
    """The prompt template used by default."""

    def plan(self, prompts: Sequence[Example], k: int, rng: np.random.Generator) -> list[list[Request]]:
        """What to sample: one list of requests per prompt, k completions each, all sources together."""
        return [[Request(k)] for _ in prompts]

    def features(self, example: Example, completion: Completion) -> dict[str, float]:
        """Numbers per row from text or data; `collate` puts them into the batch."""
        return {}

    def reward(self, batch: Batch) -> Float[Tensor, " B"] | None:
        """Rewards made of early scores, for methods without a grader. None: rewards come from the grader."""
        return None

    def select(self, batch: Batch, state: dict[str, float]) -> tuple[Bool[Tensor, " G"] | None, dict[str, float]]:
        """Which groups to keep (None: all), and the next state: plain numbers, {} at first, moved once per drawn batch."""
        return None, state

    def prepare(self, batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
        """Constants of the whole rollout, (B,) or (B, T), once, at the old parameters. `reduce` sums over ranks."""
        return {}

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """The scalar to minimise: a sum over rows or groups divided by totals of the optimizer batch."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Numbers to log, once per optimizer batch, on detached scores."""
        return {}

    def teacher_note(self, same_tokens: bool) -> str | None:
        """What to tell at the start of a run with such a teacher (with the policy's own tokens, or others)."""
        return None


class RolloutEngine(Protocol):
    """Samples completions."""

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """New groups with the completions that each group's plan asks for, in order."""
        ...

    def load_weights(self, state: Mapping[str, Tensor] | None, version: int) -> None:
        """Take the policy's new weights (None where they are shared)."""
        ...

    def observe(self, groups: list[Group]) -> None:
        """See the groups of a step with their rewards, all rows, before any leaves."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resume needs, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        ...


class TrainEngine(Protocol):
    """Turns dloss/dscores into gradients of the model. It knows no algorithm by name."""

    def score(
        self, groups: list[Group], scores: Sequence[Score], temperature: float | None = None
    ) -> dict[str, list[Tensor | float]]:
        """Per score, one 1-D tensor (over the row's tokens) or one number per row, without gradient."""
        ...

    def forward_backward(self, groups: list[Group], batch: Batch, algorithm: Algorithm) -> Scores:
        """Accumulate gradients of the loss over `batch`; returns the detached trained scores, (B, T) or (B,)."""
        ...

    def step(self, lr: float) -> float:
        """One optimizer update; returns the gradient norm before clipping. A non-finite norm skips the update."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that training changes, as plain tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        ...
