"""Hidden states -> numbers per token, a chunk of the vocabulary projection at a time.

No (tokens x vocabulary) tensor outlives a chunk. There are three ways to the same numbers and gradients:

* log-prob, probability and entropy of one stream (what most methods train on) have a backward written by hand;
* any quantity behind projections that are not trained (LoRA) leaves the forward pass with its gradient in the hidden
  states, which is small, so the backward pass projects nothing;
* everything else recomputes each chunk's logits in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from covary.quantities import entropy, logp, prob

CHUNK_NUMBERS = 2**24
"""Logits per chunk and stream (64 MB in float32)."""
BLOCK_ROWS = 2**12
"""Tokens per block of logits where a block need not hold the whole vocabulary: products of many rows are faster."""
BLOCK_NUMBERS = {"cpu": 2**22}
"""Logits per block, elsewhere as many as per chunk. On a CPU the C library keeps what is freed for the next block up to 32 MB; beyond that every block
would be given new pages, which takes longer than to fill them."""

_LOWEST = torch.finfo(torch.float32).min / 4  # stands for -inf where that would be multiplied with 0

Quantity = Callable[..., Tensor]


def project(model: nn.Module, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
    """Float32 next-token logits of final hidden states, as the model's own forward pass gives them."""
    logits = model.get_output_embeddings()(hidden).float()  # pyright: ignore[reportCallIssue]
    softcap = _softcap(model)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def score_hidden(
    models: Sequence[nn.Module],
    hidden: Sequence[Float[Tensor, "N D"]],
    tokens: Int[Tensor, " N"],
    quantities: Sequence[Quantity],
    temperature: float,
) -> Float[Tensor, "Q N"]:
    """Every quantity of the next-token distributions of one or two streams, in nats, float32.

    Args:
        models: one per stream; their output projections are used.
        hidden: one per stream, final hidden states that predict `tokens` (widths may differ).
        tokens: the tokens that were chosen.
        quantities: functions of `covary.quantities`, all over the same streams.
        temperature: divides the logits of every stream.
    """
    if not tokens.numel():
        return torch.zeros(len(quantities), 0, device=tokens.device)
    if len(models) == 1 and _is_linear(models[0]) and {*quantities} <= {logp, prob, entropy}:
        head = models[0].get_output_embeddings()  # pyright: ignore[reportCallIssue]
        if not torch.is_grad_enabled() or head.weight.requires_grad:
            return _of_one_stream(head, hidden[0], tokens, quantities, temperature)
    chunk = partial(_score_chunk, models, quantities, temperature)
    if torch.is_grad_enabled():
        trained = any(p.requires_grad for model in models for p in model.get_output_embeddings().parameters())  # pyright: ignore[reportCallIssue]
        chunk = (
            partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
            if trained
            else partial(_OfFrozenProjections.apply, chunk)
        )
    vocabulary = max(model.get_output_embeddings().weight.shape[0] for model in models)  # pyright: ignore[reportCallIssue]
    parts = [
        chunk(tokens[rows], *(h[rows] for h in hidden)) for rows in _slices(len(tokens), CHUNK_NUMBERS // vocabulary)
    ]
    return torch.cat(parts, dim=1)


def _score_chunk(
    models: Sequence[nn.Module], quantities: Sequence[Quantity], temperature: float, tokens: Tensor, *hidden: Tensor
) -> Tensor:
    logits = [project(model, h) / temperature for model, h in zip(models, hidden, strict=True)]
    # Of two vocabularies of one tokenizer the longer is padded: distributions are compared over what both have.
    width = min(each.shape[-1] for each in logits)
    logps = [
        torch.log_softmax(each[:, :width], dim=-1).to(tokens.device) for each in logits
    ]  # a teacher may lie elsewhere
    return torch.stack([quantity(*logps, tokens) for quantity in quantities])


class _OfFrozenProjections(torch.autograd.Function):
    """A chunk of quantities of which only the hidden states take gradients.

    A quantity of a token depends on that token's states alone, so its gradient, (N, D), is known in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Callable[..., Tensor], tokens: Tensor, *hidden: Tensor) -> Tensor:
        leaves = [h.detach().requires_grad_(h.requires_grad) for h in hidden]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            values = chunk(tokens, *leaves)
            slopes = [
                torch.autograd.grad(value.sum(), wanted, retain_graph=True, allow_unused=True) if wanted else ()
                for value in values
            ]
        ctx.wanted = [leaf.requires_grad for leaf in leaves]
        ctx.slopes = slopes
        return values.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        of_wanted = iter(
            _total(
                [
                    (weight.to(slope.device)[:, None] * slope)
                    for weight, slope in zip(outer, slopes, strict=True)
                    if slope is not None
                ]
            )
            for slopes in zip(*ctx.slopes, strict=True)
        )
        return (None, None, *(next(of_wanted) if wanted else None for wanted in ctx.wanted))


def _total(terms: Sequence[Tensor]) -> Tensor | None:
    return torch.stack(list(terms)).sum(0) if terms else None


def _of_one_stream(
    head: nn.Linear, hidden: Tensor, tokens: Tensor, quantities: Sequence[Quantity], temperature: float
) -> Float[Tensor, "Q N"]:
    logps, entropies = _LinearLogps.apply(hidden, head.weight, head.bias, tokens, temperature, entropy in quantities)  # pyright: ignore[reportGeneralTypeIssues]
    found = {logp: lambda: logps, prob: logps.exp, entropy: lambda: entropies}
    return torch.stack([found[quantity]() for quantity in quantities])


class _LinearLogps(torch.autograd.Function):
    """Log-prob of tokens and entropy of softmax((hidden @ weight.T + bias) / temperature), block by block of logits.

    A block is some tokens by some of the vocabulary: the forward pass keeps the running log-sum-exp, and the backward
    pass computes p once more. d logp / d logits = 1[token] - p; d entropy / d logits = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "N D"],
        weight: Float[Tensor, "V D"],
        bias: Float[Tensor, " V"] | None,
        tokens: Int[Tensor, " N"],
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        blocks = _Blocks(hidden, weight, bias, temperature)
        log_sum = hidden.new_empty(len(hidden), dtype=torch.float32)
        chosen, expected = torch.zeros_like(log_sum), torch.zeros_like(log_sum)  # E[log p]
        for rows in blocks.rows:
            count = rows.stop - rows.start
            top = log_sum.new_full((count,), -torch.inf)
            total, moment = torch.zeros_like(top), torch.zeros_like(top)  # of exp(logit - top), and times logit - top
            token = tokens[rows]
            for columns in blocks.columns:
                logits = blocks.logits(rows, columns)
                inside = (token >= columns.start) & (token < columns.stop)
                place = torch.where(inside, token - columns.start, 0)
                chosen[rows] += torch.where(inside, logits.gather(1, place[:, None])[:, 0], 0.0)
                higher = torch.maximum(top, logits.amax(-1)).clamp_(min=_LOWEST)  # a block may be impossible as a whole
                fewer = (top - higher).exp()  # 0 in the first block
                logits -= higher[:, None]
                if with_entropy:
                    moved = torch.where(total > 0, (top - higher) * total, 0.0)  # 0 * -inf in the first block
                    weights = logits.clamp_(min=_LOWEST).exp()
                    moment = (moment + moved) * fewer + (weights * logits).sum(-1)
                else:
                    weights = logits.exp_()
                total = total * fewer + weights.sum(-1)
                top = higher
            log_sum[rows] = top + total.log()
            expected[rows] = moment / total - total.log()
        # A token that this vocabulary lacks (the padding of another's) has probability 0.
        logps = torch.where(tokens < len(weight), chosen - log_sum, -torch.inf)
        ctx.save_for_backward(hidden, weight, bias, tokens, log_sum, expected)
        ctx.temperature, ctx.with_entropy, ctx.dtype = temperature, with_entropy, blocks.dtype
        return logps, -expected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logps: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, log_sum, expected = ctx.saved_tensors
        blocks = _Blocks(hidden, weight, bias, ctx.temperature, ctx.dtype)
        known = tokens < len(weight)
        of_logps = torch.where(known, of_logps, 0.0)
        token = torch.where(known, tokens, 0)
        d_hidden = of_logps[:, None] * weight[token].float()
        d_weight = torch.empty_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in blocks.rows:
            g = of_logps[rows][:, None]
            for columns in blocks.columns:
                d = blocks.logits(rows, columns).sub_(log_sum[rows][:, None])  # log p
                if ctx.with_entropy:
                    p = d.clamp_(min=_LOWEST).exp()
                    d = d.sub_(expected[rows][:, None]).mul_(-of_entropy[rows][:, None]).sub_(g).mul_(p)
                else:
                    d = d.exp_().mul_(-g)
                d = d.to(blocks.dtype)
                _add_product(d_hidden[rows], d, weight[columns].to(blocks.dtype))
                if d_weight is not None:  # the first tokens' products are written: to fill it with zeros takes long
                    _add_product(d_weight[columns], d.t(), blocks.hidden[rows], keep=rows.start > 0)
                if d_bias is not None:
                    d_bias[columns] += d.sum(0)
        d_hidden = d_hidden / ctx.temperature
        if d_weight is not None:  # blocks.hidden is divided by the temperature
            d_weight.index_add_(0, token, of_logps[:, None] * blocks.hidden.float())
            d_weight = d_weight.to(weight.dtype)
        if d_bias is not None:
            d_bias.index_add_(0, token, of_logps)
            d_bias = (d_bias / ctx.temperature).to(bias.dtype)
        return d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None


class _Blocks:
    """Float32 logits / temperature of a linear projection, a block at a time."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype or _compute_dtype(hidden)
        self.hidden = (hidden.float() / temperature).to(self.dtype)
        self.weight, self.bias, self.temperature = weight, bias, temperature
        self.rows = list(_slices(len(hidden), BLOCK_ROWS))
        numbers = BLOCK_NUMBERS.get(hidden.device.type, CHUNK_NUMBERS)
        self.columns = list(_slices(len(weight), numbers // min(len(hidden), BLOCK_ROWS)))

    def logits(self, rows: slice, columns: slice) -> Float[Tensor, "n v"]:
        logits = (self.hidden[rows] @ self.weight[columns].to(self.dtype).t()).float()
        return logits if self.bias is None else logits.add_(self.bias[columns].float() / self.temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor, keep: bool = True) -> None:
    """Adds left @ right to a total, or to nothing; in one go where the types allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=int(keep))  # 0 leaves out even what is not finite
    elif keep:
        total += left @ right
    else:
        total.copy_(left @ right)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Of matrix products of these states: autocast's, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _is_linear(model: nn.Module) -> bool:
    """Whether the logits are a plain linear function of the hidden states."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    changed = head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__
    return type(head) is nn.Linear and not changed and _softcap(model) is None


def _softcap(model: nn.Module) -> float | None:
    return getattr(model.config, "final_logit_softcapping", None)


def _slices(length: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
