"""Plans as rows to sample, and sampled rows as groups: what the engines that ask another program have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from covary.seeding import derive_seed
from covary.types import Completion, Group, Request, UserError


@dataclass(frozen=True)
class Asked:
    """One completion that a plan asks for.

    Attributes:
        example: id of the example.
        request: what kind.
        prompt: ids of the prompt under the request's context.
        seed: of this row alone.
    """

    example: str
    request: Request
    prompt: list[int]
    seed: int

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.request.decoding == "greedy"


def rows_of_plans(plans: Sequence[Sequence[Request]], groups: Sequence[Group], seed: int) -> list[Asked]:
    """Every row of the plans, in order.

    A row's seed depends on (seed, example id, index of the row among the completions of that example) and on nothing
    else, so samples do not depend on the composition or the order of batches.

    Raises:
        ValueError: another source than the policy, or a context that a group does not have.
    """
    index: Counter[str] = Counter()
    rows: list[Asked] = []
    for group, requests in zip(groups, plans, strict=True):
        name = group.example.id
        for request in requests:
            if request.source != "policy":
                raise ValueError(f"example {name!r}: only the policy is sampled here, not {request.source!r}")
            if request.context not in group.contexts:
                raise ValueError(f"example {name!r}: {request.context!r} is not one of {sorted(group.contexts)}")
            for _ in range(request.count):
                rows.append(Asked(name, request, group.contexts[request.context], derive_seed(seed, name, index[name])))
                index[name] += 1
    return rows


def check_length(where: str, prompt: Sequence[int], max_tokens: int, config: Any) -> None:
    """Refuses a prompt that a model cannot continue.

    Raises:
        UserError: it is empty, or with `max_tokens` longer than the model's context.
    """
    if not prompt:
        raise UserError(f"{where}: the prompt has no tokens, it needs at least one")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and len(prompt) + max_tokens > limit:
        raise UserError(
            f"{where}: a prompt of {len(prompt)} tokens and max_tokens = {max_tokens} "
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
