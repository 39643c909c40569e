"""Tiny random models and a byte-level tokenizer, made in memory."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, beside the chat markup."""
    specials = ["<|im_start|>", "<|im_end|>", "<pad>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = CHAT
    return fast


def random_llama(vocabulary: int = 259, seed: int = 0, context: int = 256, scale: float = 1.0) -> LlamaForCausalLM:
    """A two-layer Llama of width 32; `scale` multiplies the weights (sharper distributions)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=min(257, vocabulary - 1),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


_SMALL: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": 257,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SMALL, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SMALL, head_dim=8, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **_SMALL, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),  # every other layer sees fewer tokens than a prompt has
    "gpt2": GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2,
        bos_token_id=257, eos_token_id=257,
    ),
}  # fmt: skip


def random_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model of one of `FAMILIES`, for the byte tokenizer."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(FAMILIES[family]).eval()


def save_random_classifier(
    folder: Path, kind: str = "llama", labels: int = 1, padding: int | None = 258, seed: int = 0, context: int = 256
) -> Path:
    """A tiny reward model with the byte tokenizer: a decoder, or an encoder that reads pairs of texts."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {"num_labels": labels, "pad_token_id": padding, "initializer_range": 0.2}
    common |= {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "max_position_embeddings": context}
    config = BertConfig(**common) if kind == "bert" else LlamaConfig(**common, num_key_value_heads=2, eos_token_id=257)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = deepcopy(byte_tokenizer())
    if kind == "bert":
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def save_random_model(folder: Path, **options: int) -> Path:
    """An ordinary Hugging Face folder with the byte tokenizer."""
    random_llama(**options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_with_another_end(folder: Path) -> Path:
    """A model whose chat template ends turns with <|im_end|> and whose end token is <pad>."""
    model, tokenizer = random_llama(), deepcopy(byte_tokenizer())
    model.config.eos_token_id = 258
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 258
    tokenizer.eos_token = "<pad>"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
