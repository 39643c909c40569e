"""Rollouts from vLLM, which samples faster than the trainer's own model and holds a copy of its weights.

Whoever holds vLLM (`vllm_local.py` in this process, `vllm_server.py` a server) is asked for token ids and log-probs only:
text, ends and stop strings are read here, as the local engine reads them. Before anything is sampled after an update
the weights are sent, and what vLLM then says about a fixed text is compared with the trainer's own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from covary.rollout.requests import Asked, check_lengths, into_groups, rows_of_plans
from covary.rollout.transformers import end_ids
from covary.types import Completion, Finish, Group, Request, RunError, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE_TOKENS = 192
"""Tokens of the text that is compared after each sync, at most: more than vLLM remembers of a prompt in one piece."""
_SAMPLED = 16  # tokens that the comparison samples
_SEED_BITS = 31
_ROUNDING = 1e-2  # a log-prob computed in 16 bits may lie above 0
# Mean difference in nats that two programs of one precision may have with equal weights. The first comparison of a run
# may use all of it; later ones a multiple of what the first one found, which rounding does not reach and stale weights do.
_LIMIT = {None: 0.01, torch.bfloat16: 0.1}
_GROWTH = 10.0
_LEAST = 5e-5
_LEAST_OF_MERGED = 2e-4  # an adapter merged into the weights rounds otherwise than beside them
_MOVED = 1e-5  # nats; an update that moves the text less is none that could be looked for


@dataclass(frozen=True)
class Job:
    """One completion for vLLM.

    Attributes:
        prompt: token ids.
        parameters: of vLLM's `SamplingParams`, which its server takes by the same names.
    """

    prompt: list[int]
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What vLLM says to a `Job`.

    Attributes:
        tokens: that it sampled, the one that ended the completion included.
        logps: theirs, in nats.
        prompt_logps: of the prompt's tokens but the first, at temperature 1; None where they were not asked for.
    """

    tokens: list[int]
    logps: list[float]
    prompt_logps: list[float] | None = None


class Vllm(Protocol):
    """Who holds vLLM."""

    name: str
    """What messages call it."""

    def complete(self, jobs: Sequence[Job], on_progress: Callable[[int, int], None] | None) -> list[Answer]:
        """Answers in the order of the jobs.

        Raises:
            RunError: there is none to one of them.
        """
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take new weights, by the names of a checkpoint, and forget what was computed with the old ones.

        Raises:
            RunError: it cannot.
        """
        ...


class VllmRollout:
    """Samples the policy with a vLLM that follows it.

    A row's seed is that of the local engine, so samples do not depend on what is sampled beside them, as far as vLLM
    keeps its word; the samples themselves are others.

    Attributes:
        end_ids: every id that ends a completion.
        weights_version: of the weights that vLLM holds; -1 before any were sent.
        on_progress: called with (rows finished, rows in all).
    """

    def __init__(
        self,
        vllm: Vllm,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        weights: Callable[[], Mapping[str, Tensor]],
        *,
        probe: Sequence[int],
        temperature: float,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Nothing is sent before something is sampled.

        Args:
            vllm: who samples.
            model: the trainer's, in evaluation mode, whose numbers vLLM's are compared with.
            tokenizer: decodes completions.
            weights: the policy's weights as they are now, by the names of a checkpoint. Tied weights under both names:
                vLLM may hold a copy of each.
            probe: ids of a text, as the run has it.
            temperature: at which the run samples, so at which vLLM's log-probs have to be given.
            autocast: compute type of the trainer's forward passes; None for the model's own.
        """
        self.vllm = vllm
        self.model = model
        self.tokenizer = tokenizer
        self.weights = weights
        self.temperature = temperature
        self.autocast = autocast
        self.on_progress: Callable[[int, int], None] | None = None
        self._config = model.config.get_text_config(decoder=True)
        self.end_ids = end_ids(tokenizer, getattr(model, "generation_config", None), self._config)
        context = getattr(self._config, "max_position_embeddings", None) or 2 * PROBE_TOKENS
        self.probe = list(probe[: min(PROBE_TOKENS, context - _SAMPLED)])
        self.weights_version = -1
        self._version = 0
        self._noise: float | None = None
        self._last: tuple[Tensor, Tensor] | None = None  # vLLM's and the trainer's log-probs of the probe

    def load_weights(self, state: Mapping[str, Tensor] | None, version: int) -> None:
        """Notes that the weights are those of `version`. They are sent before the next completion is asked for."""
        self._version = version

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """Samples what `plans` ask for, of source "policy" only.

        A row that vLLM ended for no reason that can be seen here has no tokens, so it leaves and is counted.

        Raises:
            UserError: a prompt is empty, or with `max_tokens` longer than the model's context.
            RunError: vLLM gives no answer or a broken one, takes no weights, or computes with others than the trainer's.
        """
        rows = rows_of_plans(plans, groups, seed)
        check_lengths(rows, sampling.max_tokens, self._config)
        if not rows:
            return into_groups(plans, groups, [])
        if self.weights_version != self._version:
            self.vllm.load(self.weights())
            self._compare()
            self.weights_version = self._version
        jobs = [Job(list(row.prompt), parameters(row, sampling, self.end_ids)) for row in rows]
        answers = self.vllm.complete(jobs, self.on_progress)
        self._still_the_same()
        return into_groups(
            plans, groups, [self._completion(*pair, sampling) for pair in zip(rows, answers, strict=True)]
        )

    def observe(self, groups: list[Group]) -> None:
        """Samples are not remembered."""

    def state(self) -> dict[str, Any]:
        """Nothing: every seed is derived, and weights are sent anew after a resume."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def _completion(self, row: Asked, answer: Answer, sampling: Sampling) -> Completion:
        self._refuse_foreign(answer)
        tokens, logps, finish, text = [], [], "length", ""
        ended = ending(answer.tokens, self.tokenizer, self.end_ids, sampling)
        if ended is not None and all(map(math.isfinite, answer.logps)):
            length, finish, text = ended
            tokens, logps = answer.tokens[:length], answer.logps[:length]
        return Completion(
            tokens=tokens,
            text=text,
            finish=finish,
            logps=logps,
            context=row.request.context,
            learn=row.request.learn,
            weights_version=self.weights_version,
            greedy=row.greedy,
        )

    def _refuse_foreign(self, answer: Answer) -> None:
        """What cannot have come from this policy."""
        vocabulary = self._config.vocab_size
        foreign = [id for id in answer.tokens if not 0 <= id < vocabulary]
        if foreign:
            raise RunError(f"{self.vllm.name}: sampled the token {foreign[0]}, and the model has {vocabulary}")
        if len(answer.logps) != len(answer.tokens):
            raise RunError(f"{self.vllm.name}: {len(answer.logps)} log-probs of {len(answer.tokens)} tokens")
        if any(logp > _ROUNDING for logp in answer.logps):
            raise RunError(f"{self.vllm.name}: a log-prob of {max(answer.logps)}, and none is above 0")

    # -- does vLLM hold the trainer's weights? ---------------------------------------------------------------

    def _compare(self) -> None:
        """Compares what vLLM says about the probe with what the trainer says.

        Raises:
            RunError: they differ by more than rounding.
        """
        read, row = self.vllm.complete([self._reading(), self._sampling()], None)
        self._refuse_foreign(row)
        ours, theirs = self._logps(self.probe, 1.0), _tensor(read.prompt_logps)
        if len(theirs) != len(ours):
            raise RunError(f"{self.vllm.name}: {len(theirs)} log-probs of a prompt of {len(ours) + 1} tokens")
        if self._last is not None:
            before_theirs, before_ours = self._last
            moved = float((ours - before_ours).abs().mean())
            if moved > _MOVED and torch.equal(theirs, before_theirs):
                raise RunError(
                    f"{self.vllm.name}: still has the weights of an earlier update: it gives {len(self.probe)} tokens the same "
                    f"log-probs as then, to the last digit (mean {theirs.mean():.6f}), and the trainer's moved by {moved:.2g} "
                    f"nats per token (mean {ours.mean():.6f})"
                )
        difference = float((theirs - ours).abs().mean())
        limit = self._limit()
        if not difference <= limit:
            raise RunError(
                f"{self.vllm.name}: does not compute with the policy's weights. Of the same {len(self.probe)} tokens its "
                f"mean log-prob is {theirs.mean():.6f} and the trainer's {ours.mean():.6f}, {difference:.2g} nats apart per "
                f"token (allowed: {limit:.2g}). Perhaps it serves another model, or its type is not the trainer's (--dtype), "
                "or it did not take all weights (tied embeddings are two copies to it)"
            )
        sampled = self._compare_temperature(row, limit)
        if self._noise is None:
            self._noise = max(difference, sampled)
        if self._last is None or not torch.equal(theirs, self._last[0]):
            self._last = (theirs, ours)

    def _compare_temperature(self, row: Answer, limit: float) -> float:
        """The log-probs of what is sampled have to be those at the temperature; how far they are from them."""
        tokens, theirs = [*self.probe, *row.tokens], _tensor(row.logps)
        ours = self._logps(tokens, self.temperature)[len(self.probe) - 1 :]
        # Dividing the logits by a temperature below 1 multiplies their rounding.
        allowed = limit * max(1.0, 1 / self.temperature)
        difference = float((theirs - ours).abs().mean())
        if difference <= allowed:
            return difference
        raw = self._logps(tokens, 1.0)[len(self.probe) - 1 :]
        hint = "its sampler is not the policy, or what it remembers of a prompt belongs to other weights"
        if float((theirs - raw).abs().mean()) <= limit:
            hint = "they are those of temperature 1: vLLM needs --logprobs-mode processed_logprobs"
        raise RunError(
            f"{self.vllm.name}: the log-probs of what it samples at temperature {self.temperature:g} are not the policy's: "
            f"mean {theirs.mean():.6f}, the trainer's {ours.mean():.6f}, {difference:.2g} nats apart per token "
            f"(allowed: {allowed:.2g}); {hint}"
        )

    def _still_the_same(self) -> None:
        """A server that was restarted, or shared, samples another policy from then on."""
        (read,) = self.vllm.complete([self._reading()], None)
        assert self._last is not None
        theirs, before = _tensor(read.prompt_logps), self._last[0]
        if len(theirs) != len(before) or not float((theirs - before).abs().mean()) <= self._limit():
            raise RunError(
                f"{self.vllm.name}: its weights changed while it sampled (was it restarted, or does another run use it?)"
            )

    def _limit(self) -> float:
        """The mean difference, in nats a token, that passes for rounding."""
        limit = _LIMIT[self.autocast]
        least = _LEAST_OF_MERGED if hasattr(self.model, "peft_config") else _LEAST
        return limit if self._noise is None else min(limit, max(least, _GROWTH * self._noise))

    def _reading(self) -> Job:
        """Reads the probe."""
        return Job(self.probe, {**_explicit(1.0, 0), "max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True})

    def _sampling(self) -> Job:
        """Goes on with the probe as a row of the run does, with what vLLM remembers of prompts."""
        return Job(self.probe, {**_explicit(self.temperature, 0), "max_tokens": _SAMPLED, "ignore_eos": True})

    @torch.no_grad()
    def _logps(self, tokens: list[int], temperature: float) -> Tensor:
        """The trainer's log-probs of all tokens but the first, (n - 1,)."""
        device = self.model.device
        cast = torch.autocast(device.type, dtype=self.autocast) if self.autocast is not None else nullcontext()
        with cast:
            logits = self.model(input_ids=torch.tensor([tokens], device=device)).logits[0, :-1]
        targets = torch.tensor(tokens[1:], device=device)[:, None]
        return torch.log_softmax(logits.float() / temperature, -1).gather(-1, targets)[:, 0].cpu()


def _tensor(values: Sequence[float] | None) -> Tensor:
    return torch.tensor(values or [], dtype=torch.float32)


def _explicit(temperature: float, seed: int) -> dict[str, Any]:
    """Every parameter that shapes a sample: vLLM takes the checkpoint's generation defaults for what is left open."""
    return {
        "n": 1,
        "temperature": temperature,
        "seed": seed % 2**_SEED_BITS,
        "top_p": 1.0,
        "top_k": 0,  # off
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "logprobs": 0,  # the sampled token's own and no others
        "skip_special_tokens": False,  # a stop string may hold one
    }


def parameters(row: Asked, sampling: Sampling, ends: frozenset[int]) -> dict[str, Any]:
    """What vLLM is told of one row. The ends are ours: those of the served folder may be others."""
    return {
        **_explicit(0.0 if row.greedy else sampling.temperature, row.seed),
        "max_tokens": sampling.max_tokens,
        "ignore_eos": True,
        "stop_token_ids": sorted(ends),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
    }


def ending(
    tokens: Sequence[int], tokenizer: Any, ends: frozenset[int], sampling: Sampling
) -> tuple[int, Finish, str] | None:
    """How many of the tokens are a completion, what ended it, and its text; None where nothing did.

    vLLM looks for stop strings in text that it decodes piece by piece, and may say more than the local engine would
    have: whoever ends a completion here ends it where that engine does.
    """
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    before = list(tokens[: sampling.max_tokens] if end is None else tokens[:end])

    def text_of(count: int) -> str:
        return tokenizer.decode(before[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def stops(text: str) -> list[int]:
        return [place for stop in sampling.stop if (place := text.find(stop)) >= 0]

    text, length = text_of(len(before)), len(before)
    if stops(text):
        while stops(shorter := text_of(length - 1)):
            text, length = shorter, length - 1
        return length, "stop_string", text[: min(stops(text))]
    if end is not None:
        return end + 1, "eos", text
    return (length, "length", text) if length == sampling.max_tokens else None
