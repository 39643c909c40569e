"""Hidden states -> numbers per token, a chunk of the vocabulary projection at a time.

No (tokens x vocabulary) tensor outlives a chunk: the backward pass recomputes each chunk's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_NUMBERS = 2**24
"""Logits per chunk and stream (64 MB in float32)."""

Quantity = Callable[..., Tensor]


def project(model: nn.Module, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
    """Float32 next-token logits of final hidden states, as the model's own forward pass gives them."""
    logits = model.get_output_embeddings()(hidden).float()  # pyright: ignore[reportCallIssue]
    softcap = getattr(model.config, "final_logit_softcapping", None)
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
    vocabulary = max(model.get_output_embeddings().weight.shape[0] for model in models)  # pyright: ignore[reportCallIssue]
    size = max(1, CHUNK_NUMBERS // vocabulary)
    chunk = partial(_score_chunk, models, quantities, temperature)
    if torch.is_grad_enabled():
        chunk = partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
    parts = [
        chunk(tokens[start : start + size], *(h[start : start + size] for h in hidden))
        for start in range(0, tokens.shape[0], size)
    ]
    if not parts:
        return torch.zeros(len(quantities), 0, device=tokens.device)
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
