"""Whole runs on models and tokenizers as people have them: they train, are exported, and the export scores the same."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from covary.export import export
from covary.fused import use_fused
from covary.prompts import load_template, prompt_group
from tests.loop.mini import Sums, metrics, rollouts, run
from tests.models import FAMILIES, byte_tokenizer, random_model


def without_pad() -> PreTrainedTokenizerFast:
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.pad_token = None
    return tokenizer


def base_model_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's: one special token for everything, and no chat template."""
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.bos_token = tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = None
    return tokenizer


def with_start_token() -> PreTrainedTokenizerFast:
    """As Gemma's: the template writes the start token, and so does the tokenizer by itself. The id of <pad> is reused."""
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.pad_token, tokenizer.bos_token = tokenizer.eos_token, "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


TOKENIZERS = {
    "llama": byte_tokenizer, "qwen2": byte_tokenizer, "qwen3": without_pad, "gemma3": with_start_token,
    "gpt2": base_model_tokenizer,
}  # fmt: skip


def save(folder: Path, family: str) -> Path:
    model = random_model(family)
    model.save_pretrained(folder)
    TOKENIZERS[family]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 16.0}], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_train_and_export(tmp_path: Path, family: str, lora: dict[str, Any] | None) -> None:
    folder = save(tmp_path / "model", family)
    changes: dict[str, Any] = {"task": Sums(template="r1")} if family == "gpt2" else {}
    trained = run(
        tmp_path,
        model={"name": str(folder), "lora": lora},
        optimizer={"lr": 3e-2, "prompts": 2},
        reference="initial",
        **changes,
    )
    last = metrics(tmp_path / "run")[-1]
    assert last["kl/initial"] > 1e-3  # it moved
    assert last["kl/sampling"] < 1e-5  # and the sampler moved with it
    if family == "gemma3":
        prompt = prompt_group(Sums().load().train[0], load_template("chat"), trained.tokenizer).contexts["prompt"]
        assert prompt.count(trained.tokenizer.bos_token_id) == 1
        assert trained.tokenizer("a")["input_ids"].count(trained.tokenizer.bos_token_id) == 1

    out = export(tmp_path / "run", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, use_safetensors=True)
    assert exported.config.tie_word_embeddings == FAMILIES[family].tie_word_embeddings
    ids = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(0))
    use_fused(exported)  # as the trained one computes, to the last bit
    with torch.no_grad():
        ours, theirs = (m(ids).logits.log_softmax(-1) for m in (trained.model, exported))
        before = random_model(family)(ids).logits.log_softmax(-1)
    difference = (ours - theirs).gather(-1, ids.unsqueeze(-1))
    assert difference.abs().mean() < 1e-6
    assert difference.abs().max() < (1e-5 if lora else 1e-12)  # float32's rounding, summed in another order
    assert (ours - before).abs().max() > 0.05
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    for name in ("eos_token", "pad_token", "bos_token", "chat_template"):
        assert getattr(tokenizer, name) == getattr(trained.tokenizer, name)
    assert tokenizer("a b")["input_ids"] == trained.tokenizer("a b")["input_ids"]


def test_generation_defaults_of_a_checkpoint_are_ignored_and_named(tmp_path: Path, capsys: Any) -> None:
    plain, configured = tmp_path / "plain", tmp_path / "configured"
    for folder in (plain, configured):
        save(folder / "model", "llama")
    file = configured / "model" / "generation_config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "do_sample": True, "top_k": 1, "repetition_penalty": 1.3}))
    run(plain, steps=1)
    assert "generation defaults" not in capsys.readouterr().out
    run(configured, steps=1)
    told = capsys.readouterr().out
    assert "generation defaults (top_k 1, repetition_penalty 1.3) are ignored" in told
    assert rollouts(plain / "run", 1) == rollouts(configured / "run", 1)


def test_every_end_id_of_a_checkpoint_ends_a_completion(tmp_path: Path) -> None:
    model = random_model("llama")
    model.generation_config.eos_token_id = list(range(100, 258))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    run(tmp_path, steps=1, rollout={"prompts": 4, "completions": 4, "max_tokens": 12})
    ended = [row["finish"] for row in rollouts(tmp_path / "run", 1)]
    assert ended.count("eos") > len(ended) / 2
    out = export(tmp_path / "run", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == list(range(100, 258))
