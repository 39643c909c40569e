"""A model and its tokenizer by name: shipped, a folder, a GGUF file, or a hub id.

transformers is imported where it is first needed: that takes seconds, in which `covary check` has other work to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covary.fused import use_fused
from covary.log import no_library_bars
from covary.models.gguf import load_gguf_config, load_gguf_model, load_gguf_tokenizer
from covary.models.lora import base_of, is_adapter, merge_adapter
from covary.scoring.chunked import project
from covary.types import UserError

FINGERPRINT_ENTRIES = 4096  # of each tensor
SHIPPED = ("tiny", "tiny_student", "tiny_teacher", "tiny_teacher_bytes", "tiny_think")
HEAD_TOLERANCE = 1e-3  # nats; float32 rounding stays far below, another logit transformation far above


def model_path(name: str) -> str:
    """The folder of a shipped model, a folder or a GGUF file; a hub id as it is.

    Raises:
        UserError: `name` looks like a folder or file and is none, or the folder holds no model, or one in pickle files.
    """
    if name in SHIPPED:
        return str(Path(__file__).parent / name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"model.name: no file {name}")
        return str(path)
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter(str(path)):
            runs = (
                f"; a run's models are the folders below {name}/checkpoints" if (path / "checkpoints").is_dir() else ""
            )
            raise UserError(
                f"model.name: folder {name} has no config.json, so it is no Hugging Face model folder{runs}"
            )
        pickled = sorted(file.name for file in path.glob("pytorch_model*.bin"))
        if pickled and not any(path.glob("*.safetensors")):
            raise UserError(
                f"model.name: folder {name} holds {pickled[0]}: pickle files can run code when they are read; covary reads "
                "safetensors only, which save_pretrained of transformers writes"
            )
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"model.name: no folder {name} and no shipped model of that name ({', '.join(SHIPPED)})")
    return name


def load_tokenizer(name: str, trust_remote_code: bool = False, *, offline: bool = False) -> Any:
    """The tokenizer of a model; `offline` asks no hub (a hub id is then found in the local cache only)."""
    from transformers import AutoTokenizer

    path = model_path(name)
    if path.endswith(".gguf"):
        with _explained(f"model.name: {name!r} could not be read"):
            return load_gguf_tokenizer(Path(path))
    with _explained(f"model.name: {name!r} is no shipped model ({', '.join(SHIPPED)}) or folder with a tokenizer"):
        if is_adapter(path) and not (Path(path) / "tokenizer_config.json").is_file():
            return load_tokenizer(_base(path), trust_remote_code, offline=offline)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=offline)


def load_config(name: str, trust_remote_code: bool = False, *, offline: bool = False) -> Any:
    """The architecture's configuration, without weights."""
    from transformers import AutoConfig

    path = model_path(name)
    if path.endswith(".gguf"):
        with _explained(f"model.name: {name!r} could not be read"):
            return load_gguf_config(Path(path))
    where = f"model.name: {name!r} is no shipped model ({', '.join(SHIPPED)}) or folder, and no configuration was found"
    with _explained(where):
        if is_adapter(path):
            return load_config(_base(path), trust_remote_code, offline=offline)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=offline)


def load_generation_config(name: str, *, offline: bool = False) -> Any | None:
    """What the checkpoint stores for generation (only its end ids are ever used), None where it stores nothing."""
    from transformers import GenerationConfig

    path = model_path(name)
    if path.endswith(".gguf"):
        return None
    if is_adapter(path):
        return load_generation_config(_base(path), offline=offline)
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=offline)
    except OSError:
        return None


def load_model(
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A causal language model in evaluation mode. Weights are read from safetensors or GGUF only.

    An adapter's folder gives the model that it was trained on, with the adapter merged into its weights.

    Raises:
        UserError: it cannot be found or loaded, weights are missing or not finite, or its logits are not its
            projection of its hidden states.
    """
    from transformers import AutoModelForCausalLM

    path = model_path(name)
    if is_adapter(path):
        model = load_model(_base(path), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        with _explained(f"model.name: the adapter {name!r} could not be loaded"):
            return merge_adapter(model, path)
    is_gguf = path.endswith(".gguf")
    if not is_gguf:
        load_config(name, trust_remote_code)
    with _explained(f"model.name: {name!r} could not be loaded"), no_library_bars():
        if is_gguf:
            model, report = load_gguf_model(Path(path))
        else:
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    _check_weights(name, model, report)
    model = model.to(device, dtype).eval()
    with _explained(f"model.name: {name!r} is no architecture that covary can score"):
        difference = _head_difference(model)
    if not difference < HEAD_TOLERANCE:
        raise UserError(
            f"model.name: {name!r} transforms its logits in a way that covary does not know "
            f"(log-probs differ by {difference:.3g} nats from its projected hidden states)"
        )
    use_fused(model)
    return model


def load_classifier(name: str, *, device: str | torch.device = "cpu") -> nn.Module:
    """A sequence classifier of one label (a reward model) in float32 and evaluation mode, from safetensors.

    A model without a padding token gets the id -1, which no text has: transformers then reads the score of every row
    at its last token, as it was trained, and refuses no batch.

    Raises:
        UserError: as `load_model`, or it has another number of labels.
    """
    from transformers import AutoModelForSequenceClassification

    path = model_path(name)
    if is_adapter(path) or path.endswith(".gguf"):
        raise UserError(f"model.name: {name!r} is no sequence classifier in a Hugging Face folder")
    check_labels(name, load_config(name))
    with _explained(f"model.name: {name!r} could not be loaded"), no_library_bars():
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    _check_weights(name, model, report)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = -1
    return model.to(device).eval().requires_grad_(False)


def check_labels(name: str, config: Any) -> None:
    """A reward is one number.

    Raises:
        UserError: the configuration is of a classifier with several labels, or of another kind of model.
    """
    if config.num_labels != 1:
        kind = ", ".join(config.architectures or ()) or "a model"
        raise UserError(
            f"model.name: {name!r} is {kind} with {config.num_labels} labels; a reward model is a sequence classifier "
            "with one (num_labels 1)"
        )


def _check_weights(name: str, model: nn.Module, report: dict[str, Any]) -> None:
    # transformers fills what a checkpoint lacks with random numbers, and only prints a report.
    absent = sorted(map(str, report["missing_keys"])) + [str(key) for key in report["mismatched_keys"]]
    if absent:
        shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise UserError(f"model.name: {name!r} lacks weights that its configuration asks for: {shown}")
    broken = next((n for n, p in model.named_parameters() if not p.isfinite().all()), None)
    if broken is not None:
        raise UserError(f"model.name: {name!r} has weights that are not finite ({broken})")


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Of every tensor's name, shape, type and some of its entries: it tells another model in little time."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        entries = value.reshape(-1)
        some = entries[:: max(1, entries.numel() // FINGERPRINT_ENTRIES)]
        digest.update(
            repr((name, tuple(value.shape), str(value.dtype))).encode() + some.float().cpu().numpy().tobytes()
        )
    return digest.hexdigest()


def generation_defaults(model: nn.Module) -> dict[str, Any]:
    """What the checkpoint would have `generate` do to its samples beside the end ids. covary samples without it."""
    config = getattr(model, "generation_config", None)
    stored = config.to_diff_dict() if config is not None else {}
    plain = ("do_sample", "use_cache", "max_length", "transformers_version")
    return {
        key: value
        for key, value in stored.items()
        if key not in plain and not key.endswith("_token_id") and not key.startswith(("_", "output_"))
    }


def context_length(config: Any) -> int | None:
    """Tokens that the model can read, prompt and completion together; None where its configuration names no limit.

    A model with `longrope` positions is another function of every token as soon as one row of a pass is longer than its
    original context: sampler and trainer would disagree, so it counts up to there.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # one, or one per kind of layer
    switches = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return min([*switches, *([limit] if limit else [])], default=None)


def pick_device(name: str) -> str:
    """`auto` is cuda where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("engine.device: cuda, but torch sees no CUDA device here; use cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _base(path: str) -> str:
    base = base_of(path)
    try:
        model_path(base)
    except UserError as error:
        raise UserError(f"model.name: the adapter {path} belongs to {base}, which is not there ({error})") from error
    return base


@torch.no_grad()
def _head_difference(model: nn.Module) -> float:
    """Nats between the model's own log-probs and those of its projected hidden states, by which covary scores."""
    ids = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
    direct = torch.log_softmax(model(input_ids=ids).logits.float(), -1)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # pyright: ignore[reportCallIssue]
    return float((direct - torch.log_softmax(project(model, hidden), -1)).abs().max())


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """A library's error about a user's model, as one line. Which types it raises is not documented."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise UserError(f"{what} ({type(error).__name__}: {lines[0] if lines else 'no message'})") from error
