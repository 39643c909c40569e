"""Plans as rows to sample, and sampled rows as groups: what all engines that sample have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from covary.seeding import derive_seed
from covary.types import Completion, Example, Group, Request, Source, UserError


@dataclass(frozen=True)
class Asked:
    """One completion that a plan asks for.

    Attributes:
        example: whose.
        contexts: prompts by name; the rows of a group share them.
        request: what kind.
        seed: of this row alone.
    """

    example: Example
    contexts: Mapping[str, tuple[int, ...]]
    request: Request
    seed: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids under the request's context."""
        return self.contexts[self.request.context]

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.request.decoding == "greedy"


def rows_of_plans(
    plans: Sequence[Sequence[Request]], groups: Sequence[Group], seed: int, source: Source = "policy"
) -> list[Asked]:
    """Every row of the plans, in order.

    A row's seed depends on (seed, example id, index of the row among the completions of that example) and on nothing
    else, so samples do not depend on the composition or the order of batches.

    Raises:
        ValueError: another source, or a context that a group does not have.
    """
    index: Counter[str] = Counter()
    rows: list[Asked] = []
    for group, requests in zip(groups, plans, strict=True):
        name = group.example.id
        contexts = {context: tuple(ids) for context, ids in group.contexts.items()}
        for request in requests:
            where = f"example {name!r}, context {request.context!r}"
            if request.source != source:
                raise ValueError(
                    f"{where}: source {request.source!r} requested, but this engine samples the {source} only"
                )
            if request.context not in contexts:
                raise ValueError(f"{where} is not one of {sorted(contexts)}")
            for _ in range(request.count):
                rows.append(Asked(group.example, contexts, request, derive_seed(seed, name, index[name])))
                index[name] += 1
    return rows


def check_lengths(rows: Sequence[Asked], max_tokens: int, config: Any) -> None:
    """Refuses prompts that a model of this configuration cannot continue.

    Raises:
        UserError: one is empty, or with `max_tokens` longer than the model's context.
    """
    limit = getattr(config, "max_position_embeddings", None)
    for row in rows:
        where = f"example {row.example.id!r}, context {row.request.context!r}"
        if not row.prompt:
            raise UserError(f"{where}: the prompt has no tokens, it needs at least one")
        if limit is not None and len(row.prompt) + max_tokens > limit:
            raise UserError(
                f"{where}: a prompt of {len(row.prompt)} tokens and max_tokens = {max_tokens} "
                f"exceed the model's context of {limit} tokens"
            )


def into_groups(
    plans: Sequence[Sequence[Request]], groups: Sequence[Group], completions: Sequence[Completion]
) -> list[Group]:
    """New groups with their completions, which come in the order of `rows_of_plans`."""
    left: Iterator[Completion] = iter(completions)
    return [
        Group(
            group.example,
            group.contexts,
            list(islice(left, sum(request.count for request in requests))),
            answer_tokens=group.answer_tokens,
        )
        for group, requests in zip(groups, plans, strict=True)
    ]
