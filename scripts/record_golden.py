"""Run the objectives of verl and TRL on small fixed inputs and write tests/golden/upstream.json.

The file is committed, so tests need neither library; this script needs an environment of its own, without covary:

    python3.11 -m venv golden-env
    golden-env/bin/pip install 'torch>=2.9,<2.14' 'transformers>=5.5.3,<5.11,!=5.6.0' accelerate datasets \
        'tensordict>=0.8,<=0.10,!=0.9.0' omegaconf 'ray>=2.41' codetiming
    golden-env/bin/pip install --no-deps 'trl==1.16.*' 'verl==0.9.*'
    golden-env/bin/python scripts/record_golden.py

No upstream code stands here: verl's functions are called as its actor and trainer call them; TRL's trainers are
made without `__init__`, with a model that answers with given log-probs, and their own methods make the
advantages and the loss. Everything is float64, masks given to verl included (it counts in their type).
Gradients are those of the loss in the policy's log-probs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import torch
import trl.trainer
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.rewards import get_soft_overlong_punishment
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

PACKAGES = ("torch", "trl", "verl", "transformers", "accelerate", "tensordict", "ray", "numpy")
NO_DUAL_CLIP = 1e6
LOGPS = ("policy", "old", "initial")
OVERLONG = {"max_tokens": 100, "buffer": 20, "lengths": [1, 79, 80, 81, 90, 99, 100, 101]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/golden/upstream.json"))
    arguments = parser.parse_args()
    inputs = {"ragged": ragged(), "even": even(), "pairs": pairs()}
    cases = {
        **{f"verl/{name}": case for name, case in verl_cases(inputs["ragged"]).items()},
        **{f"trl/{name}": case for name, case in trl_cases(inputs["even"], inputs["pairs"]).items()},
    }
    golden = {
        "about": "Written by scripts/record_golden.py, which says how. Do not edit.",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "inputs": inputs,
        "cases": cases,
    }
    arguments.out.write_text(render(golden))
    print(f"{arguments.out}: {len(cases)} cases, {arguments.out.stat().st_size} bytes")


# Inputs: plain lists, so that the file holds exactly what upstream got.


def logps(rng: random.Random, rows: int, width: int) -> dict[str, list[list[float]]]:
    """Policy, old and initial log-probs, most of them near one another, some far enough for every clip."""

    def moved(near: list[list[float]]) -> list[list[float]]:
        return [[round(x + rng.choice((-1, 1)) * distance(), 3) for x in row] for row in near]

    def distance() -> float:
        return rng.choice((0.1, 0.1, 0.3, 0.3, 0.6, 2.0)) + rng.uniform(-0.05, 0.05)

    old = [[round(rng.uniform(-4, -2.5), 3) for _ in range(width)] for _ in range(rows)]
    return {"policy": moved(old), "old": old, "initial": moved(old)}


def ragged() -> dict[str, Any]:
    """Groups of 4, 3 (equal rewards) and 2 rows in mixed order; row 3 has a masked token inside."""
    group = [0, 1, 0, 2, 0, 1, 2, 1, 0]
    mask = [[1] * n + [0] * (6 - n) for n in (6, 2, 4, 5, 1, 3, 6, 2, 3)]
    mask[3][2] = 0
    rewards = [1.0, 0.5, 0.0, 0.2, 0.0, 0.5, 0.9, 0.5, 1.0]
    return {"group": group, "mask": mask, "rewards": rewards, "greedy": [0.5, 0.5, 0.25], "max_tokens": 10} | logps(
        random.Random(42), 9, 6
    )


def even() -> dict[str, Any]:
    """Two groups of 4 rows in order, as TRL needs them."""
    mask = [[1] * n + [0] * (5 - n) for n in (5, 2, 3, 1, 4, 5, 2, 3)]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.3, 0.9, 0.1, 0.3]
    return {"group": [0] * 4 + [1] * 4, "mask": mask, "rewards": rewards, "max_tokens": 7} | logps(
        random.Random(6), 8, 5
    )


def pairs() -> dict[str, Any]:
    """Three pairs: the chosen rows, then the rejected ones."""
    mask = [[1] * n + [0] * (5 - n) for n in (5, 2, 3, 4, 1, 5)]
    return {"group": [0, 1, 2, 0, 1, 2], "mask": mask, "rewards": [1.0] * 3 + [0.0] * 3} | logps(random.Random(3), 6, 5)


def tensors(data: dict[str, Any], *names: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(data[name], dtype=torch.float64) for name in names)


def case(functions: Sequence[Callable[..., Any]], settings: dict[str, Any], **numbers: Any) -> dict[str, Any]:
    """What was called, with what, and what came out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return value.detach().tolist() if isinstance(value, Tensor) else value

    return {"functions": [where(f) for f in functions], "settings": settings, **plain(numbers)}


def where(function: Callable[..., Any]) -> str:
    return f"{inspect.getmodule(function).__name__.replace('.', '/')}.py: {function.__qualname__}"


def gradient(loss: Tensor, policy: Tensor) -> dict[str, Tensor]:
    return {"loss": loss, "gradient": torch.autograd.grad(loss, policy)[0]}


# verl


def verl_cases(data: dict[str, Any]) -> dict[str, Any]:
    return {**verl_advantages(data), **verl_losses(data), **verl_pieces(data)}


def token_rewards(data: dict[str, Any]) -> Tensor:
    """The reward at the last token of each row, as verl's reward managers place it."""
    mask, rewards = tensors(data, "mask", "rewards")
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1)
    return torch.zeros_like(mask).scatter(1, last.unsqueeze(1), rewards.unsqueeze(1))


def verl_advantage(function: Callable[..., Any], data: dict[str, Any], kl_coef: float = 0.0, **more: Any) -> Tensor:
    """The advantage, (B, T), with KL in the reward as `apply_kl_penalty` puts it there."""
    mask, old, initial = tensors(data, "mask", "old", "initial")
    rewards = token_rewards(data)
    if kl_coef:
        rewards = rewards - kl_coef * verl.kl_penalty(old, initial, "k1") * mask
    takes = inspect.signature(function).parameters
    if "index" in takes:
        more["index"] = np.array(data["group"])
    return function(token_level_rewards=rewards, response_mask=mask, config=AlgoConfig(), **more)[0]


def verl_advantages(data: dict[str, Any]) -> dict[str, Any]:
    reinforce_pp = verl.compute_reinforce_plus_plus_outcome_advantage
    baselines = torch.tensor([data["greedy"][g] for g in data["group"]], dtype=torch.float64)
    single = {"group": [0], "mask": [[1]], "rewards": [0.7], "old": [[-1.0]], "initial": [[-1.0]]}
    runs: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "grpo": (verl.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": True}),
        "grpo_without_std": (verl.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        "rloo": (verl.compute_rloo_outcome_advantage, {}),
        "reinforce_pp": (reinforce_pp, {}),
        "reinforce_pp_kl": (reinforce_pp, {"kl_coef": 0.05}),
        "reinforce_pp_baseline": (verl.compute_reinforce_plus_plus_baseline_outcome_advantage, {}),
        "gpg": (verl.compute_gpg_outcome_advantage, {}),
    }
    cases = {
        f"advantage/{name}": case([function], settings, advantage=verl_advantage(function, data, **settings))
        for name, (function, settings) in runs.items()
    }
    remax = verl.compute_remax_outcome_advantage
    cases["advantage/remax"] = case([remax], {}, advantage=verl_advantage(remax, data, reward_baselines=baselines))
    for name in ("grpo", "rloo", "rloo_vectorized"):
        function = getattr(verl, f"compute_{name}_outcome_advantage")
        cases[f"singleton/{name}"] = case([function], {}, reward=0.7, advantage=verl_advantage(function, single))
    return cases


def actor(**settings: Any) -> ActorConfig:
    """The configuration of a loss; a bare `clip_ratio` sets both bounds."""
    if "clip_ratio" in settings:
        settings |= {"clip_ratio_low": settings["clip_ratio"], "clip_ratio_high": settings["clip_ratio"]}
    scale = settings.pop("loss_scale_factor", None)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    config.global_batch_info["loss_scale_factor"] = scale
    return config


def verl_loss(
    data: dict[str, Any], loss: str, advantage: Tensor, agg: str, policy: str = "policy", **settings: Any
) -> tuple[Tensor, Tensor, Callable[..., Any]]:
    """The loss, the leaf it depends on, and verl's function."""
    old, mask, live = tensors(data, "old", "mask", policy)
    live.requires_grad_()
    function = verl.get_policy_loss_fn(loss)
    value, _ = function(
        old_log_prob=old,
        log_prob=live,
        advantages=advantage,
        response_mask=mask,
        loss_agg_mode=agg,
        config=actor(**settings),
    )
    return value, live, function


def verl_losses(data: dict[str, Any]) -> dict[str, Any]:
    grpo = verl.compute_grpo_outcome_advantage
    reinforce_pp = verl.compute_reinforce_plus_plus_outcome_advantage
    baseline = verl.compute_reinforce_plus_plus_baseline_outcome_advantage
    ppo = {"clip_ratio": 0.2, "clip_ratio_c": NO_DUAL_CLIP}
    higher = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": NO_DUAL_CLIP}
    by_row, by_token, by_sum = "seq-mean-token-mean", "token-mean", "seq-mean-token-sum"
    runs: dict[str, tuple[str, Callable[..., Any], dict[str, Any], str, dict[str, Any]]] = {
        # name: loss, advantage, its settings, aggregation, settings of the loss
        "grpo": ("vanilla", grpo, {}, by_row, ppo),
        "dapo": ("vanilla", grpo, {}, by_token, higher),
        "dapo_dual_clip": ("vanilla", grpo, {}, by_token, higher | {"clip_ratio_c": 3.0}),
        "dr_grpo": (
            "vanilla",
            grpo,
            {"norm_adv_by_std_in_grpo": False},
            "seq-mean-token-sum-norm",
            ppo | {"loss_scale_factor": data["max_tokens"]},
        ),
        "reinforce_pp": ("vanilla", reinforce_pp, {}, by_token, ppo),
        "reinforce_pp_kl": ("vanilla", reinforce_pp, {"kl_coef": 0.05}, by_token, ppo),
        "reinforce_pp_baseline": ("vanilla", baseline, {}, by_token, ppo),
        "gspo": ("gspo", grpo, {}, by_row, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        "gspo_wide": ("gspo", grpo, {}, by_row, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}),
        "gmpo": ("geo_mean", grpo, {}, by_token, {"clip_ratio": 0.4}),
        "gmpo_default_clip": ("geo_mean", grpo, {}, by_token, {}),
        "cispo": ("cispo", grpo, {}, by_token, {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0}),
        "cispo_lower_bound": ("cispo", grpo, {}, by_token, {"clip_ratio_low": 0.2, "clip_ratio_high": 1.0}),
        "gpg": ("gpg", verl.compute_gpg_outcome_advantage, {}, by_token, {}),
    }
    cases = {}
    for name, (loss, advantage, options, agg, settings) in runs.items():
        value, live, function = verl_loss(data, loss, verl_advantage(advantage, data, **options), agg, **settings)
        recorded = {**options, "loss_agg_mode": agg, **settings}
        cases[f"loss/{name}"] = case([advantage, function], recorded, **gradient(value, live))

    # KL as a loss term, added as verl's `ppo_loss` adds it.
    for name, kind, coef in (("grpo", "k3", 0.04), ("reinforce_pp_baseline", "k2", 0.03)):
        loss, advantage, options, agg, settings = runs[name]
        value, live, function = verl_loss(data, loss, verl_advantage(advantage, data, **options), agg, **settings)
        initial, mask = tensors(data, "initial", "mask")
        value = value + coef * verl.agg_loss(verl.kl_penalty(live, initial, kind), mask, agg)
        recorded = {"loss_agg_mode": agg, **settings, "kl_loss_type": kind, "kl_loss_coef": coef}
        functions = [advantage, function, verl.kl_penalty, verl.agg_loss]
        cases[f"loss/{name}_{kind}"] = case(functions, recorded, **gradient(value, live))

    # verl has no plain REINFORCE in the trainer: its PPO loss at the old policy has the same gradient.
    greedy = torch.tensor([data["greedy"][g] for g in data["group"]], dtype=torch.float64)
    for name, more in (("rloo", {}), ("remax", {"reward_baselines": greedy})):
        advantage = getattr(verl, f"compute_{name}_outcome_advantage")
        value, live, function = verl_loss(
            data, "vanilla", verl_advantage(advantage, data, **more), by_sum, policy="old", **ppo
        )
        recorded = {"loss_agg_mode": by_sum, **ppo}
        cases[f"loss/{name}_at_old"] = case([advantage, function], recorded, **gradient(value, live))

    # The plain mean of geo_mean, on two micro-batches of unequal size that share the rollout's advantages.
    advantage = verl_advantage(grpo, data)
    parts = [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    losses = []
    for rows in parts:
        part = {key: [data[key][i] for i in rows] for key in (*LOGPS, "mask")}
        value, _, function = verl_loss(part, "geo_mean", advantage[rows], by_token, clip_ratio=0.4)
        losses.append(value.item())
    cases["loss/gmpo_parts"] = case([grpo, function], {"clip_ratio": 0.4}, parts=parts, losses=losses)
    return cases


def verl_pieces(data: dict[str, Any]) -> dict[str, Any]:
    policy, initial, mask = tensors(data, "policy", "initial", "mask")
    cases = {}

    modes = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    scale = data["max_tokens"]
    aggregated = {mode: verl.agg_loss(-policy, mask, mode, loss_scale_factor=scale) for mode in modes}
    cases["agg_loss"] = case([verl.agg_loss], {"loss_scale_factor": scale}, of="minus policy", values=aggregated)

    live = policy.clone().requires_grad_()
    penalties = {}
    for kind in ("k1", "k2", "k3", "k3+"):
        value = verl.kl_penalty(live, initial, kind)
        penalties[kind] = {"value": value, "gradient": torch.autograd.grad(value.sum(), live)[0]}
    cases["kl_penalty"] = case([verl.kl_penalty], {}, between="policy, initial", values=penalties)

    far = torch.tensor([-30.0, -5.0, -2.0, 0.0, 2.0, 5.0, 30.0], dtype=torch.float64)
    values = {kind: verl.kl_penalty(far, torch.zeros_like(far), kind) for kind in ("k1", "k2", "k3")}
    cases["kl_penalty_far"] = case([verl.kl_penalty], {}, log_ratio=far, values=values)

    cases["overlong"] = case([DAPORewardManager.__call__], {"penalty_factor": 1.0}, **OVERLONG, penalty=verl_overlong())
    config = actor()
    names = ("loss_agg_mode", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "use_kl_loss", "kl_loss_coef")
    cases["defaults"] = case([ActorConfig], {}, values={name: getattr(config, name) for name in names})
    return cases


def verl_overlong() -> list[float]:
    lengths = torch.tensor(OVERLONG["lengths"])
    width = int(lengths.max())
    mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(len(lengths), 1, dtype=torch.long),
            "responses": torch.zeros(len(lengths), width, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(len(lengths), 1, dtype=torch.long), mask], dim=1),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * len(lengths), dtype=object),
            "data_source": np.array([""] * len(lengths), dtype=object),
        },
    )
    manager = DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "", eos_token="end"),
        num_examine=0,
        compute_score=lambda **_: 0.0,
        max_resp_len=OVERLONG["max_tokens"],
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=OVERLONG["buffer"], penalty_factor=1.0, log=False),
    )
    return manager(batch).sum(-1).tolist()


# TRL


class Model(torch.nn.Module):
    """Answers the call of TRL's trainers with given log-probs of the completion, right-aligned."""

    is_gradient_checkpointing = False

    def __init__(self, completion_logps: Tensor) -> None:
        super().__init__()
        self.completion_logps = completion_logps

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        """What TRL's fused output layer returns: numbers per predicted token, 0 where the label is -100."""
        shifted = labels[:, 1:]
        completion = self.completion_logps
        prompt = completion.new_zeros(len(completion), shifted.shape[1] - completion.shape[1])
        log_probs = torch.where(shifted == -100, 0.0, torch.cat([prompt, completion], dim=1))
        nothing = torch.zeros_like(log_probs).detach()
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def trl_trainer(kind: type, config: Any, **attributes: Any) -> Any:
    """A trainer without its `__init__`: the configuration's values under the names that the methods read."""
    trainer = kind.__new__(kind)
    values = {
        **vars(config),
        "args": config,
        "accelerator": accelerate.Accelerator(cpu=True),
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": config.gradient_accumulation_steps,
        "epsilon_low": getattr(config, "epsilon", None),
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(lambda: deque(maxlen=1), rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": defaultdict(list),
        "_pending_metrics": defaultdict(list),
        **attributes,
    }
    if values.get("epsilon_high") is None:
        values["epsilon_high"] = values["epsilon_low"]
    trainer.__dict__.update(values)
    return trainer


def trl_config(kind: type, **settings: Any) -> Any:
    return kind(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)


def trl_rollout(kind: type, config_kind: type, data: dict[str, Any], **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """The trainer and what its `_generate_and_score_completions` makes of a given rollout."""
    old, initial, rewards = tensors(data, "old", "initial", "rewards")
    rows = len(rewards)
    lengths = [sum(row) for row in data["mask"]]
    completions = [[5] * length for length in lengths]
    config = trl_config(
        config_kind,
        per_device_train_batch_size=rows,
        steps_per_generation=1,
        num_generations=rows // len(set(data["group"])),
        num_iterations=2,  # so that the old log-probs are kept apart from the live ones
        max_completion_length=data["max_tokens"],
        **settings,
    )
    generated = ([[3, 4]] * rows, completions, None, [""] * rows, None, {}, None, None)
    if kind is trl.trainer.RLOOTrainer:
        generated = ([[3, 4]] * rows, completions, [""] * rows)
    trainer = trl_trainer(
        kind,
        config,
        model=Model(old),
        ref_model=Model(initial),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        _tokenizer=SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, **_: [""] * len(ids)),
        eos_token_ids=[1],
        reward_func_names=["reward"],
        reward_funcs=[None],
        reward_weights=torch.ones(1, dtype=torch.float64),
        environment_factories=None,
        environments=None,
        tools=[],
        _is_vlm=False,
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: rewards.unsqueeze(-1),
    )
    return trainer, trainer._generate_and_score_completions([{"prompt": ""}] * rows)


def trl_losses(
    kind: type,
    config_kind: type,
    data: dict[str, Any],
    parts: Sequence[Sequence[int]] | None = None,
    policy: str = "policy",
    **settings: Any,
) -> dict[str, Any]:
    """A trainer's advantages and loss with its gradient; or its losses on micro-batches of the named rows."""
    trainer, scored = trl_rollout(kind, config_kind, data, **settings)
    functions = [kind._generate_and_score_completions, kind._compute_loss]
    (live,) = tensors(data, policy)
    if parts is None:
        loss = trainer._compute_loss(Model(live.requires_grad_()), scored)
        return case(functions, settings, advantage=scored["advantages"], **gradient(loss, live))
    trainer.current_gradient_accumulation_steps = len(parts)
    trainer.args.steps_per_generation = len(parts)
    losses = []
    for rows in parts:
        taken = {name: value if value.dim() == 0 else value[list(rows)] for name, value in scored.items()}
        losses.append(trainer._compute_loss(Model(live[list(rows)]), taken).item())
    return case(functions, settings, advantage=scored["advantages"], parts=parts, losses=losses)


def trl_cases(data: dict[str, Any], paired: dict[str, Any]) -> dict[str, Any]:
    grpo = (trl.trainer.GRPOTrainer, trl.trainer.GRPOConfig)
    rloo = (trl.trainer.RLOOTrainer, trl.trainer.RLOOConfig)
    gmpo = (GMPOTrainer, GMPOConfig)
    sequence = {"importance_sampling_level": "sequence", "beta": 0.0}
    paper = {"epsilon": 3e-4, "epsilon_high": 4e-4}
    wide = {"epsilon": 0.2, "epsilon_high": 0.3}
    parts = [[0, 1, 2], [3, 4, 5, 6, 7]]
    unscorable = {**data, "rewards": [1.0, 0.0, float("nan"), 0.5, 0.3, 0.9, 0.1, 0.3]}
    return {
        "grpo": trl_losses(*grpo, data, loss_type="grpo", beta=0.0),
        "grpo_kl": trl_losses(*grpo, data, loss_type="grpo", beta=0.04, use_bias_correction_kl=False),
        "grpo_kl_corrected": trl_losses(*grpo, data, loss_type="grpo", beta=0.04),
        "dapo": trl_losses(*grpo, data, loss_type="dapo", beta=0.0, epsilon_high=0.28),
        "dr_grpo": trl_losses(*grpo, data, loss_type="dr_grpo", scale_rewards="none", beta=0.0),
        "cispo": trl_losses(*grpo, data, loss_type="cispo", beta=0.0, epsilon_high=5.0),
        "cispo_default_cap": trl_losses(*grpo, data, loss_type="cispo", beta=0.0),
        "gspo": trl_losses(*grpo, data, loss_type="grpo", **sequence, **paper),
        "gspo_wide": trl_losses(*grpo, data, loss_type="grpo", **sequence, **wide),
        "gspo_token_mean": trl_losses(*grpo, data, loss_type="dapo", **sequence, **wide),
        "gmpo": trl_losses(*gmpo, data, beta=0.0),
        "rloo": trl_losses(*rloo, data, beta=0.05),
        "rloo_at_old": trl_losses(*rloo, data, policy="old", beta=0.05),
        "parts/grpo": trl_losses(*grpo, data, parts, loss_type="grpo", beta=0.0),
        "parts/bnpo": trl_losses(*grpo, data, parts, loss_type="bnpo", beta=0.0),
        "parts/dapo": trl_losses(*grpo, data, parts, loss_type="dapo", beta=0.0),
        "unscorable/grpo": trl_unscorable(*grpo, unscorable),
        "unscorable/rloo": trl_unscorable(*rloo, unscorable),
        "dpo": trl_dpo(paired),
        "overlong": trl_overlong(),
        "defaults": trl_defaults(),
        "gkd": trl_gkd(),
    }


def trl_gkd() -> dict[str, Any]:
    """The divergence over a batch of two rows, and its gradient in the student's logits, for both ends and between."""
    rng = random.Random(13)
    shape = (2, 3, 6)
    student, teacher = (
        torch.tensor([rng.gauss(0, 2) for _ in range(36)], dtype=torch.float64).reshape(shape) for _ in range(2)
    )
    mask = [[1, 1, 1], [1, 0, 0]]
    labels = torch.where(torch.tensor(mask).bool(), 5, -100)
    losses = {}
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        live = student.clone().requires_grad_()
        value = GKDTrainer.generalized_jsd_loss(live, teacher, labels=labels, beta=beta)
        losses[str(beta)] = {"value": value, "of_logits": torch.autograd.grad(value, live)[0]}
    return case([GKDTrainer.generalized_jsd_loss], {}, student=student, teacher=teacher, mask=mask, losses=losses)


def trl_unscorable(kind: type, config_kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """Advantages where one row has no reward (None here, NaN in TRL)."""
    _, scored = trl_rollout(kind, config_kind, data, beta=0.0)
    rewards = [None if reward != reward else reward for reward in data["rewards"]]
    return case([kind._generate_and_score_completions], {}, rewards=rewards, advantage=scored["advantages"])


def trl_dpo(data: dict[str, Any]) -> dict[str, Any]:
    policy, initial, mask = tensors(data, "policy", "initial", "mask")
    trainer = trl_trainer(
        trl.trainer.DPOTrainer,
        trl_config(trl.trainer.DPOConfig, beta=0.1),
        model=Model(policy),
        ref_model=Model(initial),
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        precompute_ref_logps=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    prompt = torch.zeros(len(mask), 2, dtype=torch.long)
    completion = mask.long()
    inputs = {
        "input_ids": torch.cat([prompt + 3, completion * 5], dim=1),
        "attention_mask": torch.cat([prompt + 1, completion], dim=1),
        "completion_mask": torch.cat([prompt, completion], dim=1),
    }
    loss = trainer._compute_loss(Model(policy.requires_grad_()), inputs, return_outputs=False)
    settings = {"loss_type": ["sigmoid"], "beta": 0.1}
    return case([trl.trainer.DPOTrainer._compute_loss], settings, **gradient(loss, policy))


def trl_overlong() -> dict[str, Any]:
    punish = get_soft_overlong_punishment(OVERLONG["max_tokens"], OVERLONG["buffer"])
    penalty = punish(completion_ids=[[1] * length for length in OVERLONG["lengths"]])
    return case([get_soft_overlong_punishment], {}, **OVERLONG, penalty=penalty)


def trl_defaults() -> dict[str, Any]:
    names = (
        *("loss_type", "beta", "epsilon", "epsilon_high", "scale_rewards", "importance_sampling_level"),
        *("use_bias_correction_kl", "normalize_advantages"),
    )
    configs = (trl.trainer.GRPOConfig, trl.trainer.RLOOConfig, trl.trainer.DPOConfig, GMPOConfig)
    values = {}
    for kind in configs:
        config = trl_config(kind)
        values[kind.__name__] = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return case(configs, {}, values=values)


def render(golden: dict[str, Any]) -> str:
    """Indented JSON with one line per list of numbers."""
    text = json.dumps(golden, indent=1, allow_nan=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


if __name__ == "__main__":
    main()
