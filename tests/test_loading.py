"""Model folders as people have them: what is wrong with one is said in one line, before anything is trained."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, CohereForCausalLM

from covary.models.loading import load_config, load_model, load_tokenizer, model_path, pick_device
from covary.types import UserError
from tests.models import random_llama, save_random_model


def edit(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks weights.*model.layers.1.mlp.up_proj.weight"),
        (lambda t: [t.pop(k) for k in list(t) if "layers.1" in k], "lacks weights.*and 6 more"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "not finite .model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), "model.name"),
    ],
)
def test_weights_that_are_missing_or_wrong(tmp_path, change, message):
    edit(save_random_model(tmp_path / "m"), change)
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path / "m"))


@pytest.mark.parametrize(
    "content",
    [b"", b"not safetensors at all"],
)
def test_a_broken_weight_file(tmp_path, content):
    folder = save_random_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="could not be loaded"):
        load_model(str(folder))


def test_pickled_weights_are_refused(tmp_path):
    folder = save_random_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save(random_llama().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"holds pytorch_model\.bin: pickle files can run code"):
        load_model(str(folder))


def test_wrong_configurations_and_names(tmp_path):
    folder = save_random_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(UserError, match=r"model\.name"):
        load_model(str(folder))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_model(str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"no folder \./nothere"):
        model_path("./nothere")
    with pytest.raises(UserError, match="folder with a tokenizer"):
        load_tokenizer("nobody/nowhere", offline=True)
    with pytest.raises(UserError, match="no configuration was found"):
        load_config("nobody/nowhere", offline=True)
    with (
        pytest.raises(UserError, match="no CUDA device") if not torch.cuda.is_available() else pytest.raises(SystemExit)
    ):
        pick_device("cuda")
        raise SystemExit


def test_a_model_that_scales_its_logits_is_refused_rather_than_scored_wrong(tmp_path):
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        logit_scale=0.1,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="transforms its logits"):
        load_model(str(tmp_path / "m"))
