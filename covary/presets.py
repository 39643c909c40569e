"""How the papers measure, under a name: `covary eval MODEL --preset gvpo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from covary.types import UserError


@dataclass(frozen=True)
class Preset:
    """Conditions of an evaluation.

    Attributes:
        samples: benchmark -> sampled completions per question (N).
        temperature: of the sampling.
        max_tokens: per completion, at most.
    """

    samples: dict[str, int]
    temperature: float
    max_tokens: int


PRESETS: dict[str, Preset] = {
    # GVPO++: avg@32 on AIME24, pass@1 elsewhere. It states neither temperature nor limit: they are CoVRL's.
    "gvpo": Preset(
        {"aime24": 32, "amc23": 1, "math500": 1, "minerva_math": 1, "olympiadbench": 1}, temperature=0.6, max_tokens=4096
    ),
    # CoVRL, section 3.1: temperature 0.6, 4096 tokens, Average@N with an N that "depends on the test set size". The N
    # here are ours: the least power of two, at most 32, for 900 completions.
    "covrl": Preset(
        {
            "mmlu_pro": 1, "gpqa": 8, "theoremqa": 2, "aime24": 32, "aqua": 4, "carp_en": 1, "math500": 2,
            "minerva_math": 4, "sat_math": 32,
        },
        temperature=0.6,
        max_tokens=4096,
    ),
}  # fmt: skip


def tasks_of(preset: str) -> list[str]:
    """The preset's benchmarks.

    Raises:
        UserError: there is no such preset.
    """
    return list(_preset(preset).samples)


def conditions_of(preset: str | None, task: str, samples_given: bool) -> dict[str, Any]:
    """What a preset says of a task's conditions; {} without a preset. Papers report no greedy accuracy.

    Raises:
        UserError: there is no such preset, or it has no N for the task and none is given.
    """
    if preset is None:
        return {}
    chosen = _preset(preset)
    if not samples_given and task not in chosen.samples:
        raise UserError(
            f"--preset: {preset} has no number of samples for {task}; give -n, or one of {', '.join(chosen.samples)}"
        )
    return {
        "samples": chosen.samples.get(task, 1),
        "temperature": chosen.temperature,
        "max_tokens": chosen.max_tokens,
        "greedy": False,
    }


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise UserError(f"--preset: takes one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
