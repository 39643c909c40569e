"""The engine: scores equal a plain forward pass, gradients do not depend on micro-batches, bad rows leave."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from covary.algorithms import ALGORITHMS, GRPO, GVPO, SFT
from covary.batch import Algorithm, Batch, one_process
from covary.collate import attach, attach_features, collate, take_rows
from covary.engines.local import LocalEngine
from covary.scoring.chunked import project
from covary.types import Completion, Example, Group, Score, Stream
from tests.models import random_llama, random_model

SMALL = {"vocab_size": 50, "num_hidden_layers": 2}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.5)
    return GPT2LMHeadModel(config)


def qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.3,
        )
    )  # fmt: skip


def make_groups(seed: int = 0, num_groups: int = 5, k: int = 3, vocabulary: int = 50) -> list[Group]:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(low, high))]

    groups = []
    for g in range(num_groups):
        completions = [Completion(ids(1, 9), "", "eos") for _ in range(k)]
        contexts = {"prompt": ids(1, 7), "other": ids(2, 5)}
        contexts["posterior"] = [*contexts["other"], *contexts["prompt"]]
        rewards = [rng.random() for _ in completions]
        groups.append(Group(Example(str(g), "question"), contexts, completions, rewards))
    return groups


def plain_logps(model, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0].float() / temperature
    logps = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logps.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def prepared(engine: LocalEngine, groups: list[Group], algorithm: Algorithm, current: bool = False) -> Batch:
    attach_features(groups, algorithm)
    attach(groups, engine.score(groups, algorithm.frozen))
    batch = collate(groups, 16)
    batch = batch.with_numbers(algorithm.prepare(batch, one_process)).with_totals(algorithm.normalisers)
    if current and algorithm.frozen and set(algorithm.frozen[0].models) <= {"old", "reference"}:
        batch = replace(batch, current={algorithm.frozen[0].name: "policy"})
    return batch


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("make", [lambda: random_llama(50), gpt2, qwen2], ids=["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("limit", [1, 30, 8192])
def test_scores_equal_a_plain_forward_pass(make, limit):
    model = make()
    groups = make_groups()
    engine = LocalEngine(model, micro_batch_tokens=limit)
    scores = [Score("a"), Score("b", Stream("policy", "other")), Score("s", level="sequence")]
    for temperature in (1.0, 0.7):
        result = engine.score(groups, scores, temperature=temperature)
        row = 0
        with torch.no_grad():
            for group in groups:
                for completion in group.completions:
                    a = plain_logps(model, group.contexts["prompt"], completion.tokens, temperature)
                    b = plain_logps(model, group.contexts["other"], completion.tokens, temperature)
                    torch.testing.assert_close(result["a"][row], a, atol=1e-5, rtol=0)
                    torch.testing.assert_close(result["b"][row], b, atol=1e-5, rtol=0)
                    assert result["s"][row] == pytest.approx(float(a.double().sum()), abs=1e-4)
                    row += 1


def test_entropy_and_two_stream_kl_equal_a_plain_forward_pass():
    model = random_llama(50, scale=3)
    engine = LocalEngine(model)
    groups = make_groups(num_groups=2)
    streams = (Stream("policy", "prompt"), Stream("policy", "other"))
    result = engine.score(groups, [Score("h", quantity="entropy"), Score("kl", streams, "kl")])
    row = 0
    with torch.no_grad():
        for group in groups:
            for completion in group.completions:
                logps = []
                for context in ("prompt", "other"):
                    ids = group.contexts[context] + completion.tokens
                    logits = model(input_ids=torch.tensor([ids])).logits[0]
                    logps.append(torch.log_softmax(logits, -1)[len(group.contexts[context]) - 1 : -1])
                p, q = logps
                torch.testing.assert_close(result["h"][row], -(p.exp() * p).sum(-1), atol=1e-5, rtol=0)
                torch.testing.assert_close(result["kl"][row], (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=0)
                row += 1


def test_only_positions_of_the_wanted_role_are_scored():
    model = random_llama(50)
    engine = LocalEngine(model)
    completion = Completion(
        [3, 4, 5, 6, 7], "", "stop_string", roles=["sampled", "sampled", "context", "answer", "answer"]
    )
    group = Group(Example("0", ""), {"prompt": [1, 2]}, [completion], answer_tokens=[8, 9])
    scores = [Score("s"), Score("a", tokens="answer"), Score("both", tokens="both"),
              Score("gold", per="example", level="sequence")]  # fmt: skip
    result = engine.score([group], scores)
    with torch.no_grad():
        plain = plain_logps(model, [1, 2], completion.tokens)
        gold = plain_logps(model, [1, 2], [8, 9])
    for name, positions in (("s", [0, 1]), ("a", [3, 4]), ("both", [0, 1, 3, 4])):
        wanted = torch.zeros(5)
        wanted[positions] = plain[positions]
        torch.testing.assert_close(result[name][0], wanted, atol=1e-5, rtol=0)
    assert result["gold"] == [pytest.approx(float(gold.sum()), abs=1e-5)]
    batch = collate([group], 8)
    assert batch.mask.tolist() == [[True, True, False, False, False]]
    assert batch.answer_mask.tolist() == [[False, False, False, True, True]]


def test_a_reference_answer_is_scored_once_per_example_and_remembered_for_frozen_models(monkeypatch):
    model = random_llama(50)
    engine = LocalEngine(model, frozen={"initial": deepcopy(model)})
    groups = [*make_groups(num_groups=2), *make_groups(num_groups=2)]
    for i, group in enumerate(groups):
        group.answer_tokens = [8, 9 + i % 2]
    groups[3].example = Example("no answer", "")
    groups[3].answer_tokens = None
    passes = []
    original = LocalEngine._flat
    monkeypatch.setattr(
        LocalEngine,
        "_flat",
        lambda self, g, *a: passes.append(sum(len(x.completions) for x in g)) or original(self, g, *a),
    )
    for name, expected in (("initial", [2]), ("policy", [2, 2])):
        passes.clear()
        score = Score(name, Stream(name), per="example", level="sequence")
        for _ in range(2):
            values = engine.score(groups, [score])[name]
        assert passes == expected
        with torch.no_grad():
            plain = [float(plain_logps(model, g.contexts["prompt"], g.answer_tokens).sum()) for g in groups[:2]]
        assert values[:9] == pytest.approx([plain[0]] * 3 + [plain[1]] * 3 + [plain[0]] * 3, abs=1e-5)
        assert all(value != value for value in values[9:])  # NaN: such rows leave


def test_old_reference_and_policy_share_one_forward_pass():
    model = random_llama(50)
    calls = []
    engine = LocalEngine(model)
    model.model.register_forward_hook(lambda *_: calls.append(1))
    engine.score(make_groups(), [Score("old", Stream("old")), Score("reference", Stream("reference")), Score("p")])
    assert len(calls) == 1


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_gradient_does_not_depend_on_micro_batches(name):
    """Rows alone, padded batches, whole groups, the two-pass path with and without known pass-1 scores."""
    algorithm = ALGORITHMS[name]()
    gradients, losses = [], []
    model = random_llama(50, scale=1.5)
    old = deepcopy(model)
    with torch.no_grad():  # away from the old policy, so that every term of the loss acts
        for i, parameter in enumerate(model.parameters()):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    others = {"initial": deepcopy(old), "teacher": random_llama(50, seed=9)}
    frozen, engine = LocalEngine(old, frozen=others), LocalEngine(model, frozen=others)
    for limit, current in ((10**6, False), (60, False), (20, False), (1, False), (1, True), (20, True)):
        engine.micro_batch_tokens = limit
        engine.optimizer.zero_grad()
        groups = make_groups()
        if any(score.tokens == "answer" for score in algorithm.trained):
            for row in (row for group in groups for row in group.completions if len(row.tokens) > 2):
                row.roles = ["sampled"] * (len(row.tokens) - 2) + ["context", "answer"]
        (plan,) = algorithm.plan([Example("plan", "")], 3, np.random.default_rng(0))
        if not all(request.learn for request in plan):
            for group in groups:
                group.completions[-1].learn = False  # a baseline row: it feeds prepare and leaves
        batch = prepared(engine if current else frozen, groups, algorithm, current)
        rows = batch.learn.nonzero().squeeze(1).tolist()
        groups, batch = take_rows(groups, rows), batch.take(rows)
        scores = engine.forward_backward(groups, batch, algorithm)
        gradients.append(gradient(model))
        losses.append(float(algorithm.loss(scores, batch)))
    for other, loss in zip(gradients[1:4], losses[1:4], strict=True):
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5
        assert loss == pytest.approx(losses[0], abs=1e-6)
    # At the old parameters: pass 1 is skipped because the frozen scores are the live ones.
    assert float((gradients[5] - gradients[4]).norm() / gradients[4].norm()) < 1e-5


@pytest.mark.parametrize("limit", [60, 8192])
@pytest.mark.parametrize("algorithm", [GVPO(), GRPO(kl_coef=0.0)])
def test_the_gradient_of_a_tied_table_is_whole_and_dense(limit, algorithm):
    model = qwen2()
    engines = [LocalEngine(each, micro_batch_tokens=limit) for each in (model, deepcopy(model))]
    engines[0].model.get_input_embeddings().sparse = True
    assert not engines[1].model.get_input_embeddings().sparse  # another copy
    for engine in engines:
        groups = make_groups()
        engine.forward_backward(groups, prepared(engine, groups, algorithm), algorithm)
    table, plain = (engine.model.get_input_embeddings().weight.grad for engine in engines)
    assert table.layout == torch.strided
    torch.testing.assert_close(table, plain, atol=1e-7, rtol=1e-6)
    read = sorted({token for group in make_groups() for token in group.contexts["prompt"]})
    assert plain[read].abs().sum(-1).min() > 0
    assert engines[0].step(1e-3) == pytest.approx(engines[1].step(1e-3), rel=1e-6)


def test_a_table_adds_up_alone_what_was_read_where_it_is_tied_and_has_more_rows_than_a_pass_reads():
    found = [
        LocalEngine(model, micro_batch_tokens=limit).model.get_input_embeddings().sparse
        for model, limit in ((qwen2(), 49), (qwen2(), 50), (random_model("qwen2"), 49))
    ]
    assert found == [True, False, False]


def test_a_group_split_without_the_two_pass_path_would_be_wrong():
    """Negative control: local means change GVPO's gradient, so the test above can fail."""
    model = random_llama(50)
    groups = make_groups(num_groups=1, k=4)
    engine = LocalEngine(model)
    batch = prepared(engine, groups, GVPO())
    engine.forward_backward(groups, batch, GVPO())
    whole = gradient(model)
    engine.optimizer.zero_grad()
    for rows in ([0, 1], [2, 3]):
        engine.forward_backward(take_rows(groups, rows), batch.take(rows), GVPO())
    assert float((gradient(model) - whole).norm() / whole.norm()) > 0.05


@pytest.mark.parametrize("algorithm", [GVPO(), GRPO(kl_coef=0.0)])
def test_a_deferred_old_score_gives_the_same_gradient(algorithm):
    gradients = []
    for deferred in (False, True):
        model = random_llama(50)
        engine = LocalEngine(model, micro_batch_tokens=64)
        groups = make_groups()
        name = algorithm.frozen[0].name
        if deferred:
            batch = collate(groups, 16)
            batch = batch.with_numbers(algorithm.prepare(batch, one_process)).with_totals()
            batch = replace(batch, current={name: "policy"})
        else:
            batch = prepared(engine, groups, algorithm)
        engine.forward_backward(groups, batch, algorithm)
        gradients.append(gradient(model))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("limit", [10**6, 1])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_row_with_a_non_finite_live_score_leaves_and_totals_stay(limit, coupled):
    """Token 49 cannot be produced: its log-prob is -inf. Its row leaves; the others' gradient is as without it."""

    @dataclass(frozen=True)
    class Alone(GVPO if coupled else SFT):
        pass

    algorithm = Alone()
    results = []
    for poisoned in (True, False):
        model = random_llama(50)
        head = model.lm_head
        head.register_forward_hook(lambda _m, _i, out: torch.cat([out[..., :49], out[..., 49:] - torch.inf], -1))
        engine = LocalEngine(model, micro_batch_tokens=limit)
        groups = make_groups(num_groups=2, k=3, vocabulary=49)
        if poisoned:
            groups[0].completions.append(Completion([5, 49, 5], "", "eos"))
            groups[0].rewards.append(0.5)
        batch = collate(groups, 16)
        if coupled:
            reference = [torch.zeros(len(c.tokens)) for g in groups for c in g.completions]
            attach(groups, {"reference": reference})
            batch = collate(groups, 16)
        batch = replace(batch, totals={"groups": 2.0, "rows": 7.0, "tokens": 30.0})
        scores = engine.forward_backward(groups, batch, algorithm)
        results.append((gradient(model), scores["policy"]))
    (with_bad, scores), (without, _) = results
    assert without.isfinite().all()
    torch.testing.assert_close(with_bad, without, atol=1e-6, rtol=1e-4)
    assert [bool(s.isfinite().all()) for s in scores] == [True, True, True, False, True, True, True]


def test_step_skips_a_non_finite_gradient_and_clips():
    model = random_llama(50)
    engine = LocalEngine(model, max_grad_norm=1.0)
    before = [p.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert not engine.step(0.1) < float("inf")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for p in model.parameters())
    assert engine.step(0.1) == pytest.approx(count**0.5, rel=1e-5)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_state_restores_weights_and_moments_exactly():
    def train_once(engine: LocalEngine, seed: int) -> None:
        groups = make_groups(seed)
        engine.forward_backward(groups, prepared(engine, groups, SFT()), SFT())
        engine.step(1e-2)

    one = LocalEngine(random_llama(50))
    train_once(one, 0)
    saved = {name: value.clone() for name, value in one.state_dict().items()}
    train_once(one, 1)
    two = LocalEngine(random_llama(50, seed=5))
    two.load_state_dict(saved)
    train_once(two, 1)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def test_gradient_checkpointing_changes_no_gradient_and_dropout_never_acts():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5, attn_pdrop=0.5
        )
        model = GPT2LMHeadModel(config)
        engine = LocalEngine(model, gradient_checkpointing=checkpointing)
        groups = make_groups()
        batch = prepared(engine, groups, GVPO())
        scores = engine.forward_backward(groups, batch, GVPO())
        assert not model.training
        torch.testing.assert_close(scores["policy"], batch["reference"], atol=1e-5, rtol=0)
        gradients.append(gradient(model))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)


def test_autocast_scores_are_close_and_float32_from_the_softmax_on():
    model = random_llama(50)
    groups = make_groups()
    exact = LocalEngine(model).score(groups, [Score("p")])["p"]
    rough = LocalEngine(model, autocast=torch.bfloat16).score(groups, [Score("p")])["p"]
    difference = torch.cat(rough) - torch.cat(exact)
    assert rough[0].dtype == torch.float32
    assert 0 < float(difference.abs().max()) < 0.05


def test_scoring_keeps_no_vocabulary_sized_tensor(monkeypatch):
    """What autograd saves for the backward pass is far smaller than one (tokens x vocabulary) tensor."""
    model = random_llama(8000)
    groups = make_groups(num_groups=4, k=4, vocabulary=8000)
    engine = LocalEngine(model)
    tokens = sum(len(c.tokens) for g in groups for c in g.completions)
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel())
        return tensor

    batch = prepared(engine, groups, SFT())
    original = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_a, **_k: None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        engine.forward_backward(groups, batch, SFT())
    monkeypatch.setattr(torch.Tensor, "backward", original)
    assert tokens * 8000 > 4 * max(sizes)


def test_projection_applies_the_models_softcap():
    model = random_llama(50)
    hidden = torch.randn(3, 32) * 10
    plain = project(model, hidden)
    model.config.final_logit_softcapping = 2.0
    torch.testing.assert_close(project(model, hidden), 2 * torch.tanh(plain / 2))
