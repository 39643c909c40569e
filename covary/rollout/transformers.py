"""Rollouts from a Hugging Face causal language model, in the process and with the weights of the trainer.

One decode loop, so that what is sampled is exactly the policy that the loss differentiates: nothing is
read from the checkpoint's generation defaults but the end ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from covary.rollout.decoding import Decoding, Row, decoding_of, evaluating, places_for_copies
from covary.rollout.linear import reordered_weights
from covary.rollout.requests import check_lengths, into_groups, rows_of_plans
from covary.rollout.sampling import sample_tokens
from covary.types import Completion, Example, Group, Request, Sampling, Source

if TYPE_CHECKING:  # transformers takes seconds to import, in which `covary check` has other work to do
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tokens decoded beyond a stop string's own, so that its first character is not the window's first,
# which decoders change (stripped space, incomplete UTF-8).
_STOP_SLACK = 4
# Rows join when this share of the last ones has left: a prefill for each row that leaves would cost more than empty places.
_FREE = 0.25


class TransformersRollout:
    """Samples completions with their log-probs, one uniform number per row and step.

    The uniforms of a row depend on (seed, example id, index of the row among the completions of that
    example) and on nothing else, so samples do not depend on the composition or the order of batches
    (up to float rounding of the model's logits).

    Attributes:
        end_ids: every id that ends a completion, of the tokenizer and of the model's two configs.
        on_progress: called with (rows finished, rows in all) whenever rows finish.
        not_shared: why every row has a copy of its prompt's cache; None where the rows of a prompt share it.
        on_text: called with (example, text) of every row that finishes.
    """

    source: ClassVar[Source] = "policy"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        autocast: torch.dtype | None = None,
        cache_bytes: int = 2 * 2**30,
    ) -> None:
        """Shares `model` with the trainer.

        Args:
            model: a transformers causal language model; neither copied nor moved.
            tokenizer: decodes completions.
            autocast: compute type of the forward passes, the same as the trainer's; None for the model's own.
            cache_bytes: bound in bytes on the keys, values and logits of the rows decoded at a time.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.cache_bytes = cache_bytes
        self.weights_version = 0
        self.on_progress: Callable[[int, int], None] | None = None
        self.on_text: Callable[[Example, str], None] | None = None
        self._decoding, self.not_shared = decoding_of(model)
        self._config = model.config.get_text_config(decoder=True)
        self.end_ids = end_ids(tokenizer, getattr(model, "generation_config", None), self._config)

    def load_weights(self, state: Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Records `version`; the weights themselves are the trainer's, so `state` is not read."""
        self.weights_version = version

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """Samples what `plans` ask for.

        Args:
            plans: the requests of each group; of this engine's source only.
            groups: prompts under the names of their contexts; completions are not read.
            sampling: every parameter that shapes the text.
            seed: of this rollout, so of (run seed, step).

        Returns:
            New groups, their completions in the order of the requests.

        Raises:
            UserError: a prompt is empty, or with `max_tokens` longer than the model's context.
            ValueError: another source, an unknown context, a temperature that is not
                positive where rows are sampled, `max_tokens` below 1.
        """
        asked = rows_of_plans(plans, groups, seed, self.source)
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens is {sampling.max_tokens}, it must be at least 1")
        if not sampling.temperature > 0 and not all(row.greedy for row in asked):
            raise ValueError(f"temperature is {sampling.temperature}, sampling needs one above 0")
        check_lengths(asked, sampling.max_tokens, self._config)
        rows = [Row(row, np.random.PCG64(row.seed)) for row in asked]
        # no_grad, not inference_mode: tensors that the model keeps from a pass must stay fit for training.
        # One autocast around all passes: its cache then casts the weights once.
        with (
            torch.no_grad(),
            evaluating(self.model),
            reordered_weights(self._models(), self.autocast),
            self._autocast(),
        ):
            count = 0
            for finished in self._decode(rows, sampling):
                count += len(finished)
                if self.on_progress is not None:
                    self.on_progress(count, len(rows))
                if self.on_text is not None:
                    for row in finished:
                        self.on_text(row.asked.example, row.text)
        return into_groups(plans, groups, [self._completion(row) for row in rows])

    def observe(self, groups: list[Group]) -> None:
        """Samples are not remembered."""

    def state(self) -> dict[str, Any]:
        """Nothing: every seed is derived."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.autocast)

    def _models(self) -> list[PreTrainedModel]:
        """Those whose passes make a sample."""
        return [self.model]

    def _begin(self, rows: Sequence[Row], sampling: Sampling) -> Decoding:
        """A decoding of these rows whose logits, at a row's temperature, are the distribution to sample from."""
        front = places_for_copies([len(row.asked.prompt) for row in rows])
        return self._decoding(self.model, lambda row: row.asked.prompt, front, sampling.max_tokens, self.autocast)

    def _temperature(self, sampling: Sampling) -> float:
        """What the logits of `_begin` are divided by."""
        return sampling.temperature

    def _decode(self, rows: list[Row], sampling: Sampling) -> Iterator[list[Row]]:
        """Completes `rows`, as many at a time as fit; yields those that finished, after each step with any.

        Longest prompts come first: little padding, and memory peaks early.
        """
        if not rows:
            return
        decoding = self._begin(rows, sampling)
        waiting = deque(sorted(rows, key=lambda row: len(row.asked.prompt), reverse=True))
        present: list[Row] = []  # in the order of the decoding
        full = 0  # rows after the last ones joined
        while waiting or present:
            if waiting and (not present or (decoding.flexible and len(present) <= (1 - _FREE) * full)):
                joining = self._fitting(decoding, present, waiting)
                if joining:
                    decoding.join(joining)
                    present += joining
                    full = len(present)
            growing = [row for row in present if row.finish is None]
            tokens = self._sample(decoding.logits, present, sampling)
            if finished := [row for row in growing if row.finish is not None]:
                yield finished
            alive = [index for index, row in enumerate(present) if row.finish is None]
            # Where a finished row has to be copied away from, it is cheaper to read it on until half of them have.
            if len(alive) < len(present) and (decoding.flexible or 2 * len(alive) <= len(present)):
                order = _without_gaps(alive)
                decoding.keep(order)
                present = [present[index] for index in order]
                tokens = tokens[order]
            if present:
                decoding.step(tokens)

    def _fitting(self, decoding: Decoding, present: list[Row], waiting: deque[Row]) -> list[Row]:
        """The next of the waiting rows that fit beside those present; at least one where there are none."""

        def size(count: int) -> int:
            return decoding.bytes([*present, *islice(waiting, count)])

        # Doubling first: of thousands that wait, those alone are looked at that may fit.
        most = 1
        while most < len(waiting) and size(most) <= self.cache_bytes:
            most *= 2
        fitting = bisect_right(range(1, min(most, len(waiting)) + 1), self.cache_bytes, key=size)
        return [waiting.popleft() for _ in range(fitting or (not present))]

    def _sample(self, logits: torch.Tensor, rows: list[Row], sampling: Sampling) -> torch.Tensor:
        """Adds a token to every row that has not finished; (R,) tokens, whatever they are of the others."""
        device = logits.device
        greedy = torch.tensor([row.asked.greedy for row in rows], device=device)
        temperature = torch.where(greedy, 1.0, self._temperature(sampling))
        uniforms = torch.tensor([_uniform(row.draw) for row in rows], dtype=torch.float64, device=device)
        tokens, logps = sample_tokens(logits.float(), temperature, greedy, uniforms)
        for row, token, logp in zip(rows, tokens.tolist(), logps.tolist(), strict=True):
            if row.finish is None:
                self._append(row, token, logp, sampling)
        return tokens

    def _append(self, row: Row, token: int, logp: float, sampling: Sampling) -> None:
        """Adds a token to a row, and finishes the row where it is the last one."""
        row.tokens.append(token)
        row.logps.append(logp)
        if token in self.end_ids:
            row.finish, row.text = "eos", self._text(row.tokens[:-1])
        elif (text := self._text_before_stop(row.tokens, sampling.stop)) is not None:
            row.finish, row.text = "stop_string", text
        elif len(row.tokens) == sampling.max_tokens:
            row.finish, row.text = "length", self._text(row.tokens)

    def _text_before_stop(self, tokens: list[int], stop: Sequence[str]) -> str | None:
        """The text before the stop string that the last of `tokens` completes; None where it completes none.

        Only a tail is decoded per token: a stop string spans at most as many tokens as it has bytes.
        """
        if not stop:
            return None
        window = max(len(string.encode()) for string in stop) + _STOP_SLACK
        tail = self._text(tokens[-window:])
        if not any(string in tail for string in stop):
            return None
        text = self._text(tokens)
        found = [position for string in stop if (position := text.find(string)) >= 0]
        return text[: min(found)] if found else None

    def _text(self, tokens: list[int]) -> str:
        # Tags such as <think> may be registered as special tokens: graders must see them.
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _completion(self, row: Row) -> Completion:
        assert row.finish is not None
        return Completion(
            tokens=row.tokens,
            text=row.text,
            finish=row.finish,
            logps=row.logps,
            source=row.asked.request.source,
            context=row.asked.request.context,
            learn=row.asked.request.learn,
            weights_version=self.weights_version,
            greedy=row.asked.greedy,
        )


def _uniform(draw: np.random.PCG64) -> float:
    """What a numpy Generator makes of these bits; to build one for every row takes as long as to seed it."""
    return (draw.random_raw() >> 11) * 2.0**-53


def _without_gaps(alive: list[int]) -> list[int]:
    """These indices, ascending, in an order that moves few: those beyond their number go where others are missing."""
    beyond = [index for index in alive if index >= len(alive)]
    stays = set(alive)
    return [index if index in stays else beyond.pop() for index in range(len(alive))]


def end_ids(*named: Any) -> frozenset[int]:
    """Every id that ends a completion: each `eos_token_id` of a tokenizer and a model's configurations (None: absent)."""
    return frozenset(id for one in named for id in _as_ids(getattr(one, "eos_token_id", None)))


def _as_ids(ids: int | Sequence[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
