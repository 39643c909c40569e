"""Completions from a server that speaks OpenAI's completions API (vLLM, SGLang, llama.cpp and others), for evaluation.

Prompts go as token ids, so the server sees what the local engine would. Every completion is a request of its own with a
seed of its own, derived as the local engine derives it: samples do not depend on what else the server is doing, as
far as the server keeps its word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from covary.http import ask_all, post_json
from covary.rollout.requests import Asked, into_groups, rows_of_plans
from covary.types import Completion, Finish, Group, Request, RunError, Sampling

_SEED_BITS = 31  # servers take a C int


@dataclass
class ServerRollout:
    """Asks for completions, at most `concurrency` at a time.

    Attributes:
        url: of the API, up to `/v1`.
        model: the name under which the server knows the model.
        tokenizer: the model's own; gives completions their ids back, by encoding their text, so a count of tokens may
            be a little off.
        key: bearer token.
        concurrency: requests at a time.
        timeout: seconds without a byte from the server.
        attempts: per request.
        pause: seconds before the second attempt.
        on_progress: called with (completions finished, completions in all).
    """

    url: str
    model: str
    tokenizer: Any
    key: str | None = field(default=None, repr=False)
    concurrency: int = 32
    timeout: float = 600.0
    attempts: int = 5
    pause: float = 1.0
    on_progress: Callable[[int, int], None] | None = None

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """What `plans` ask for, of source "policy" only; without log-probs.

        Raises:
            UserError: the server refuses a request.
            RunError: it does not answer, or not with a completion.
        """
        ask = partial(self._complete, sampling=sampling)
        completions = ask_all(ask, rows_of_plans(plans, groups, seed), self.concurrency, self.on_progress)
        return into_groups(plans, groups, completions)

    def _complete(self, row: Asked, sampling: Sampling) -> Completion:
        body = {
            "model": self.model,
            "prompt": row.prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": 0.0 if row.greedy else sampling.temperature,
            "seed": row.seed % 2**_SEED_BITS,
            "n": 1,
            # Servers take the checkpoint's generation defaults for whatever is left open.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,  # tags such as <think> may be special tokens, and graders must see them
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        url = f"{self.url.rstrip('/')}/completions"
        answer = post_json(url, body, key=self.key, timeout=self.timeout, attempts=self.attempts, pause=self.pause)
        try:
            choice = answer["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
            if not isinstance(text, str):
                raise TypeError("no text")
        except (KeyError, IndexError, TypeError) as error:
            raise RunError(f"{url} answered without a completion ({str(answer)[:200]})") from error
        # A stop string is reported as "stop" as well; vLLM names it.
        stopped = isinstance(choice.get("stop_reason"), str)
        finish: Finish = "length" if reason == "length" else "stop_string" if stopped else "eos"
        end = self.tokenizer.eos_token
        if finish == "eos" and end:
            text = text.removesuffix(end)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if finish == "eos" and self.tokenizer.eos_token_id is not None:
            tokens.append(self.tokenizer.eos_token_id)
        return Completion(
            list(tokens), text, finish, context=row.request.context, learn=row.request.learn, greedy=row.greedy
        )

    def load_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        """The server's weights are its own, so it cannot follow a training.

        Raises:
            RunError: always.
        """
        raise RunError(f"{self.url} cannot take new weights")

    def observe(self, groups: list[Group]) -> None:
        """Samples are not remembered."""

    def state(self) -> dict[str, Any]:
        """Nothing: every seed is derived."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
