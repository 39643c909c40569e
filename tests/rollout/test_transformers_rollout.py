"""The plain rollout engine: what it samples, the log-probs it returns, and what ends a completion."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from covary.engines.local import LocalEngine
from covary.rollout.decoding import CachedDecoding, SharedDecoding
from covary.rollout.linear import good_rows
from covary.rollout.sampling import sample_tokens
from covary.rollout.transformers import TransformersRollout
from covary.types import Completion, Example, Group, Request, Sampling, UserError

SENTENCES = [
    "the answer is twelve, so we stop here and now",
    "twelve and seven make nineteen; the answer is nineteen",
    "so the answer is seven. stop here, think again",
]
PROMPTS = ["the answer", "so we stop here and think", "a", "twelve and seven make nineteen; the"]


def build_tokenizer(pad: str = "<pad>") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330,
        special_tokens=["<end>", "<pad>", "<think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token=pad,
        additional_special_tokens=["<think>"],
    )


TOKENIZER = build_tokenizer()
VOCABULARY = len(TOKENIZER)


def token_id(token: str) -> int:
    index = TOKENIZER.convert_tokens_to_ids(token)
    assert isinstance(index, int)
    return index


def encode(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


END = token_id("<end>")
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
SMALL: dict[str, Any] = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | changes))


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**COMMON, n_positions=96, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2))


def qwen2() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SMALL))


def gemma3() -> PreTrainedModel:
    """Every other layer sees 6 tokens only, fewer than the prompts and completions have."""
    torch.manual_seed(0)
    config: dict[str, Any] = SMALL | {"initializer_range": 0.1, "head_dim": 8, "sliding_window": 6}
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**config, layer_types=layers))


def group(number: int, prompt: str | None = None, **contexts: str) -> Group:
    prompt = PROMPTS[number % len(PROMPTS)] if prompt is None else prompt
    ids = {name: encode(text) for name, text in contexts.items()}
    return Group(Example(id=f"e{number}", prompt=prompt), {"prompt": encode(prompt)} | ids)


def sample(engine: TransformersRollout, groups: list[Group], sampling: Sampling, *requests: Request) -> list[Group]:
    return engine.generate([list(requests)] * len(groups), groups, sampling, seed=7)


def plain_logits(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Logits (T, V) that predict the tokens of `completion`: one forward, no cache, no padding."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt + completion])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


def assert_logps_are_the_models(model: PreTrainedModel, done: Group, temperature: float) -> None:
    for completion in done.completions:
        logits = plain_logits(model, done.contexts[completion.context], completion.tokens)
        divisor = 1.0 if completion.greedy else temperature
        expected = (logits / divisor).log_softmax(-1)
        expected = expected[torch.arange(len(completion.tokens)), completion.tokens]
        torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=1e-4, rtol=0)


def same(first: Completion, second: Completion) -> bool:
    """Equal in everything, log-probs up to float rounding."""
    close = np.allclose(first.logps or [], second.logps or [], atol=1e-4)
    return close and replace(first, logps=None) == replace(second, logps=None)


# --- log-probs: the contract with scoring ---------------------------------------------------------


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of as many rows as there are, which a test can count."""
    monkeypatch.setattr("covary.rollout.decoding.good_rows", lambda rows: rows)


@pytest.mark.parametrize("build", [llama, gpt2, qwen2, gemma3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("kind", [SharedDecoding, CachedDecoding])
def test_logps_equal_a_plain_forward_at_the_rollout_temperature(
    build: Callable[[], PreTrainedModel], temperature: float, kind: type
) -> None:
    model = build()
    # More end ids than one make the lengths ragged, so that rows leave the batch on the way.
    model.generation_config.eos_token_id = [END, *range(10, VOCABULARY, 6)]
    engine = TransformersRollout(model, TOKENIZER)
    assert engine._decoding is SharedDecoding
    engine._decoding = kind
    sizes: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda *args: sizes.append(args[-1].numel() // VOCABULARY))
    groups = [group(number) for number in range(4)]
    done = sample(
        engine,
        groups,
        Sampling(max_tokens=14, temperature=temperature),
        Request(5),
        Request(1, decoding="greedy"),
    )
    hook.remove()
    lengths = [len(completion.tokens) for each in done for completion in each.completions]
    assert len(set(lengths)) > 3
    assert sizes[0] == 4  # each prompt once, then every row that goes on
    going_on = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    if kind is SharedDecoding:
        assert sizes[1:] == [good_rows(rows) for rows in going_on]
    else:
        assert all(needed <= read <= 2 * needed for needed, read in zip(going_on, sizes[1:], strict=True))
    for each in done:
        assert_logps_are_the_models(model, each, temperature)


def test_autocast_runs_the_forward_passes_in_its_type() -> None:
    model = llama()
    engine = TransformersRollout(model, TOKENIZER, autocast=torch.bfloat16)
    dtypes = []
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    (done,) = sample(engine, [group(1)], Sampling(max_tokens=6), Request(3))
    assert set(dtypes) == {torch.bfloat16}
    for completion in done.completions:
        logits = plain_logits(model, done.contexts["prompt"], completion.tokens)
        expected = logits.log_softmax(-1)[torch.arange(len(completion.tokens)), completion.tokens]
        torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=0.3, rtol=0)


def test_greedy_is_an_argmax_loop_with_untempered_logps() -> None:
    model = llama()
    (done,) = sample(
        TransformersRollout(model, TOKENIZER),
        [group(0)],
        Sampling(max_tokens=10, temperature=0.3),
        Request(1, decoding="greedy"),
    )
    prompt, expected = done.contexts["prompt"], []
    while len(expected) < 10 and END not in expected:
        expected.append(int(plain_logits(model, prompt, [*expected, 0])[-1].argmax()))
    assert done.completions[0].tokens == expected
    assert_logps_are_the_models(model, done, temperature=0.3)


def test_temperature_zero_serves_greedy_requests_only() -> None:
    engine = TransformersRollout(llama(), TOKENIZER)
    sampling = Sampling(max_tokens=3, temperature=0.0)
    (done,) = sample(engine, [group(0)], sampling, Request(1, decoding="greedy"))
    assert all(math.isfinite(logp) for logp in done.completions[0].logps or [])
    with pytest.raises(ValueError, match=r"temperature is 0\.0, sampling needs one above 0"):
        sample(engine, [group(0)], sampling, Request(1))


# --- the distribution that is sampled ------------------------------------------------------------


def test_frequencies_match_the_softmax() -> None:
    model = llama(vocab_size=7, eos_token_id=6, initializer_range=0.5)
    engine = TransformersRollout(model, TOKENIZER)
    prompt = Group(Example(id="x", prompt=""), {"prompt": [1, 2, 3]})
    rows = 4000
    (done,) = sample(engine, [prompt], Sampling(max_tokens=1, temperature=2.5), Request(rows))
    counts = np.bincount([c.tokens[0] for c in done.completions], minlength=7)
    expected = rows * (plain_logits(model, [1, 2, 3], [0])[0] / 2.5).softmax(-1).numpy()
    assert expected.min() > 5
    # 99.9% quantile of chi-square with 6 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 22.5


def test_frequencies_over_a_vocabulary_of_many_bins_match_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1000) * 2
    rows = 50_000
    uniforms = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).random(rows))
    tokens, logps = sample_tokens(logits.expand(rows, -1).clone(), torch.ones(rows), torch.zeros(rows).bool(), uniforms)
    torch.testing.assert_close(logps, logits.log_softmax(-1)[tokens])
    expected = rows * logits.softmax(-1)
    counts = torch.bincount(tokens, minlength=1000)
    often = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[often].sum()
    degrees = int(often.sum())
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("vocabulary", [1, 5, 256, 257, 1000])
def test_excluded_tokens_are_never_chosen_at_the_edges_of_the_uniform_number(
    vocabulary: int,
) -> None:
    torch.manual_seed(0)
    # 1 is no uniform number; it stands for one that rounding has pushed to the end of the running sum.
    edges = torch.tensor([0.0, 5e-324, 1e-300, 0.5, 1 - 2**-24, 1 - 2**-53, 1.0], dtype=torch.float64)
    for allowed in ([0], [vocabulary // 2], [vocabulary - 1], [0, vocabulary // 2]):
        logits = torch.full((len(edges), vocabulary), -math.inf)
        logits[:, allowed] = torch.randn(len(edges), len(allowed)) * 3
        tokens, logps = sample_tokens(logits, torch.full((len(edges),), 0.7), torch.zeros(len(edges)).bool(), edges)
        assert set(tokens.tolist()) <= set(allowed)
        torch.testing.assert_close(logps, (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_a_row_of_nan_logits_is_marked_by_its_logps() -> None:
    logits = torch.zeros(2, 300)
    logits[1] = math.nan
    tokens, logps = sample_tokens(
        logits, torch.ones(2), torch.zeros(2).bool(), torch.full((2,), 0.5, dtype=torch.float64)
    )
    assert tokens[0] == 150
    assert 0 <= tokens[1] < 300
    assert logps.isnan().tolist() == [False, True]


class MaskedLlama(LlamaForCausalLM):
    """Gives most of the vocabulary no probability."""

    allowed = (20, 40, 60, VOCABULARY - 2)

    def forward(self, *args: Any, **kwargs: Any):
        output = super().forward(*args, **kwargs)
        assert output.logits is not None
        excluded = torch.ones(VOCABULARY, dtype=torch.bool)
        excluded[list(self.allowed)] = False
        output.logits[..., excluded] = -math.inf
        return output


def test_tokens_of_logit_minus_infinity_are_never_sampled() -> None:
    torch.manual_seed(0)
    model = MaskedLlama(LlamaConfig(**SMALL))
    (done,) = sample(
        TransformersRollout(model, TOKENIZER),
        [group(0)],
        Sampling(max_tokens=10, temperature=2.0),
        Request(200),
    )
    assert {token for c in done.completions for token in c.tokens} == set(MaskedLlama.allowed)
    assert_logps_are_the_models(model, done, temperature=2.0)


def test_the_checkpoints_generation_defaults_change_nothing() -> None:
    plain, configured = llama(), llama()
    configured.generation_config.update(
        do_sample=True, top_k=1, top_p=0.1, temperature=0.1, repetition_penalty=1.3, max_length=2
    )
    sampling = Sampling(max_tokens=8)
    (first,) = sample(TransformersRollout(plain, TOKENIZER), [group(0)], sampling, Request(8))
    (second,) = sample(TransformersRollout(configured, TOKENIZER), [group(0)], sampling, Request(8))
    assert first.completions == second.completions
    assert len({tuple(completion.tokens) for completion in second.completions}) > 1
    assert_logps_are_the_models(configured, second, temperature=1.0)


# --- seeds: a row's sample is its own -------------------------------------------------------------


def test_samples_do_not_depend_on_the_company_a_row_keeps() -> None:
    engine = TransformersRollout(llama(), TOKENIZER)
    one_at_a_time = TransformersRollout(engine.model, TOKENIZER, cache_bytes=1)
    in_waves = TransformersRollout(engine.model, TOKENIZER, cache_bytes=50_000)
    groups = [group(number) for number in range(4)]
    sampling = Sampling(max_tokens=12)
    together = sample(engine, groups, sampling, Request(3), Request(2))
    alone = [sample(engine, [each], sampling, Request(3), Request(2))[0] for each in groups]
    reverse = sample(engine, groups[::-1], sampling, Request(3), Request(2))[::-1]
    single = sample(one_at_a_time, groups, sampling, Request(3), Request(2))
    waves = sample(in_waves, groups, sampling, Request(3), Request(2))
    for other in (alone, reverse, single, waves):
        assert [each.example for each in other] == [each.example for each in groups]
        for expected, got in zip(together, other, strict=True):
            assert all(map(same, expected.completions, got.completions))
    other_seed = engine.generate([[Request(5)]] * 4, groups, sampling, seed=8)
    assert other_seed[0].completions != together[0].completions


@pytest.mark.parametrize("kind", [SharedDecoding, CachedDecoding])
def test_cache_bytes_bounds_keys_values_and_logits(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_bytes = 60_000
    engine = TransformersRollout(llama(), TOKENIZER, cache_bytes=cache_bytes)
    engine._decoding = kind
    rows, used = [], []
    step = kind.step

    def watched(decoding: Any, tokens: torch.Tensor) -> None:
        step(decoding, tokens)
        if kind is SharedDecoding:
            layers = decoding._caches.values()
            caches = [x for layer in layers for x in (layer.prompt_key, layer.prompt_value, layer.key, layer.value)]
        else:
            caches = [x for layer in decoding._cache.layers for x in (layer.keys, layer.values)]
        rows.append(len(decoding.logits))
        # Sampling has three float32 numbers per vocabulary entry.
        used.append(sum(x.numel() * x.element_size() for x in caches) + 12 * decoding.logits.numel())

    monkeypatch.setattr(kind, "step", watched)
    sample(engine, [group(number) for number in range(4)], Sampling(max_tokens=12), Request(4))
    assert max(rows) > 4
    assert max(used) <= cache_bytes


def test_rows_that_wait_take_the_places_of_rows_that_finished(unpadded: None) -> None:
    model = llama()
    model.generation_config.eos_token_id = [END, *range(10, VOCABULARY, 12)]
    engine = TransformersRollout(model, TOKENIZER, cache_bytes=420_000)
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda *args: sizes.append(args[-1].numel() // VOCABULARY))
    done = sample(engine, [group(number) for number in range(4)], Sampling(max_tokens=60), Request(32))
    lengths = [len(row.tokens) for each in done for row in each.completions]
    room = 20
    assert max(sizes) == room
    waves = sum(max(lengths[start : start + room]) for start in range(0, len(lengths), room))
    assert max(lengths) > 2 * sum(lengths) / len(lengths)
    assert len(sizes) < 0.7 * waves
    for each in done:
        assert_logps_are_the_models(model, each, temperature=1.0)


def test_more_rows_fit_when_the_long_prompts_are_done() -> None:
    model = llama()
    engine = TransformersRollout(model, TOKENIZER, cache_bytes=200_000)
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda *args: sizes.append(args[-1].numel() // VOCABULARY))
    groups = [
        group(number, prompt=f"{number} " + "twelve and seven make nineteen; " * (12 if number < 4 else 1))
        for number in range(24)
    ]
    done = sample(engine, groups, Sampling(max_tokens=10), Request(1))
    assert max(sizes) > 1.5 * sizes[1]
    for each in done:
        assert_logps_are_the_models(model, each, temperature=1.0)


def test_a_prompt_is_read_once_for_all_its_rows_wherever_they_begin(unpadded: None) -> None:
    model = llama()
    engine = TransformersRollout(model, TOKENIZER, cache_bytes=60_000)
    read: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    each = group(0, prompt="twelve and seven make nineteen; the answer is nineteen, so we stop here and now")
    (done,) = sample(engine, [each], Sampling(max_tokens=6), Request(40))
    assert len(read) > 12  # several times six: not all rows fit at once
    assert sum(read) == len(each.contexts["prompt"]) + sum(len(row.tokens) - 1 for row in done.completions)


def test_an_example_that_occurs_twice_gets_different_rows() -> None:
    engine = TransformersRollout(llama(), TOKENIZER)
    sampling = Sampling(max_tokens=12)
    first, second = sample(engine, [group(0), group(0)], sampling, Request(3))
    (six,) = sample(engine, [group(0)], sampling, Request(6))
    assert len({tuple(c.tokens) for c in first.completions + second.completions}) == 6
    assert all(map(same, first.completions + second.completions, six.completions))


def test_a_longer_limit_only_continues_a_row() -> None:
    engine = TransformersRollout(llama(), TOKENIZER)
    (short,) = sample(engine, [group(0)], Sampling(max_tokens=4), Request(4))
    (long,) = sample(engine, [group(0)], Sampling(max_tokens=12), Request(4))
    for first, second in zip(short.completions, long.completions, strict=True):
        assert second.tokens[:4] == first.tokens


# --- what ends a completion -----------------------------------------------------------------------


class Scripted(LlamaForCausalLM):
    """Says `script` after a prompt of `prompt_length` tokens, whatever else it is given."""

    def __init__(self, script: list[int], prompt_length: int) -> None:
        super().__init__(LlamaConfig(**SMALL))
        self.script = script
        self.prompt_length = prompt_length

    def forward(self, *args: Any, **kwargs: Any):
        output = super().forward(*args, **kwargs)
        assert output.logits is not None
        step = int(kwargs["position_ids"][0, -1]) + 1 - self.prompt_length
        output.logits[:] = -math.inf
        output.logits[..., self.script[step]] = 0
        return output


def say(script: list[int] | str, max_tokens: int = 40, stop: tuple[str, ...] = (), **tokenizer: str) -> Completion:
    tokens = encode(script) if isinstance(script, str) else script
    each = group(0)
    model = Scripted([*tokens, END], len(each.contexts["prompt"]))
    engine = TransformersRollout(model, build_tokenizer(**tokenizer))
    (done,) = sample(engine, [each], Sampling(max_tokens, stop=stop), Request(1))
    return done.completions[0]


def byte_tokens(text: str) -> list[int]:
    """One token per UTF-8 byte."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [token_id(letter) for piece, _ in letters for letter in piece]


def test_the_end_token_belongs_to_the_tokens_and_not_to_the_text() -> None:
    completion = say("the answer")
    assert completion.finish == "eos"
    assert completion.tokens == [*encode("the answer"), END]
    assert completion.text == "the answer"
    assert completion.logps == [0.0] * len(completion.tokens)


def test_a_truncated_row_has_no_end_token() -> None:
    tokens = encode("the answer is seven")
    completion = say(tokens, max_tokens=len(tokens))
    assert completion.finish == "length"
    assert completion.tokens == tokens
    assert completion.text == "the answer is seven"
    assert say(tokens, max_tokens=len(tokens) + 1).finish == "eos"
    assert say(tokens, max_tokens=1).tokens == tokens[:1]


@pytest.mark.parametrize(
    ("end", "end_ids"),
    [([5, 9], {END, 7, 8, 5, 9}), (9, {END, 7, 8, 9}), (None, {END, 7, 8})],
)
def test_every_end_id_ends_a_completion(end: list[int] | int | None, end_ids: set[int]) -> None:
    model = llama(eos_token_id=[7, 8])
    model.generation_config.eos_token_id = end
    engine = TransformersRollout(model, TOKENIZER)
    assert engine.end_ids == end_ids
    (done,) = sample(engine, [group(0)], Sampling(max_tokens=30, temperature=3.0), Request(200))
    for completion in done.completions:
        ended = completion.tokens[-1] in engine.end_ids
        assert completion.finish == ("eos" if ended else "length")
        assert not engine.end_ids & set(completion.tokens[:-1])
    assert {c.tokens[-1] for c in done.completions if c.finish == "eos"} == engine.end_ids


def test_a_pad_token_that_is_the_end_token_changes_nothing() -> None:
    assert say("the answer") == say("the answer", pad="<end>")
    model = llama()
    groups = [group(number) for number in range(3)]
    sampling = Sampling(max_tokens=6)
    first = sample(TransformersRollout(model, TOKENIZER), groups, sampling, Request(2))
    second = sample(TransformersRollout(model, build_tokenizer(pad="<end>")), groups, sampling, Request(2))
    assert first == second


def test_special_tags_stay_in_the_text() -> None:
    think = token_id("<think>")
    assert think in TOKENIZER.all_special_ids
    assert say([think, *encode("so , we")]).text == "<think>so , we"


def test_a_stop_string_across_tokens_ends_the_tokens_and_is_cut_from_the_text() -> None:
    tokens = byte_tokens("so </answer> and more")
    completion = say(tokens, stop=("</answer>",))
    assert completion.finish == "stop_string"
    assert completion.text == "so "
    assert completion.tokens == tokens[: len(b"so </answer>")]
    assert len(completion.logps or []) == len(completion.tokens)


def test_a_token_may_carry_characters_beyond_the_stop_string() -> None:
    tokens = encode("we answer")
    assert TOKENIZER.decode(tokens[-1]) == " answer"
    completion = say(tokens, stop=("e ans",))
    assert (completion.finish, completion.text) == ("stop_string", "w")
    assert completion.tokens == tokens


def test_a_stop_string_at_the_very_start_leaves_no_text() -> None:
    completion = say("the answer", stop=("the",))
    assert (completion.finish, completion.text) == ("stop_string", "")


def test_a_stop_string_of_several_bytes_per_character() -> None:
    tokens = byte_tokens("é→é→→→→→x")
    completion = say(tokens, stop=("→→→→→",))
    assert (completion.finish, completion.text) == ("stop_string", "é→é")
    assert completion.tokens == tokens[:-1]


def test_a_special_token_may_be_a_stop_string() -> None:
    think = token_id("<think>")
    completion = say([*encode("so"), think], stop=("<think>",))
    assert (completion.finish, completion.text) == ("stop_string", "so")


def test_the_earliest_of_several_stop_strings_cuts_the_text() -> None:
    tokens = encode("we answer")
    assert say(tokens, stop=("answer", "e a")).text == "w"
    assert say(tokens, stop=("e a", "answer")).text == "w"


def test_a_stop_string_far_into_a_long_text() -> None:
    text = "seven nineteen twelve " * 3
    completion = say(byte_tokens(text + "\n\nQ: more")[:90], max_tokens=90, stop=("\n\nQ:", "zzz"))
    assert (completion.finish, completion.text) == ("stop_string", text)


def test_a_stop_string_that_never_comes() -> None:
    completion = say("the answer", stop=("nowhere",))
    assert (completion.finish, completion.text) == ("eos", "the answer")
    cut_short = say(byte_tokens("so </answer>"), max_tokens=11, stop=("</answer>",))
    assert (cut_short.finish, cut_short.text) == ("length", "so </answer")


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    completion = say(byte_tokens("so </answer>"), max_tokens=12, stop=("</answer>",))
    assert (completion.finish, completion.text) == ("stop_string", "so ")


def test_nothing_is_decoded_on_the_way_without_stop_strings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = build_tokenizer()
    calls: list[list[int]] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: calls.append(ids) or decode(ids, **options))
    engine = TransformersRollout(llama(), tokenizer)
    sample(engine, [group(0)], Sampling(max_tokens=8), Request(4))
    assert len(calls) == 4


# --- requests, groups, the model around it --------------------------------------------------------


def test_requests_are_answered_in_order_under_their_context() -> None:
    model = llama()
    each = group(0, posterior="so the answer is seven. the")
    each.answer_tokens = [1, 2]
    each.completions = [Completion([1], "x", "eos")]
    engine = TransformersRollout(model, TOKENIZER)
    engine.load_weights(None, version=3)
    plan = [
        Request(2, context="posterior"),
        Request(1, decoding="greedy", learn=False),
        Request(0),
        Request(2),
    ]
    (done,) = engine.generate([plan], [each], Sampling(max_tokens=6, temperature=0.8), seed=0)
    assert done is not each
    assert (done.example, done.contexts, done.answer_tokens) == (
        each.example,
        each.contexts,
        [1, 2],
    )
    assert len(each.completions) == 1
    assert done.rewards is None
    kinds = [(c.context, c.greedy, c.learn) for c in done.completions]
    assert kinds == [
        ("posterior", False, True),
        ("posterior", False, True),
        ("prompt", True, False),
        ("prompt", False, True),
        ("prompt", False, True),
    ]
    assert {(c.source, c.weights_version, c.roles) for c in done.completions} == {("policy", 3, None)}
    assert_logps_are_the_models(model, done, temperature=0.8)


def test_plans_may_differ_and_be_empty() -> None:
    engine = TransformersRollout(llama(), TOKENIZER)
    done = engine.generate(
        [[Request(1)], [], [Request(3)]],
        [group(0), group(1), group(2)],
        Sampling(max_tokens=2),
        seed=0,
    )
    assert [len(each.completions) for each in done] == [1, 0, 3]
    assert engine.generate([], [], Sampling(max_tokens=2), seed=0) == []


def test_modes_of_the_model_are_restored_and_dropout_is_off() -> None:
    model = llama(attention_dropout=0.9)
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    engine = TransformersRollout(model, TOKENIZER)
    (done,) = sample(engine, [group(0)], Sampling(max_tokens=4), Request(2))
    assert [module.training for module in model.modules()] == before
    assert_logps_are_the_models(model, done, temperature=1.0)


def test_a_model_set_up_for_training_samples_and_trains_on() -> None:
    model = llama(use_cache=False)
    LocalEngine(model, gradient_checkpointing=True)
    model.train()
    (done,) = sample(TransformersRollout(model, TOKENIZER), [group(1)], Sampling(max_tokens=8), Request(2))
    ids = torch.tensor([group(1).contexts["prompt"]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_logps_are_the_models(model, done, temperature=1.0)


def test_progress_counts_finished_rows() -> None:
    engine = TransformersRollout(llama(), TOKENIZER, cache_bytes=20_000)
    calls: list[tuple[int, int]] = []
    engine.on_progress = lambda finished, total: calls.append((finished, total))
    sample(engine, [group(0), group(1)], Sampling(max_tokens=5), Request(4))
    assert calls[-1] == (8, 8)
    finished = [count for count, _ in calls]
    assert len(finished) > 1
    assert finished == sorted(set(finished))


# --- mistakes -------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    engine = TransformersRollout(llama(), TOKENIZER)
    sampling = Sampling(max_tokens=4)
    with pytest.raises(ValueError, match=r"'e0'.*'teacher'.*samples the policy only"):
        sample(engine, [group(0)], sampling, Request(1, source="teacher"))
    with pytest.raises(ValueError, match=r"'e0', context 'posterior' is not one of \['prompt'\]"):
        sample(engine, [group(0)], sampling, Request(1, context="posterior"))
    with pytest.raises(UserError, match="'e0', context 'prompt': the prompt has no tokens"):
        sample(engine, [group(0, prompt="")], sampling, Request(1))
    with pytest.raises(ValueError, match="max_tokens is 0, it must be at least 1"):
        sample(engine, [group(0)], Sampling(max_tokens=0), Request(1))


def test_a_prompt_beyond_the_models_context_is_named() -> None:
    engine = TransformersRollout(gpt2(), TOKENIZER)
    each = Group(Example(id="long", prompt=""), {"prompt": [5] * 90})
    sample(engine, [each], Sampling(max_tokens=6), Request(1))
    with pytest.raises(UserError, match=r"'long'.* 90 tokens and max_tokens = 7 .* context of 96 tokens"):
        sample(engine, [each], Sampling(max_tokens=7), Request(1))
