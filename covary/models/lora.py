"""LoRA through peft: a low-rank adapter inside the model, whose class and methods stay what they were.

peft is called directly: the integration in transformers asks for a version of it that is not released yet.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covary.settings import Lora
from covary.types import UserError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE_TOLERANCE = 1e-3  # nats; rounding stays far below, a wrong merge of tied weights far above


def need_peft(where: str) -> None:
    """Refuse what needs peft where it is not installed.

    Raises:
        UserError: with the command that installs it.
    """
    if find_spec("peft") is None:
        raise UserError(f"{where}: needs peft: pip install 'covary[lora]'")


def add_lora(model: nn.Module, lora: Lora, base: str) -> None:
    """Put a fresh adapter into `model`, which computes what it did until the adapter is trained, and freeze the rest.

    Args:
        model: a transformers causal language model; changed in place.
        lora: rank, scale and layers.
        base: folder or hub id of the model, written into the adapter's files.

    Raises:
        UserError: peft is missing, or a target is no layer that can be adapted.
    """
    need_peft("model.lora")
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    valid = {name: module for name, module in layers.items() if module is not head}
    for target in [] if lora.targets == "all-linear" else lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in valid):
            # The output projection may share the embedding's weights: an adapter of it cannot be merged back.
            kind = "the output projection" if any(f".{name}".endswith(f".{target}") for name in layers) else "no layer"
            names = ", ".join(sorted({name.rpartition(".")[2] for name in valid}))
            raise UserError(f"model.lora.targets: {target!r} is {kind}; takes all-linear, or a list of {names}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in valid.values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with _no_future_warnings():
        inject_adapter_in_model(config, model)


def initial_policy(model: nn.Module) -> nn.Module:
    """The policy as it is before training: a copy, or where a fresh adapter is trained the same weights without it."""
    return WithoutAdapter(model) if hasattr(model, "peft_config") else deepcopy(model)


class WithoutAdapter(nn.Module):
    """A model with its adapter switched off, as far as scoring looks at one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._hidden = (model,)  # not registered: whoever freezes this module must not freeze the policy

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self._hidden[0].config

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self._hidden[0].device  # pyright: ignore[reportReturnType]

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which is never adapted."""
        return self._hidden[0].get_input_embeddings()  # pyright: ignore[reportCallIssue]

    def set_attn_implementation(self, name: str) -> None:
        """The model's, so with the adapter too."""
        self._hidden[0].set_attn_implementation(name)  # pyright: ignore[reportCallIssue]

    def get_output_embeddings(self) -> nn.Module:
        """The output projection, which is never adapted."""
        return self._hidden[0].get_output_embeddings()  # pyright: ignore[reportCallIssue]

    def base_model(self, **inputs: Any) -> Any:
        """Hidden states of the model without its adapter, without gradient (a recomputation would find it on again)."""
        with torch.no_grad(), _adapter_off(self._hidden[0]):
            return self._hidden[0].base_model(**inputs)  # pyright: ignore[reportCallIssue]


@contextmanager
def _adapter_off(model: nn.Module) -> Iterator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def _no_future_warnings() -> Iterator[None]:
    """Without what transformers has to say to peft."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of an ordinary model that computes what `model` does, by their names in a checkpoint.

    Without an adapter they are the model's own tensors, not copies; weights that it shares come under each name.
    """
    weights = model.state_dict()
    if not hasattr(model, "peft_config"):
        return weights
    from peft.tuners.lora import LoraLayer

    adapted = {f"{name}.": layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    merged: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if layer is None:
            merged[name] = weight
        elif name == f"{layer}base_layer.weight":
            merged[f"{layer}weight"] = weight + adapted[layer].get_delta_weight("default")
        elif name.startswith(f"{layer}base_layer."):
            merged[layer + name.removeprefix(f"{layer}base_layer.")] = weight
    return merged


def is_adapter(path: str) -> bool:
    """Whether a folder holds an adapter and no model of its own."""
    return (Path(path) / ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def base_of(path: str) -> str:
    """The model that an adapter was trained on.

    Raises:
        UserError: its configuration does not say.
    """
    file = Path(path) / ADAPTER_CONFIG
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.name: {file} does not name the model that the adapter belongs to") from error
    if not isinstance(base, str) or not base:
        raise UserError(f"model.name: {file} does not name the model that the adapter belongs to")
    return base


@torch.no_grad()
def merge_adapter(model: nn.Module, path: str) -> nn.Module:
    """An ordinary model whose weights are those of `model` with the adapter of a folder added to them.

    Raises:
        UserError: peft is missing, the adapter is not in safetensors, or merging would change what the model computes.
    """
    need_peft(f"model.name: {path} is an adapter, and reading one")
    from peft import PeftModel

    if not (Path(path) / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"model.name: {path} has no {ADAPTER_WEIGHTS}; weights are read from safetensors only")
    ids = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
    with _no_future_warnings():
        adapted = PeftModel.from_pretrained(model, path)  # pyright: ignore[reportArgumentType]
    before = torch.log_softmax(adapted(input_ids=ids).logits.float(), -1)
    merged = adapted.merge_and_unload()  # pyright: ignore[reportCallIssue]
    after = torch.log_softmax(merged(input_ids=ids).logits.float(), -1)
    difference = float((before - after).abs().max())
    if not difference < MERGE_TOLERANCE:
        raise UserError(
            f"model.name: the adapter {path} cannot be merged into its model: log-probs would change by "
            f"{difference:.3g} nats (does it adapt embeddings that the output projection shares?)"
        )
    return merged.requires_grad_(True)  # peft froze the model that it loaded the adapter into
