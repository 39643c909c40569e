"""The arithmetic of benchmarks on numbers given by hand, and covary's side of the comparison on a random model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import growth, limits, vs_trl, vs_trl_side
from covary.models.loading import load_model, load_tokenizer
from covary.rollout.transformers import TransformersRollout
from covary.scoring import trees
from tests.models import byte_tokenizer, random_llama, save_random_model

# -- limits ------------------------------------------------------------------------------------------------------


def test_operations_of_an_update_counted_by_hand() -> None:
    shape = limits.Shape(hidden=4, inner=6, layers=2, heads=2, kv_heads=1, head=2, vocabulary=10)
    # One layer: queries 4x4, keys and values 2x4 each, output 4x4, MLP 3 of 6x4.
    assert sum(outputs * inputs for outputs, inputs in shape.matrices) == 16 + 8 + 8 + 16 + 72
    needed = limits.update_operations(shape, [(3, [2, 1])])
    # Read: 3 of the prompt, 1 of the first completion, none of the second.
    assert needed["layers"] == 3 * 2 * 2 * 120 * 4
    # Scored: 2 + 1.
    assert needed["projection"] == 3 * 2 * 10 * 4 * 3
    # The prompt's tokens see 1 + 2 + 3, the branch's one sees the prompt and itself; two products of width 4 a layer.
    assert needed["attention"] == 3 * 2 * 2 * 2 * 4 * (6 + 4)


def test_operations_of_groups_add_up() -> None:
    shape = limits.Shape(hidden=4, inner=6, layers=2, heads=2, kv_heads=1, head=2, vocabulary=10)
    groups = [(5, [3, 4]), (2, [7])]
    each = [limits.update_operations(shape, [group]) for group in groups]
    assert limits.update_operations(shape, groups) == {name: each[0][name] + each[1][name] for name in each[0]}


def test_the_shape_is_that_of_the_model() -> None:
    model, _, shape = limits.smollm2_shape()
    linear = sorted(tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert linear == sorted([*shape.matrices * shape.layers, (shape.vocabulary, shape.hidden)])


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = limits.Shape(hidden=32, inner=64, layers=2, heads=2, kv_heads=2, head=16, vocabulary=259)
    monkeypatch.setattr(limits, "smollm2_shape", lambda: (random_llama(), byte_tokenizer(), shape))


@pytest.mark.usefixtures("small_model")
def test_limits_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TIMED_OPERATIONS", 1e6)
    monkeypatch.setattr(limits, "SQUARES", (64,))
    results: dict[str, Any] = {dtype: limits.measure(dtype, rounds=1) for dtype in ("float32", "bfloat16")}
    for found in results.values():
        assert found["rate_gflops"] == max(found["rates_gflops"].values()) > 0
        assert found["update_s"] == found["gradient_s"] + found["optimizer_s"]
        assert found["update_floor_s"] > 0  # how far below is a matter of time, which no test measures
        assert found["update_share_of_rate"] == pytest.approx(found["update_floor_s"] / found["update_s"])
        assert found["decode_ratio"] == pytest.approx(found["decode_step_ms"] / found["decode_floor_ms"])
    text = limits.page(results | {"threads": 1, "rounds": 1, "torch": "2"})
    share = [f"{results[dtype]['update_share_of_rate']:.0%}" for dtype in ("float32", "bfloat16")]
    assert f"| share of the rate, whole update | {share[0]} | {share[1]} |" in text


def test_work_is_measured_in_turn_and_its_first_round_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    cost = {"a": iter([100.0, 1.0, 3.0, 2.0]), "b": iter([100.0, 5.0, 5.0, 8.0])}
    now = [0.0]

    def work(name: str) -> None:
        order.append(name)
        now[0] += next(cost[name])

    monkeypatch.setattr(limits.time, "perf_counter", lambda: now[0])
    assert limits.in_turn({"a": lambda: work("a"), "b": lambda: work("b")}, rounds=3) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 4


# -- growth ------------------------------------------------------------------------------------------------------


def test_exponent_of_a_power_law_and_of_a_constant() -> None:
    sizes = [2, 4, 8, 32]
    assert growth.exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert growth.exponent(sizes, [7.0] * 4) == pytest.approx(0)
    # By hand: logs (0, 1, 2) against (0, 2, 1) in base 2 have slope 1/2.
    assert growth.exponent([1, 2, 4], [1, 4, 2]) == pytest.approx(0.5)


def test_growth_changes_one_factor_at_a_time() -> None:
    cells = growth.all_sizes()
    assert len(cells) == len({tuple(cell.values()) for cell in cells}) == 14
    for factor, values in growth.FACTORS.items():
        assert [cell[factor] for cell in growth.along(cells, factor)] == list(values)
    assert growth.LONG_PROMPT in cells


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("layout", growth.LAYOUTS)
def test_a_cell_of_growth_on_a_small_model(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setitem(sys.modules, "limits", limits)  # as the script finds it beside itself
    monkeypatch.setattr(trees, "use_trees", trees.use_trees)  # what the cell of padded rows puts there leaves with it
    found = growth.measure(layout, k=3, prompt=20, completion=10, repeat=1, threads=torch.get_num_threads())
    assert tuple(found) == growth.MEASURES
    assert min(found["score_s"], found["update_s"]) > 0
    assert found["update_mib"] >= found["score_mib"] >= 0


def test_exponents_are_fitted_along_each_factor() -> None:
    cells: list[dict[str, Any]] = [dict(sizes) for sizes in growth.all_sizes()]
    for cell in cells:
        for layout, power in (("packed", 1), ("padded", 2)):
            cell[layout] = dict.fromkeys(
                growth.MEASURES, float(cell["k"] ** power * cell["prompt"] * cell["completion"])
            )
    found = growth.exponents(cells)
    assert found["k"]["packed"]["update_s"] == 1
    assert found["k"]["padded"]["update_s"] == 2
    assert found["prompt"]["padded"]["score_mib"] == 1
    text = growth.page({"cells": cells, "exponents": found, "threads": 2})
    assert "| k | 1.00 / 2.00 |" in text
    assert "| 8 | 512 | 32 | 1.31e+05 / 1.05e+06 (8.0x) |" in text


# -- pairs against TRL -------------------------------------------------------------------------------------------


def side(step: list[float], memory: float, lengths: list[int], **more: Any) -> dict[str, Any]:
    halves = [s / 2 for s in step]
    return {
        "step": step, "rollout": halves, "update": halves, "memory": memory, "lengths": [lengths],
        "versions": {"torch": "2"}, **more,
    }  # fmt: skip


def results() -> dict[str, list[dict[str, Any]]]:
    return {
        "trl": [side([9.0, 10.0, 50.0], 1000, [4, 4]), side([12.0], 1100, [4, 4]), side([30.0], 900, [4, 4])],
        "grpo": [side([2.0], 300, [4, 4]), side([2.0], 330, [4, 4]), side([3.0], 450, [4, 4])],
        "products": [side([1.0], 1, [4, 4]), side([1.5], 1, [4, 4]), side([2.0], 1, [4, 4])],
        "gvpo": [side([5.0], 500, [4, 4]), side([4.0], 550, [4, 4]), side([5.0], 450, [4, 4])],
    }


def test_ratios_are_medians_over_pairs() -> None:
    found = vs_trl.compare(vs_trl.Case(length=4), results())
    # Pairs: 10 / 2, 12 / 2, 30 / 3, each of medians over its steps; memory 0.3, 0.3, 0.5.
    assert (found["step_ratio"], found["step_ratio_range"]) == (6, [5, 10])
    assert found["rollout_ratio"] == found["update_ratio"] == 6
    assert (found["memory_ratio"], found["memory_ratio_range"]) == (0.3, [0.3, 0.5])
    assert found["gvpo"]["step_ratio"] == 3
    assert found["gvpo"]["memory_ratio"] == 0.5
    assert found["sides"]["trl"]["step_s"] == {"median": 12, "range": [10, 30]}
    assert found["sides"]["grpo"]["peak_mib"] == {"median": 330, "range": [300, 450]}
    assert found["sides"]["grpo"]["mean_length"] == 4


def test_pairs_turn_around() -> None:
    asked = []

    def measure(program: str, *, seed: int, algorithm: Any = None) -> dict[str, Any]:
        asked.append((program, algorithm and algorithm["name"], seed))
        return {"number": len(asked)}

    found = vs_trl.pairs(measure, 2)
    forwards = [("trl", None, 0), ("covary", "grpo", 0), ("products", None, 0), ("covary", "gvpo", 0)]
    assert asked == [*forwards, *((program, label, 1) for program, label, _ in reversed(forwards))]
    assert found == {
        name: [{"number": a}, {"number": b}]
        for name, a, b in (("trl", 1, 8), ("grpo", 2, 7), ("products", 3, 6), ("gvpo", 4, 5))
    }


def test_unequal_completions_are_not_compared() -> None:
    vs_trl.check_lengths(48, [48, 48], [48])
    with pytest.raises(vs_trl.NotComparable, match=r"48 tokens, found \[47, 48\]"):
        vs_trl.check_lengths(48, [48, 48], [47, 48])
    even, odd = [10, 20] * 50, [11, 21] * 50  # standard errors 0.5 each: 4 * sqrt(0.5) = 2.83
    vs_trl.check_lengths(None, even, odd)
    with pytest.raises(vs_trl.NotComparable, match=r"15.00 \(TRL\) and 18.00 differ .* \(2.83\)"):
        vs_trl.check_lengths(None, even, [13, 23] * 50)
    unequal = results()
    unequal["gvpo"][1]["lengths"] = [[4, 3]]
    with pytest.raises(vs_trl.NotComparable):
        vs_trl.compare(vs_trl.Case(length=4), unequal)


def test_results_are_recorded_case_by_case_with_a_page(tmp_path: Path) -> None:
    file = tmp_path / "vs_trl.json"
    half = results()
    for sides in half.values():
        for one in sides:
            one |= {"logp_error_mean": 0.25, "logp_error_max": 1.5}
    for name, given in (("tiny", half), ("smollm2_full", results())):
        found = vs_trl.compare(vs_trl.Case(length=4), given) | {"threads": 2, "machine": "x", "steps": 1}
        vs_trl.record(file, name, found, vs_trl.page)
    text = file.with_suffix(".md").read_text()
    assert text.index("| smollm2_full | trl | 12 |") < text.index("| tiny | trl | 12 |")
    assert "| tiny | grpo | 2 | 1 | 1 | 330 | 4 | 6.00 (5.00-10.00) | 6.00 | 6.00 | 0.30 |" in text
    assert "| tiny | products | 1.5 | 0.75 | 0.75 |  | 4 | 10.00 (8.00-15.00) | 10.00 | 10.00 |  |" in text
    assert "| tiny | gvpo | 0.2500 | 1.500 |" in text
    assert "`--case smollm2_full --pairs 3 --steps 1 --threads 2`, micro-batches of 1024 tokens" in text


def test_trls_settings_are_recorded(tmp_path: Path) -> None:
    found = [choice | vs_trl.numbers([results()["trl"][0]]) for choice in vs_trl.Case().trl_choices()]
    vs_trl.record(tmp_path / "c.json", "tiny", {"choices": found}, vs_trl.page_of_choices)
    assert "| tiny | 16 | yes | 10 | 5 | 5 | 1000 |" in (tmp_path / "c.md").read_text()


def test_another_end_token_changes_no_other_token(tmp_path: Path) -> None:
    save_random_model(tmp_path / "model")
    folder = str(vs_trl.with_ends(tmp_path / "model", tmp_path / "other", ["<pad>", ","]))
    before, tokenizer = load_tokenizer(str(tmp_path / "model")), load_tokenizer(folder)
    text = "one, two.<|im_end|>"
    assert tokenizer(text)["input_ids"] == before(text)["input_ids"]
    ends = TransformersRollout(load_model(folder), tokenizer).end_ids  # pyright: ignore[reportArgumentType]
    assert ends == {before.convert_tokens_to_ids("<pad>"), before(",")["input_ids"][0]}


@pytest.mark.parametrize("algorithm", ["grpo", "gvpo"])
def test_covarys_side(tmp_path: Path, algorithm: str) -> None:
    save_random_model(tmp_path / "model")
    prompts = ["one, two", "three"]
    found = vs_trl_side.covary_side(
        {
            "model": str(tmp_path / "model"),
            "prompts": prompts,
            "completions": 2,
            "max_tokens": 5,
            "lr": 1e-4,
            "bf16": True,
            "micro_batch_tokens": 8192,
            "seed": 0,
            "warm_up": 1,
            "steps": 2,
            "threads": torch.get_num_threads(),
            "algorithm": vs_trl.ALGORITHMS[algorithm],
        }
    )
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert found["prompt_ids"] == sorted(tokenizer(prompt)["input_ids"] for prompt in prompts)
    assert [len(step) for step in found["lengths"]] == [4, 4, 4]
    for total, rollout, update in zip(found["step"], found["rollout"], found["update"], strict=True):
        assert rollout > 0
        assert update > 0
        assert rollout + update < total
    assert 0 < found["logp_error_mean"] <= found["logp_error_max"] < 1
    assert found["memory"] > 100


@pytest.mark.parametrize("bf16", [False, True])
def test_the_products_of_a_step_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    """Of three completions of 1, 3 and 2 tokens: two rows read a second token, one a third."""
    save_random_model(tmp_path / "model")
    rows: list[tuple[int, ...]] = []
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def watched(x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(tuple(x.shape))
        return multiply(x, *others)

    monkeypatch.setattr("covary.rollout.linear._multiply", watched)
    settings = {"model": str(tmp_path / "model"), "bf16": bf16, "warm_up": 1, "steps": 2, "threads": 1}
    found = vs_trl_side.products_side(settings | {"lengths": [1, 3, 2], "prompt_ids": [[1, 2, 3], [4, 5]]})
    assert [len(found[part]) for part in vs_trl.PARTS] == [2, 2, 2]
    assert all(value > 0 for part in vs_trl.PARTS for value in found[part])
    assert found["step"] == [a + b for a, b in zip(found["rollout"], found["update"], strict=True)]
    if rows:  # where the CPU has such products; 2 layers of 4 products each and the projection, two decode steps
        assert len(rows) == 3 * (1 + 2 * (2 * 4 + 1))
        assert [x for x, _ in rows[:19]] == [2] * 10 + [1] * 9


def test_the_reward_reads_text_and_chat() -> None:
    assert vs_trl_side.bytes_modulo(["", "\x03"]) == [0, 0.5]
    assert vs_trl_side.bytes_modulo([[{"role": "assistant", "content": "\x07\x01"}]]) == [1 / 6]


def test_trl_reads_rows_in_whole_passes() -> None:
    batches = vs_trl_side.micro_batches(32, {"rows": 8, "gradient_checkpointing": True})
    assert batches == {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "gradient_checkpointing": True
    }  # fmt: skip
    choices = [*vs_trl.Case().trl_choices()]
    assert [choice["rows"] for choice in choices] == [32, 32, 16, 16, 8, 8]
    whole = [vs_trl_side.micro_batches(32, c)["gradient_accumulation_steps"] for c in choices]
    assert whole == [1, 1, 2, 2, 4, 4]


def test_versions_of_another_environment() -> None:
    found = vs_trl.installed(Path(sys.executable), ["torch", "no-such-package"])
    assert found == {"torch": torch.__version__.split("+")[0], "no-such-package": None}
