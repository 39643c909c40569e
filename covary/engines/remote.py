"""A teacher behind an OpenAI-compatible server: log-probs of a prompt's own tokens.

Prompt and completion go as token ids, in one request for each completion. Two dialects are read: vLLM's
`prompt_logprobs` (one mapping from ids to log-probs for each position) and the API's own `echo` with `logprobs`
(SGLang and others). An answer is believed only where the ids or the number of tokens that come back are those that
were sent, so no answer is taken for that to another request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covary.http import ask_all, post_json, read_key
from covary.settings import TeacherServer
from covary.types import Completion, Example, Group, RunError, UserError

_ROUNDING = 1e-2  # a log-prob computed in 16 bits may lie above 0
_NO_CHANCE = -9999.0  # what vLLM writes for a log-prob of -inf


@dataclass(frozen=True)
class ServerLogProbs:
    """Asks `POST url/completions`, at most `concurrency` at a time.

    Attributes:
        url: up to and with the version, such as http://localhost:8000/v1.
        model: the server's name of the teacher.
        concurrency: requests under way at a time.
        timeout: seconds without a byte from the server.
        attempts: per request.
        pause: seconds before the second attempt; doubled each time.
        key: sent as bearer token, where there is one.
    """

    url: str
    model: str
    concurrency: int = 8
    timeout: float = 120.0
    attempts: int = 6
    pause: float = 1.0
    key: str | None = field(default=None, repr=False)

    def __call__(self, groups: list[Group]) -> list[Tensor | None]:
        """As `LogProbs`; None where the server refuses a row (it may be too long for it).

        Raises:
            RunError: it stays away, refuses every row, or does not return log-probs of what it was sent.
        """
        rows = [(group.contexts["prompt"], row.tokens) for group in groups for row in group.completions]
        refusals: list[str] = []

        def ask(row: tuple[list[int], list[int]]) -> Tensor | None:
            try:
                return self._ask(*row)
            except UserError as error:
                refusals.append(str(error))
                return None

        values = ask_all(ask, rows, self.concurrency)
        if refusals and len(refusals) == len(rows):
            raise RunError(f"teacher.url: the server refuses everything; the first: {refusals[0]}")
        return values

    def _ask(self, prompt: list[int], completion: list[int]) -> Tensor:
        body = {
            "model": self.model,
            "prompt": [*prompt, *completion],
            "max_tokens": 1,  # the least that every server takes
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
            "prompt_logprobs": 0,  # the token's own and no others
            "return_token_ids": True,
        }
        url = f"{self.url.rstrip('/')}/completions"
        answer = post_json(url, body, key=self.key, timeout=self.timeout, attempts=self.attempts, pause=self.pause)
        try:
            choice = answer["choices"][0]
            values = _prompt_logprobs(choice, [*prompt, *completion], url)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{url} answered without a completion ({str(answer)[:200]})") from error
        return torch.tensor(values[len(prompt) :])


def _prompt_logprobs(choice: Mapping[str, Any], sent: list[int], url: str) -> list[float]:
    """The log-prob of each token that was sent; NaN of the first, which nothing predicts.

    Raises:
        RunError: there are none, or they belong to other tokens.
    """
    listed = choice.get("prompt_logprobs")
    returned = choice.get("prompt_token_ids")
    if listed is not None:
        if len(listed) != len(sent) or any(str(id) not in at for id, at in zip(sent[1:], listed[1:], strict=True)):
            returned = []
        else:
            values = [at[str(id)]["logprob"] for id, at in zip(sent[1:], listed[1:], strict=True)]
            return [math.nan, *map(_logp, values)]
    if returned is not None and returned != sent:
        raise RunError(f"{url} returned log-probs of other tokens than it was sent")
    echoed = (choice.get("logprobs") or {}).get("token_logprobs")
    if not echoed or echoed[0] is not None:  # the prompt's first token has none: it was not echoed
        raise RunError(
            f"{url} returns no log-probs of prompts (neither prompt_logprobs, as vLLM does, nor echo with logprobs): "
            "a teacher's server must"
        )
    if len(echoed) not in (len(sent), len(sent) + 1):  # with or without the token that it had to add
        raise RunError(f"{url} returned log-probs of {len(echoed)} tokens for the {len(sent)} that it was sent")
    return [math.nan, *map(_logp, echoed[1 : len(sent)])]


def _logp(value: float) -> float:
    """JSON has no -inf; what stands for it must not pass for a number.

    Raises:
        RunError: it is above 0, perhaps a probability.
    """
    if value > _ROUNDING:
        raise RunError(f"teacher.url: the server returned a log-prob of {value}, and none is above 0")
    return float(value) if value > _NO_CHANCE else -math.inf


def need_log_probs(logps: ServerLogProbs, prompt: list[int], end: int) -> None:
    """Ask for one token's log-prob before a run: a server that gives none should not be found out in its middle.

    Raises:
        RunError: it gives none, or does not answer.
    """
    logps([Group(Example("start", ""), {"prompt": prompt}, [Completion([end], "", "eos")])])


def server_log_probs(teacher: TeacherServer) -> ServerLogProbs:
    """What a recipe's section asks for.

    Raises:
        UserError: the environment variable that should hold the key is not set.
    """
    key = read_key(teacher.api_key, "teacher.api_key") if teacher.api_key is not None else None
    return ServerLogProbs(
        teacher.url,
        teacher.served_model or teacher.tokenizer,
        teacher.concurrency,
        teacher.timeout,
        teacher.attempts,
        key=key,
    )
