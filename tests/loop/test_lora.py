"""LoRA runs: the adapter alone is trained and saved, the initial policy is the model without it, nothing else differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor

import covary
from covary.batch import Algorithm
from covary.collate import collate
from covary.engines.local import LocalEngine
from covary.export import export
from covary.models import lora as lora_module
from covary.models.loading import load_config, load_model, load_tokenizer
from covary.models.lora import add_lora, initial_policy
from covary.settings import Lora
from covary.types import Completion, Example, Group, Score, Stream, UserError
from tests.loop.mini import Sums, comparable, metrics, run, vowels
from tests.models import byte_tokenizer, random_model

LORA = {"rank": 4, "alpha": 16.0}


def lora_run(folder: Path, **changes: Any) -> Any:
    model = folder / "model"
    if not model.exists():
        random_model("llama").save_pretrained(model)
        byte_tokenizer().save_pretrained(model)
    changes = {"optimizer": {"lr": 1e-2, "prompts": 2}, **changes}
    return run(folder, model={"name": str(model), "lora": LORA}, **changes)


def test_training_raises_the_reward(tmp_path: Path) -> None:
    lora_run(
        tmp_path,
        steps=15,
        rollout={"prompts": 4, "completions": 8, "max_tokens": 6},
        optimizer={"lr": 3e-2, "prompts": 2},
    )
    rewards = [row["reward/mean"] for row in metrics(tmp_path / "run")[1:]]
    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3])


def test_a_checkpoint_holds_the_adapter_only_and_a_resume_changes_nothing(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    one = lora_run(whole, steps=4, reference="initial")
    lora_run(parts, steps=2, reference="initial")
    covary.train(resume=parts / "run", steps=4, reward=vowels, quiet=True)
    rows = [[comparable(row) for row in metrics(folder / "run")] for folder in (whole, parts)]
    assert rows[0][:2] == rows[1][:2]
    assert [row for row in rows[0] if row["step"] == 4] == [row for row in rows[1] if row["step"] == 4]

    checkpoint = parts / "run" / "checkpoints" / "step-000004"
    assert not list(checkpoint.glob("model*"))
    trained = {name for name, p in one.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == len(trained)
    with safe_open(checkpoint / "training.safetensors", "pt") as file:
        names = list(file.keys())
    moments = {name.removeprefix("optimizer.").rpartition(".")[0] for name in names if "exp_avg" in name}
    assert moments == trained
    base = load_model(str(whole / "model")).state_dict()
    now = {name.replace(".base_layer", ""): value for name, value in one.model.state_dict().items()}
    assert all(torch.equal(now[name], value) for name, value in base.items())


class TwoStreams(Algorithm):
    """Scores the live policy beside the initial one, both with gradient enabled."""

    trained = (Score("policy"), Score("distance", (Stream("policy"), Stream("initial")), "kl"))

    def loss(self, scores: dict[str, Tensor], batch: Any) -> Tensor:
        return (scores["policy"].sum() + scores["distance"].sum()) / batch.total("rows")


def perturbed(family: str = "llama") -> Any:
    model = random_model(family)
    add_lora(model, Lora(4, 16.0), "unused")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_initial_policy_is_the_same_weights_without_the_adapter(family: str, gradient_checkpointing: bool) -> None:
    rows = [Completion([5, 9, 11, 4], "", "eos"), Completion([7, 8], "", "eos")]
    groups = [Group(Example("e", "q"), {"prompt": [1, 2, 3]}, rows, [0.0, 1.0])]
    scores = [Score("initial", Stream("initial")), Score("old", Stream("old"))]
    shared, copied = perturbed(family), perturbed(family)
    engines = [
        LocalEngine(model, frozen={"initial": initial}, gradient_checkpointing=gradient_checkpointing)
        for model, initial in ((shared, initial_policy(shared)), (copied, random_model(family)))
    ]
    assert not list(engines[0].models["initial"].parameters())  # no second copy
    (first, second) = (engine.score(groups, scores) for engine in engines)
    for name in ("initial", "old"):
        for mine, expected in zip(first[name], second[name], strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
    assert max((a - b).abs().max() for a, b in zip(first["initial"], first["old"], strict=True)) > 0.01

    for engine in engines:
        engine.forward_backward(groups, collate(groups, 8).with_totals(), TwoStreams())
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (shared, copied)]
    assert gradients[0].keys() == {n for n, p in shared.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_evaluating_and_training_on_from_a_lora_run(tmp_path: Path) -> None:
    trained = lora_run(tmp_path, steps=3, rollout={"prompts": 4, "completions": 4, "max_tokens": 6})
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    task = Sums().load()
    limits: dict[str, Any] = {"max_tokens": 6, "reward": "exact", "device": "cpu"}
    in_memory = covary.evaluate(trained, task, **limits)
    for model in (tmp_path / "run", checkpoint, export(tmp_path / "run", tmp_path / "out")):
        assert covary.evaluate(model, task, **limits) == pytest.approx(in_memory, abs=1e-6)
    assert load_config(str(checkpoint)).hidden_size == 32
    # The adapter is merged, and another one goes on top of it.
    again = tmp_path / "again"
    again.mkdir()
    more = run(again, model={"name": str(checkpoint), "lora": LORA}, steps=1, optimizer={"lr": 1e-9})
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(more.model(ids).logits, trained.model(ids).logits, rtol=0, atol=1e-4)
    chained = load_model(str(again / "run" / "checkpoints" / "step-000001"))
    assert all(parameter.requires_grad for parameter in chained.parameters())  # merged, and to be trained as a whole
    with torch.no_grad():
        torch.testing.assert_close(chained(ids).logits, trained.model(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "target", "message"),
    [
        ("llama", "lm_head", "'lm_head' is the output projection; takes all-linear, or a list of down_proj, gate_proj"),
        ("qwen2", "lm_head", "the output projection"),
        ("llama", "embed_tokens", "'embed_tokens' is no layer"),
        ("llama", "q_prj", "'q_prj' is no layer.*q_proj"),
        ("gpt2", "q_proj", "'q_proj' is no layer.*c_attn"),
    ],
)
def test_targets_that_cannot_be_adapted(family: str, target: str, message: str) -> None:
    model = random_model(family)
    with pytest.raises(UserError, match=rf"model\.lora\.targets: .*{message}"):
        add_lora(model, Lora(targets=("up_proj" if family != "gpt2" else "c_fc", target)), "unused")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_the_named_layers_are_adapted() -> None:
    model = random_model("llama")
    add_lora(model, Lora(targets=("q_proj", "v_proj")), "unused")
    adapted = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"q_proj", "v_proj"}


@pytest.mark.filterwarnings("ignore")  # peft warns of just this
@pytest.mark.parametrize(("family", "merges"), [("qwen2", True), ("qwen3", False)])
def test_an_adapter_of_a_tied_output_projection_is_not_merged(tmp_path: Path, family: str, merges: bool) -> None:
    """Of an adapter that peft made: of a model with tied embeddings, merging it would change the embeddings too."""
    random_model(family).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    adapted = get_peft_model(load_model(str(tmp_path / "model")), config)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(tmp_path / "model")})
    )
    assert load_tokenizer(str(tmp_path / "adapter")).eos_token == "<|im_end|>"  # its model's
    if not merges:
        with pytest.raises(UserError, match=r"cannot be merged.*would change by \d"):
            load_model(str(tmp_path / "adapter"))
        return
    merged = load_model(str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits.log_softmax(-1)
        torch.testing.assert_close(merged(ids).logits.log_softmax(-1), expected, rtol=0, atol=1e-4)


def test_mistakes_with_adapters_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora_run(tmp_path, steps=1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"the adapter .*step-000001 belongs to .*model, which is not there"):
        load_model(str(checkpoint))
    (tmp_path / "moved").rename(tmp_path / "model")
    weights = checkpoint / "adapter_model.safetensors"
    weights.rename(checkpoint / "adapter_model.bin")
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors; weights are read from safetensors only"):
        load_model(str(checkpoint))
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="does not name the model"):
        load_model(str(checkpoint))
    monkeypatch.setattr(lora_module, "find_spec", lambda name: None)
    (tmp_path / "run").rename(tmp_path / "old")
    with pytest.raises(UserError, match=r"model\.lora: needs peft: pip install 'covary\[lora\]'"):
        lora_run(tmp_path, steps=1)
