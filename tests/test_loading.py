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


def test_a_longrope_model_counts_up_to_its_original_context():
    """Beyond, what one row's positions mean depends on the longest row beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from covary.models.loading import context_length

    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    }  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, rope_parameters=rope,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # else attention hardly looks at positions
    assert context_length(config) == 32
    assert context_length(LlamaConfig(max_position_embeddings=128)) == 128
    short = torch.randint(0, 64, (1, 32))
    alone = model(short).logits
    beside = [model(torch.cat([short, torch.zeros(1, more, dtype=torch.long)], 1)).logits[:, :32] for more in (0, 1)]
    assert torch.allclose(alone, beside[0], atol=1e-5)
    assert not torch.allclose(alone, beside[1], atol=1e-3)
