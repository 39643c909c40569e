"""Packed trees give the scores and gradients of padded rows, in every model family, or are not used."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from covary.algorithms import GRPO, GVPO
from covary.collate import collate
from covary.engines.local import LocalEngine
from covary.scoring import padded, trees
from covary.scoring.score import RowSize, row_sizes, score_groups
from covary.types import Completion, Example, Group, Score, Stream

VOCABULARY = 50
WINDOW = 16
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def _gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512,
                                      initializer_range=0.3))  # fmt: skip


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
    ),
    "gpt2": _gpt2,
}


@cache
def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    assert trees.use_trees(model) is None
    return model


def make_groups(shapes: list[tuple[int, list[int]]], seed: int = 0) -> list[Group]:
    """(prompt length, completion lengths) of each group."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    return [
        Group(
            Example(str(g), ""),
            {"prompt": ids(prompt), "other": ids(3)},
            [Completion(ids(n), "", "eos", numbers={"reference": -2 * torch.rand(n)}) for n in rows],
            [rng.random() for _ in rows],
        )
        for g, (prompt, rows) in enumerate(shapes)
    ]


def logps(model: PreTrainedModel, groups: list[Group], layout, context: str = "prompt") -> torch.Tensor:
    score = Score("policy", Stream("policy", context))
    return score_groups(layout.forward, {"policy": model}, groups, [score], 1.0)["policy"].values


def assert_alike(model: PreTrainedModel, groups: list[Group]) -> None:
    """The same numbers in float64; in float32 as near to them as padded rows are, which round too, and 1e-5."""
    weights = torch.randn(sum(len(row.tokens) for group in groups for row in group.completions))

    def values_and_gradient(layout) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        values = logps(model, groups, layout)
        (values * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return values.detach().double(), gradient.double()

    (plain, plain_gradient), (packed, packed_gradient) = map(values_and_gradient, (padded, trees))
    try:
        model.double()
        (exact, exact_gradient), (exact_packed, exact_packed_gradient) = map(values_and_gradient, (padded, trees))
    finally:
        model.float()
    torch.testing.assert_close(exact_packed, exact, atol=0, rtol=3e-7)  # log-probs are float32
    torch.testing.assert_close(packed, exact, atol=1e-5 + float((plain - exact).abs().max()), rtol=0)
    assert float((exact_packed_gradient - exact_gradient).norm() / exact_gradient.norm()) < 1e-6
    assert float((packed_gradient - plain_gradient).norm() / plain_gradient.norm()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, [1])],
        [(1, [1, 1]), (2, [1])],
        [(5, [4, 1, 9]), (12, [2])],
        [(300, [3, 40, 1]), (30, [20] * 16), (1, [1])],
    ],
    ids=["one token", "nothing but first tokens", "ragged", "long"],
)
def test_scores_and_gradients_of_padded_rows(family, shapes):
    torch.manual_seed(1)
    assert_alike(model_of(family), make_groups(shapes))


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 24), min_size=1, max_size=16)), min_size=1, max_size=4
    ),
    family=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 99),
)
def test_any_ragged_groups(shapes, family, seed):
    torch.manual_seed(seed)
    assert_alike(model_of(family), make_groups(shapes, seed))


def test_a_wrong_position_or_mask_would_be_seen():
    """Negative control: the tolerance above is far below what a branch that sees its neighbour's tokens does."""
    groups = make_groups([(5, [4, 6])])
    model = model_of("llama")
    joined = Completion(groups[0].completions[0].tokens + groups[0].completions[1].tokens, "", "eos")
    one = [Group(groups[0].example, groups[0].contexts, [joined])]
    with torch.no_grad():
        assert float((logps(model, one, padded) - logps(model, groups, trees)).abs().max()) > 0.1


@pytest.mark.parametrize("algorithm", [GVPO(), GRPO(kl_coef=0.0)], ids=["coupled", "row by row"])
@pytest.mark.parametrize("limit", [8, 60, 8192])
def test_engine_gradients_do_not_depend_on_the_layout(algorithm, limit):
    gradients = []
    for layout in (padded, trees):
        torch.manual_seed(0)
        model = FAMILIES["qwen2"]()
        engine = LocalEngine(model, micro_batch_tokens=limit)
        assert engine.not_packed is None
        engine._layout = layout
        groups = make_groups([(5, [4, 6, 1]), (9, [2, 2, 8]), (3, [7, 5, 5])])
        for group in groups:
            for row in group.completions:
                row.numbers["old"] = row.numbers["reference"]
        batch = collate(groups, 16)
        batch = batch.with_numbers({"advantage": batch.rewards - 0.5}).with_totals(algorithm.normalisers)
        engine.forward_backward(groups, batch, algorithm)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    plain, packed = gradients
    assert float((packed - plain).norm() / plain.norm()) < 1e-5


def test_one_token_that_is_not_finite_stays_in_its_row():
    torch.manual_seed(0)
    model = FAMILIES["llama"]()
    assert trees.use_trees(model) is None
    groups = make_groups([(5, [4, 6]), (3, [3, 1])])
    bad = VOCABULARY - 1
    for group in groups:
        for ids in (group.contexts["prompt"], *(row.tokens for row in group.completions)):
            ids[:] = [token % bad for token in ids]
    groups[0].completions[1].tokens[0] = bad
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
        model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=False)
        scores = score_groups(trees.forward, {"policy": model}, groups, [Score("p")], 1.0)["p"]
    finite = torch.ones(4, dtype=torch.bool)
    finite[scores.row[~scores.values.isfinite()]] = False
    assert finite.tolist() == [True, False, True, True]


def test_a_family_that_cannot_pack_is_left_as_it_was():
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, attn_logit_softcapping=5.0)).eval()
    before = model.config._attn_implementation
    why = trees.use_trees(model)
    assert why is not None
    assert "soft cap" in why
    assert model.config._attn_implementation == before
    engine = LocalEngine(model)
    assert engine.not_packed == why
    groups = make_groups([(5, [4, 6]), (3, [3, 1])])
    scored = torch.cat(engine.score(groups, [Score("p")])["p"])
    with torch.no_grad():
        torch.testing.assert_close(scored, logps(model, groups, padded))


def test_a_model_that_attends_differently_is_noticed(monkeypatch):
    """The check compares numbers: here positions are ignored by the packed pass."""
    model = FAMILIES["gpt2"]().eval()
    whole = model.transformer.forward

    def forward(*args, position_ids=None, layout=None, **kwargs):
        if layout is not None:
            position_ids = torch.zeros_like(position_ids)
        return whole(*args, position_ids=position_ids, layout=layout, **kwargs)

    monkeypatch.setattr(model.transformer, "forward", forward)
    why = trees.use_trees(model)
    assert why is not None
    assert "differ" in why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"]}, "it has layers of type chunked_attention"),
        ({"sliding_window": 4096}, "its layers do not tell their sliding window"),
        ({"layer_types": ["sliding_attention"] * 2}, "its layers do not tell their sliding window"),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 4096}, None),
    ],
)
def test_what_only_long_sequences_would_show_is_read_from_the_configuration(changes, why):
    """A mask that is not read may restrict what a layer sees beyond the few tokens that are compared."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    before = model.config._attn_implementation
    for name, value in changes.items():
        setattr(model.config, name, value)
    assert trees.use_trees(model) == why
    assert (model.config._attn_implementation == before) is (why is not None)


def test_generation_and_plain_forward_passes_stay_those_of_transformers():
    torch.manual_seed(0)
    model = FAMILIES["gemma3"]().eval()
    ids = torch.randint(VOCABULARY, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        assert trees.use_trees(model) is None
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 7:], before[:, 7:], atol=1e-5, rtol=0)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    limit=st.integers(1, 200),
    layout=st.sampled_from([padded, trees]),
)
def test_micro_batches_hold_every_row_once_within_the_limit(groups, limit, layout):
    sizes = row_sizes(make_groups([(prompt, list(rows)) for prompt, rows in groups]), [Score("p")])
    units: dict[int, list[int]] = {}
    for i, size in enumerate(sizes):
        units.setdefault(size.group, []).append(i)
    batches = list(layout.fit(list(units.values()), sizes, limit))
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        whole = {sizes[i].group for i in batch}
        assert sorted(i for g in whole for i in units[g]) == batch
        assert len(whole) == 1 or _tokens(layout, [sizes[i] for i in batch]) <= limit


def _tokens(layout, rows: list[RowSize]) -> int:
    if layout is padded:
        return len(rows) * max(row.prompt + row.completion for row in rows)
    prompts = {row.group: row.prompt for row in rows}
    return sum(prompts.values()) + sum(row.completion for row in rows)
