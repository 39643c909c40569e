"""A model and its tokenizer by name: shipped, a folder, or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from covary.log import no_library_bars
from covary.scoring.chunked import project
from covary.types import UserError

SHIPPED = ("tiny",)
HEAD_TOLERANCE = 1e-3  # nats; float32 rounding stays far below, another logit transformation far above


def model_path(name: str) -> str:
    """The folder of a shipped model or of a path; a hub id as it is.

    Raises:
        UserError: `name` looks like a folder and is none, or the folder holds no model.
    """
    if name in SHIPPED:
        return str(Path(__file__).parent / name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model.name: folder {name} has no config.json, so it is no Hugging Face model folder")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"model.name: no folder {name} and no shipped model of that name ({', '.join(SHIPPED)})")
    return name


def load_tokenizer(name: str, trust_remote_code: bool = False, *, offline: bool = False) -> Any:
    """The tokenizer of a model; `offline` asks no hub (a hub id is then found in the local cache only)."""
    path = model_path(name)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name: no tokenizer for {name!r} ({_first_line(error)})") from error


def load_config(name: str, trust_remote_code: bool = False, *, offline: bool = False) -> Any:
    """The architecture's configuration, without weights."""
    path = model_path(name)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.name: {name!r} is no shipped model ({', '.join(SHIPPED)}), no folder here, "
            f"and could not be had from the hub ({_first_line(error)})"
        ) from error


def load_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> nn.Module:
    """A causal language model in evaluation mode. Weights are read from safetensors only.

    Raises:
        UserError: it cannot be found or loaded, or its logits are not its projection of its hidden states.
    """
    load_config(name, trust_remote_code)
    try:
        with no_library_bars():
            model = AutoModelForCausalLM.from_pretrained(
                model_path(name), dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise UserError(f"model.name: {name!r} could not be loaded ({_first_line(error)})") from error
    model = model.to(device).eval()
    _check_head(model, name)
    return model


def context_length(config: Any) -> int | None:
    """Tokens that the model can read, prompt and completion together; None where its configuration names no limit."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def pick_device(name: str) -> str:
    """`auto` is cuda where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device: cuda, but torch sees no CUDA device here; use cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@torch.no_grad()
def _check_head(model: nn.Module, name: str) -> None:
    """Scoring projects hidden states itself: refuse a model whose forward pass does more than that."""
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).unsqueeze(0)
    direct = torch.log_softmax(model(input_ids=ids).logits.float(), -1)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # pyright: ignore[reportCallIssue]
    ours = torch.log_softmax(project(model, hidden), -1)
    difference = float((direct - ours).abs().max())
    if not difference < HEAD_TOLERANCE:
        raise UserError(
            f"model.name: {name!r} transforms its logits in a way that covary does not know "
            f"(log-probs differ by {difference:.3g} nats from its projected hidden states)"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
