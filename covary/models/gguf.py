"""GGUF files as ordinary models: weights de-quantized to float32, and the tokenizer that they were trained with.

transformers reads the file; this module mends what is lost on that way.
"""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import nn

from covary.types import UserError

# How each kind of byte-level vocabulary splits text before its merges, where transformers does not know it or its
# default is right. Another split gives other tokens in places (digits after two spaces or an empty line), which a
# model has never seen; so a kind that neither knows is refused.
_SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2_SPLIT = ("default", "gpt-2", "gpt2", "olmo", "mpt", "jais", "trillion")


def load_gguf_config(path: Path) -> Any:
    """The architecture's configuration, as of a model that was never quantized.

    Raises:
        UserError: the packages of `covary[gguf]` are missing.
    """
    _need_packages(path)
    from transformers import AutoConfig

    return _unquantized(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer, with the split before the merges that its vocabulary was made for.

    Raises:
        UserError: the packages of `covary[gguf]` are missing, or the file names a split that is not known.
    """
    _need_packages(path)
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(path))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    kind = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and kind not in GGUF_PRE_TOKENIZER_SPLITS:
        if kind in _SPLIT_DIGITS:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif kind not in _GPT2_SPLIT:
            raise UserError(
                f"model.name: {path} has a tokenizer of kind {kind!r}, which would be split wrongly; "
                "use the model's Hugging Face folder"
            )
    tokenizer.model_max_length = metadata.get(f"{metadata['general.architecture']}.context_length")
    return tokenizer


def load_gguf_model(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A float32 model in evaluation mode that can be trained and saved, and transformers' report of its loading.

    Raises:
        UserError: the packages of `covary[gguf]` are missing.
    """
    _need_packages(path)
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # transformers shows a bar of its own here, which would fill log files.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        read, report = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
        )
    # What was read counts as quantized and cannot be saved; the same weights in a fresh model can.
    config = _unquantized(read.config)
    with no_init_weights():
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    return model.eval(), report


def _unquantized(config: Any) -> Any:
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _need_packages(path: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"model.name: {path} is a GGUF file, and reading one needs {' and '.join(missing)}: "
            "pip install 'covary[gguf]'"
        )
