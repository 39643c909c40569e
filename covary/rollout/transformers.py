"""Rollouts from a Hugging Face causal language model, in the process and with the weights of the trainer.

One decode loop, so that what is sampled is exactly the policy that the loss differentiates: nothing is
read from the checkpoint's generation defaults but the end ids. Letters in shapes: R rows (completions
being decoded), P distinct prompts, W the longest prompt, V the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from covary.seeding import derive_seed
from covary.types import Completion, Finish, Group, Request, Sampling, Source, UserError

if TYPE_CHECKING:  # transformers takes seconds to import, in which `covary check` has other work to do
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Vocabulary entries per bin of the two-level inverse CDF: a running sum over V costs more than all the
# rest of sampling, sums over bins cost next to nothing.
_BIN = 256
# Memory of sampling per vocabulary entry: the model's logits, a float32 copy, their exponentials.
_SAMPLING_BYTES = 12
# Tokens decoded beyond a stop string's own, so that its first character is not the window's first,
# which decoders change (stripped space, incomplete UTF-8).
_STOP_SLACK = 4


@dataclass
class Row:
    """A completion in the making."""

    contexts: Mapping[str, Sequence[int]]
    request: Request
    seed: int
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: Finish | None = None
    text: str = ""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids of the prompt under its context."""
        return tuple(self.contexts[self.request.context])

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.request.decoding == "greedy"


class Reads(Protocol):
    """What reads rows as they grow: `Decoding`, or a mixture of two."""

    @property
    def logits(self) -> torch.Tensor:
        """(R, V) after the last token of every row."""
        ...

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with the rows of these indices alone."""
        ...

    def step(self, tokens: torch.Tensor) -> None:
        """Read one more token per row, (R,)."""
        ...


class Decoding:
    """A model that reads rows as they grow, with its own cache.

    Attributes:
        logits: (R, V) after the last token of every row.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
        """Reads one prompt per row, equal ones once."""
        from transformers import DynamicCache

        self.model = model
        device = model.device
        self._cache = DynamicCache(config=model.config)
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        self._read = width = max(map(len, distinct))  # columns
        # Left padding: the last column is every prompt's last token. Id 0 stands for it, masked out.
        padded = [(0,) * (width - len(prompt)) + prompt for prompt in distinct]
        tokens = torch.tensor(padded, device=device)  # (P, W)
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=device)  # (P,)
        mask = tokens.new_ones(len(distinct), width + max_tokens)
        mask[:, :width] = torch.arange(width, device=device) >= width - lengths[:, None]
        self._mask, self._lengths = mask, lengths
        # Padding is no part of the sequence: positions count real tokens.
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        self.logits = self._forward(tokens, positions)
        # A row's prompt was computed once; from here on every row has its own copy of keys and values.
        self.keep(torch.tensor([distinct[prompt] for prompt in prompts], device=device))

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with the rows of these indices alone."""
        rows = rows.to(self.model.device)
        self.logits, self._mask, self._lengths = self.logits[rows], self._mask[rows], self._lengths[rows]
        self._cache.batch_select_indices(rows)

    def step(self, tokens: torch.Tensor) -> None:
        """Read one more token per row, (R,)."""
        tokens, positions = tokens.to(self.model.device)[:, None], self._lengths[:, None]
        self._read += 1
        self._lengths = self._lengths + 1
        self.logits = self._forward(tokens, positions)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits (rows, V) after the last of `tokens` (rows, n); their keys and values join the cache."""
        return self.model(
            input_ids=tokens,
            attention_mask=self._mask[:, : self._read],
            position_ids=positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


class TransformersRollout:
    """Samples completions with their log-probs, one uniform number per row and step.

    The uniforms of a row depend on (seed, example id, index of the row among the completions of that
    example) and on nothing else, so samples do not depend on the composition or the order of batches
    (up to float rounding of the model's logits).

    Attributes:
        end_ids: every id that ends a completion, of the tokenizer and of the model's two configs.
        on_progress: called with (rows finished, rows in all) whenever rows finish.
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
        self._check(plans, groups, sampling)
        index: Counter[str] = Counter()
        rows: list[Row] = []
        for group, requests in zip(groups, plans, strict=True):
            name = group.example.id
            for request in requests:
                for _ in range(request.count):
                    rows.append(Row(group.contexts, request, derive_seed(seed, name, index[name])))
                    index[name] += 1
        # no_grad, not inference_mode: tensors that the model keeps from a pass must stay fit for training.
        # One autocast around all passes: its cache then casts the weights once.
        with torch.no_grad(), _evaluating(self.model), self._autocast():
            finished = 0
            for wave in self._waves(rows, sampling.max_tokens):
                for newly in self._decode(wave, sampling):
                    finished += newly
                    if self.on_progress is not None:
                        self.on_progress(finished, len(rows))
        done = iter(rows)
        return [
            Group(
                example=group.example,
                contexts=group.contexts,
                completions=[self._completion(row) for row in islice(done, sum(request.count for request in requests))],
                answer_tokens=group.answer_tokens,
            )
            for group, requests in zip(groups, plans, strict=True)
        ]

    def observe(self, groups: list[Group]) -> None:
        """Samples are not remembered."""

    def state(self) -> dict[str, Any]:
        """Nothing: every seed is derived."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def _check(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling) -> None:
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens is {sampling.max_tokens}, it must be at least 1")
        limit = getattr(self._config, "max_position_embeddings", None)
        for group, requests in zip(groups, plans, strict=True):
            for request in requests:
                where = f"example {group.example.id!r}, context {request.context!r}"
                if request.source != self.source:
                    raise ValueError(
                        f"{where}: source {request.source!r} requested, but this engine samples the {self.source} only"
                    )
                if request.decoding == "sample" and not sampling.temperature > 0:
                    raise ValueError(f"temperature is {sampling.temperature}, sampling needs one above 0")
                if request.context not in group.contexts:
                    raise ValueError(f"{where} is not one of {sorted(group.contexts)}")
                length = len(group.contexts[request.context])
                if length == 0:
                    raise UserError(f"{where}: the prompt has no tokens, it needs at least one")
                if limit is not None and length + sampling.max_tokens > limit:
                    raise UserError(
                        f"{where}: a prompt of {length} tokens and max_tokens = {sampling.max_tokens} "
                        f"exceed the model's context of {limit} tokens"
                    )

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.autocast)

    def _waves(self, rows: list[Row], max_tokens: int) -> Iterator[list[Row]]:
        """Splits rows into batches within `cache_bytes`, longest prompts first (little padding, memory peaks early)."""
        token_bytes, sampling_bytes = self._row_bytes()
        ordered = sorted(rows, key=lambda row: len(row.prompt), reverse=True)
        start = 0
        while start < len(ordered):
            length = len(ordered[start].prompt) + max_tokens
            row_bytes = token_bytes * length + sampling_bytes
            stop = start + max(1, self.cache_bytes // row_bytes)
            yield ordered[start:stop]
            start = stop

    def _row_bytes(self) -> tuple[int, int]:
        """Memory of a row: per token of its prompt and completion, and beside that."""
        return model_bytes(self.model, self.autocast)

    def _begin(self, rows: list[Row], sampling: Sampling) -> Reads:
        """A decoding of `rows` whose logits, at the row's temperature, are the distribution to sample from."""
        return Decoding(self.model, [row.prompt for row in rows], sampling.max_tokens)

    def _temperature(self, sampling: Sampling) -> float:
        """What the logits of `_begin` are divided by."""
        return sampling.temperature

    def _decode(self, rows: list[Row], sampling: Sampling) -> Iterator[int]:
        """Completes `rows` as one batch; yields the number of rows that finished, after each step with any."""
        device = self.model.device
        decoding = self._begin(rows, sampling)
        greedy = torch.tensor([row.greedy for row in rows], device=device)
        temperature = torch.where(greedy, 1.0, self._temperature(sampling))
        uniforms = torch.from_numpy(np.stack([_uniforms(row.seed, sampling.max_tokens) for row in rows])).to(
            device
        )  # (R, max_tokens)

        for step in range(sampling.max_tokens):
            chosen, logps = sample_tokens(decoding.logits.float(), temperature, greedy, uniforms[:, step])
            newly = 0
            for row, token, logp in zip(rows, chosen.tolist(), logps.tolist(), strict=True):
                if row.finish is None:
                    self._append(row, token, logp, sampling)
                    newly += row.finish is not None
            if newly:
                yield newly
            alive = [index for index, row in enumerate(rows) if row.finish is None]
            if not alive:
                return
            # Finished rows cost a forward pass each, removing them costs a copy of the cache.
            if 2 * len(alive) <= len(rows):
                rows = [rows[index] for index in alive]
                keep = torch.tensor(alive, device=device)
                decoding.keep(keep)
                chosen = chosen[keep]
                greedy, temperature, uniforms = greedy[keep], temperature[keep], uniforms[keep]
            decoding.step(chosen)

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
            source=row.request.source,
            context=row.request.context,
            learn=row.request.learn,
            weights_version=self.weights_version,
            greedy=row.greedy,
        )


def model_bytes(model: PreTrainedModel, autocast: torch.dtype | None) -> tuple[int, int]:
    """Memory of a row in one model: keys and values per token; logits and their copies beside that."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = (autocast or model.dtype).itemsize
    return 2 * config.num_hidden_layers * heads * head_dim * itemsize, _SAMPLING_BYTES * config.vocab_size


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, greedy: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row from softmax(logits / temperature), by the inverse CDF at one uniform number.

    Args:
        logits: (R, V), float32; -inf excludes a token for certain.
        temperature: (R,), positive; divides greedy rows' logits too, so pass 1 there.
        greedy: (R,), bool: rows that take the most likely token instead.
        uniforms: (R,), float64, in [0, 1).

    Returns:
        Tokens (R,) and their log-probs (R,) in nats.
    """
    rows, vocabulary = logits.shape
    num_bins = -(-vocabulary // _BIN)
    top = logits.amax(-1, keepdim=True)
    weights = logits.new_empty(rows, num_bins * _BIN)
    torch.sub(logits, top, out=weights[:, :vocabulary]).div_(temperature[:, None]).exp_()
    weights[:, vocabulary:] = 0
    binned = weights.view(rows, num_bins, _BIN)
    totals = binned.sum(-1)  # (R, bins)
    bins, rest = _inverse_cdf(totals, uniforms)
    row = torch.arange(rows, device=logits.device)
    inner, _ = _inverse_cdf(binned[row, bins], rest)
    tokens = bins * _BIN + inner
    # Where rounding led to a token of probability zero, the most likely one is a choice the policy can make.
    most_likely = greedy | ~(weights[row, tokens] > 0)
    if most_likely.any():
        tokens[most_likely] = logits[most_likely].argmax(-1)
    shifted = (logits[row, tokens] - top[:, 0]) / temperature
    return tokens, shifted - totals.sum(-1).log()


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row, the index (R,) of `weights` (R, n) into which `uniforms` (R,) falls, and how far into it, in [0, 1]."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    target = (uniforms * cdf[:, -1])[:, None]
    index = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index)
    rest = (target - (cdf.gather(-1, index) - weight)) / weight
    return index[:, 0], rest[:, 0].clamp(0, 1)


def _uniforms(seed: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).random(count)


def end_ids(*named: Any) -> frozenset[int]:
    """Every id that ends a completion: each `eos_token_id` of a tokenizer and a model's configurations (None: absent)."""
    return frozenset(id for one in named for id in _as_ids(getattr(one, "eos_token_id", None)))


def _as_ids(ids: int | Sequence[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode within, and every module's own mode again after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
