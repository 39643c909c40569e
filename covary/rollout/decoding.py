"""What a model's next tokens are, row by row as the rows grow: forward passes and their cache, no sampling.

`SharedDecoding` is for every model that attends as a layout says: a prompt is read once however many rows continue it,
its keys and values exist once, and rows join and leave at any time. `CachedDecoding` is for the others: every row has its
own copy of its prompt's cache, and no row joins late. Letters in shapes: R rows, P distinct prompts, W the longest, V
vocabulary, K heads of keys and values, E their width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from covary.attention import Forest, packed_inputs, use_packed
from covary.rollout.lean import lean
from covary.rollout.linear import good_rows
from covary.rollout.requests import Asked
from covary.rollout.steps import Cache, CopiedPrompts, SharedPrompts, Step
from covary.types import Example, Finish, Request

if TYPE_CHECKING:  # transformers takes seconds to import, in which `covary check` has other work to do
    from transformers import PreTrainedModel

# Memory of sampling per vocabulary entry: the model's logits, a float32 copy, their exponentials.
_SAMPLING_BYTES = 12
# Packed prompt tokens of one forward pass: bounds its activations.
_PREFILL_TOKENS = 2**13
# Tokens of all rows' prompts, padded, up to which every row has a copy of its own (benchmarks/decode_attention.py).
_COPIED_TOKENS = 2**12


@dataclass
class Row:
    """A completion in the making."""

    asked: Asked
    draw: np.random.PCG64
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: Finish | None = None
    text: str = ""


class Decoding(Protocol):
    """Reads rows as they grow."""

    flexible: bool
    """Whether rows may join when others have begun, and leave at little cost."""

    @property
    def logits(self) -> Tensor:
        """(R, V) after the last token of every row; not to be read between `keep` and `step`."""
        ...

    def bytes(self, rows: Sequence[Row]) -> int:
        """Memory that these rows need together, at their longest."""
        ...

    def join(self, rows: Sequence[Row]) -> None:
        """Read the prompts of rows, which come after those that are there."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with the rows of these indices alone, in this order."""
        ...

    def step(self, tokens: Tensor) -> None:
        """Read one more token per row, (R,)."""
        ...


Prompt = Callable[[Row], tuple[int, ...]]
"""Which prompt a model reads before a row."""


def decoding_of(model: PreTrainedModel) -> tuple[type[SharedDecoding] | type[CachedDecoding], str | None]:
    """The decoding that a model takes: with shared prompts, if that gives the logits of a plain forward pass; or why not."""
    with evaluating(model):
        why = use_packed(model, _difference)
    return (SharedDecoding if why is None else CachedDecoding), why


def places_for_copies(prompts: Sequence[int]) -> int:
    """In front of every row's own tokens, from the lengths of all rows' prompts; 0 where copies would be too large."""
    longest = max(prompts)
    return longest if len(prompts) * longest <= _COPIED_TOKENS else 0


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode within, and every module's own mode again after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def model_bytes(model: PreTrainedModel, autocast: torch.dtype | None) -> tuple[int, int]:
    """Memory of a row in one model: keys and values per token; logits and their copies beside that."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = (autocast or model.dtype).itemsize
    return 2 * config.num_hidden_layers * heads * head_dim * itemsize, _SAMPLING_BYTES * config.vocab_size


class SharedDecoding:
    """Every row's newest token, as one packed sequence; a layout of `covary/attention.py`.

    A prompt is read once. What its rows then see of it is said in `steps.py`: its keys, or where it is short a copy.
    """

    flexible = True

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        front: int,
        max_tokens: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        """No rows yet.

        Args:
            model: a transformers causal language model for which `decoding_of` gives this class.
            prompt: of a row, as this model reads it.
            front: places before a row's own tokens, for a copy of its prompt (`places_for_copies`); 0 where rows share it.
            max_tokens: of a completion, at most.
            autocast: compute type of the passes, for `bytes`; None for the model's own.
        """
        self.model = model
        self.logits = torch.empty(0)
        self._lean = lean(model)
        self._prompt = prompt
        self._front = front
        self._max_tokens = max_tokens
        self._bytes = model_bytes(model, autocast)
        self._dtype = autocast  # what is cached in another type would be cast by every step
        self._caches: dict[nn.Module, Cache] = {}
        self._slots = 0  # rows that the caches have room for
        self._prompts: list[tuple[int, ...]] = []
        self._after = torch.empty(0)  # (P, V), logits after each prompt
        self._tree: list[int] = []  # the prompt of each row
        self._read: list[int] = []  # tokens of its completion that each row has read
        self._prefill: tuple[Forest, dict[nn.Module, list[tuple[Tensor, Tensor]]]] | None = None
        self._step: Step | None = None
        self._newest: tuple[Any, ...] = ()  # where the newest token of each row lies in the caches

    def bytes(self, rows: Sequence[Row]) -> int:
        """See `Decoding`."""
        prompts = {self._prompt(row) for row in rows}
        slots = max(self._slots, len(rows))
        tokens = slots * (self._front + self._max_tokens) + len(prompts) * max(map(len, prompts), default=0)
        return self._bytes[0] * tokens + self._bytes[1] * len(rows)

    def join(self, rows: Sequence[Row]) -> None:
        """See `Decoding`."""
        self._keep_prompts()
        prompts = [self._prompt(row) for row in rows]
        known = {prompt: index for index, prompt in enumerate(self._prompts)}
        self._read_prompts([prompt for prompt in dict.fromkeys(prompts) if prompt not in known])
        known = {prompt: index for index, prompt in enumerate(self._prompts)}
        new = [known[prompt] for prompt in prompts]
        of_new = torch.tensor(new, device=self._after.device)
        after = self._after[of_new]
        self.logits = torch.cat([self.logits, after]) if self._tree else after
        first, end = len(self._tree), len(self._tree) + len(new)
        self._make_room(end)
        for cache in self._caches.values():
            for of_prompts, of_rows in ((cache.prompt_key, cache.key), (cache.prompt_value, cache.value)):
                # What is not read yet has weight 0, and 0 times what lay there before may be NaN.
                of_rows[first:end, :, of_prompts.shape[2] if self._front else 0 :] = 0
                if self._front:
                    of_rows[first:end, :, : of_prompts.shape[2]] = of_prompts[of_new]
        self._tree += new
        self._read += [0] * len(new)

    def keep(self, rows: Sequence[int]) -> None:
        """See `Decoding`. Costs a copy of the rows whose place changes."""
        new = [place for place, row in enumerate(rows) if place != row]
        if new:
            old, read = [rows[place] for place in new], self._front + max(self._read)
            for cache in self._caches.values():
                for of_rows in (cache.key, cache.value):
                    of_rows[new, :, :read] = of_rows[old, :, :read]
        self._tree = [self._tree[row] for row in rows]
        self._read = [self._read[row] for row in rows]
        if 2 * len(set(self._tree)) <= len(self._prompts):
            self._keep_prompts()

    def step(self, tokens: Tensor) -> None:
        """See `Decoding`."""
        device, rows = self.model.device, len(self._tree)
        given = (self._tree, self._read, [len(prompt) for prompt in self._prompts])
        if self._front:
            self._step = CopiedPrompts.of(*given, self._front, device)
        else:
            self._step = SharedPrompts.of(*given, device)
        if len(set(self._read)) == 1:  # as long as none has joined later: a slice is written faster
            self._newest = (slice(rows), slice(None), self._front + self._read[0])
        else:
            places = torch.tensor(self._read, device=device) + self._front
            self._newest = (torch.arange(rows, device=device), slice(None), places)
        more = (0, good_rows(rows) - rows)  # padded once, and not in every product
        tokens, positions = pad(tokens.to(device), more), pad(self._step.position, more)
        self.logits = self._forward(tokens, positions)[:rows]
        self._step = None
        self._read = [read + 1 for read in self._read]

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """See `covary.attention.Layout.attend`."""
        query, key, value = (x if self._dtype is None else x.to(self._dtype) for x in (query, key, value))
        if self._prefill is not None:
            forest, blocks = self._prefill
            keys, values = (forest.prompts.unpack(x).transpose(1, 2) for x in (key, value))
            blocks[layer].append((keys, values))
            return forest.attend(layer, query, key, value, scale, window)
        assert self._step is not None
        rows, cache = len(self._tree), self._caches[layer]
        cache.key[self._newest], cache.value[self._newest] = key[:rows], value[:rows]
        out = self._step.attend(cache, query[:rows], scale, window)
        return out if rows == len(query) else pad(out, (0, 0, 0, 0, 0, len(query) - rows))

    def _make_room(self, rows: int) -> None:
        if rows <= self._slots:
            return
        for cache in self._caches.values():
            cache.key, cache.value = (_grown(of_rows, rows) for of_rows in (cache.key, cache.value))
        self._slots = rows

    def _read_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Their keys, values and last logits join those of the prompts that are there."""
        device = self.model.device
        blocks: dict[nn.Module, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for layer, cache in self._caches.items():
            blocks[layer].append((cache.prompt_key, cache.prompt_value))
        after = [self._after] if self._prompts else []
        for part in _parts(prompts, _PREFILL_TOKENS):
            lengths = [len(prompt) for prompt in part]
            self._prefill = (Forest.of(lengths, [], [], device), blocks)
            ends = self._prefill[0].prompts.lengths.cumsum(0) - 1
            tokens = torch.tensor([token for prompt in part for token in prompt], device=device)
            positions = torch.tensor([i for length in lengths for i in range(length)], device=device)
            after.append(self._forward(tokens, positions, ends))
        self._prefill = None
        if after:
            self._after = torch.cat(after)
        self._prompts += prompts
        for layer, found in blocks.items():
            key, value = (_stack(both) for both in zip(*found, strict=True))
            if layer in self._caches:
                self._caches[layer].prompt_key, self._caches[layer].prompt_value = key, value
            else:
                self._caches[layer] = Cache(key, value, self._no_rows(key), self._no_rows(value))

    def _no_rows(self, of_prompts: Tensor) -> Tensor:
        """A cache of rows, as yet without any."""
        _, kv, _, width = of_prompts.shape
        return of_prompts.new_empty(self._slots, kv, self._front + self._max_tokens - 1, width)

    def _keep_prompts(self) -> None:
        """Forget prompts that no row reads, but the newest: rows that come may continue it."""
        used = sorted({*self._tree, len(self._prompts) - 1} - {-1})
        if len(used) == len(self._prompts):
            return
        place = {old: new for new, old in enumerate(used)}
        self._tree = [place[tree] for tree in self._tree]
        self._prompts = [self._prompts[old] for old in used]
        index = torch.tensor(used, device=self._after.device, dtype=torch.long)
        self._after = self._after[index]
        width = max(map(len, self._prompts), default=0)
        for cache in self._caches.values():
            cache.prompt_key, cache.prompt_value = (
                block[:, :, :width][index] for block in (cache.prompt_key, cache.prompt_value)
            )

    def _forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Logits after all tokens, or after those wanted."""
        if self._lean is not None:
            return self._lean(tokens, positions, self, slice(None) if wanted is None else wanted)
        inputs = packed_inputs(tokens, positions, self.model.device)
        return self.model(**inputs, layout=self, logits_to_keep=0 if wanted is None else wanted).logits[0]


def _parts(prompts: Sequence[tuple[int, ...]], limit: int) -> Iterator[list[tuple[int, ...]]]:
    """In order, as many at a time as have `limit` tokens together; at least one."""
    part: list[tuple[int, ...]] = []
    for prompt in prompts:
        if part and sum(map(len, part)) + len(prompt) > limit:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part


def _grown(of_rows: Tensor, rows: int) -> Tensor:
    """A cache with room for more rows."""
    grown = of_rows.new_empty(rows, *of_rows.shape[1:])
    grown[: len(of_rows)] = of_rows
    return grown


def _stack(blocks: Sequence[Tensor]) -> Tensor:
    """(P, K, W, E) of blocks with fewer prompts each, the shorter ones padded."""
    width = max(block.shape[2] for block in blocks)
    return torch.cat([pad(block, (0, 0, 0, width - block.shape[2])) for block in blocks])


class CachedDecoding:
    """A model with the cache of transformers, whatever its layers keep there."""

    flexible = False

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        front: int,
        max_tokens: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        """No rows yet; arguments as of `SharedDecoding`, but any model. `front` is not read."""
        self.model = model
        self.logits = torch.empty(0)
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._bytes = model_bytes(model, autocast)

    def bytes(self, rows: Sequence[Row]) -> int:
        """See `Decoding`."""
        longest = max((len(self._prompt(row)) for row in rows), default=0)
        return len(rows) * (self._bytes[0] * (longest + self._max_tokens) + self._bytes[1])

    def join(self, rows: Sequence[Row]) -> None:
        """See `Decoding`. Rows that were there are forgotten."""
        from transformers import DynamicCache

        device = self.model.device
        self._cache = DynamicCache(config=self.model.config)
        prompts = [self._prompt(row) for row in rows]
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        self._columns = width = max(map(len, distinct))
        # Left padding: the last column is every prompt's last token. Id 0 stands for it, masked out.
        padded = [(0,) * (width - len(prompt)) + prompt for prompt in distinct]
        tokens = torch.tensor(padded, device=device)  # (P, W)
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=device)  # (P,)
        mask = tokens.new_ones(len(distinct), width + self._max_tokens)
        mask[:, :width] = torch.arange(width, device=device) >= width - lengths[:, None]
        self._mask, self._lengths = mask, lengths
        # Padding is no part of the sequence: positions count real tokens.
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(tokens, positions)
        of_row = [distinct[prompt] for prompt in prompts]
        self.keep(of_row)
        self.logits = logits[torch.tensor(of_row, device=device)]

    def keep(self, rows: Sequence[int]) -> None:
        """See `Decoding`. Costs a copy of the cache."""
        index = torch.tensor(rows, device=self.model.device, dtype=torch.long)
        self._mask, self._lengths = self._mask[index], self._lengths[index]
        self._cache.batch_select_indices(index)

    def step(self, tokens: Tensor) -> None:
        """See `Decoding`."""
        tokens, positions = tokens.to(self.model.device)[:, None], self._lengths[:, None]
        self._columns += 1
        self._lengths = self._lengths + 1
        self.logits = self._forward(tokens, positions)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (rows, V) after the last of `tokens` (rows, n); their keys and values join the cache."""
        return self.model(
            input_ids=tokens,
            attention_mask=self._mask[:, : self._columns],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{_cache_argument(): self._cache},
        ).logits[:, -1]


def _cache_argument() -> str:
    """What a model calls its cache: renamed in transformers 5.24, and an unknown name is passed over without a word."""
    from transformers import __version__

    return "cache" if tuple(map(int, __version__.split(".")[:2])) >= (5, 24) else "past_key_values"


def _difference(model: PreTrainedModel) -> float:
    """Root mean square difference of the logits of decoded and of plainly read rows, relative, with prompts shared or copied."""
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportCallIssue]

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    prompts, steps = [ids(5), ids(3)], 3
    rows = [
        Row(Asked(Example("", ""), {"prompt": prompts[tree]}, Request(1), 0), np.random.PCG64(0)) for tree in (0, 1, 0)
    ]
    for row in rows:
        row.tokens += ids(steps)
    expected = [
        model(input_ids=torch.tensor([[*row.asked.prompt, *row.tokens]], device=model.device), use_cache=False).logits[
            0, -1
        ]
        for row in rows
    ]
    plain = torch.stack(expected).double()
    return max(
        float((_decoded(model, rows, front).double() - plain).norm() / plain.norm())
        for front in (0, max(map(len, prompts)))
    )


def _decoded(model: PreTrainedModel, rows: Sequence[Row], front: int) -> Tensor:
    """Logits after the last token of rows that are as long as each other."""
    decoding = SharedDecoding(model, lambda row: row.asked.prompt, front, len(rows[0].tokens) + 1)
    decoding.join(rows)
    for tokens in zip(*(row.tokens for row in rows), strict=True):
        decoding.step(torch.tensor(tokens))
    return decoding.logits
