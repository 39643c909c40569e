"""One side of a pair of `vs_trl.py`: a few steps of on-policy GRPO, alone in its process.

    python benchmarks/vs_trl_side.py trl|covary|products SETTINGS.json RESULT.json

The two sides run in environments of their own and share this file alone: the same settings, prompts and reward, and the
same meaning of each number. Seconds of a step, warm-up left out:

* step: from one step's beginning to its end, optimizer included, nothing evaluated, no checkpoint (covary writes the step's rollouts);
* rollout: prompts encoded, completions sampled and decoded (TRL's `_generate`; covary's `time/rollout`);
* update: loss, gradient, clip, optimizer, and for covary the scores before them. What TRL computes between rewards and
  the loss is in neither of its parts, which is in its favour.

A third, `products`, is no program: the matrix products alone that a step of covary's lengths needs, as this torch computes
them fastest (`products_side`).

Peak memory is the largest resident set of the whole process, imports and loading included.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def bytes_modulo(completions: list[Any], **_: Any) -> list[float]:
    """A reward that costs nothing, needs no answer and differs within a group, in TRL's convention."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(text.encode()) % 7 / 6 for text in texts]


def covary_side(settings: dict[str, Any]) -> dict[str, Any]:
    """`covary.train.train` of a run as a recipe makes it, with a timer around `train_step`."""
    import torch
    import transformers

    import covary
    from covary.api import PYTHON_REWARD, build, resolve
    from covary.config import validate
    from covary.engines.local import LocalEngine
    from covary.log import Screen
    from covary.types import Score, Stream

    torch.set_num_threads(settings["threads"])
    prompts = settings["prompts"]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        recipe = {
            "out": f"{folder}/run",
            "seed": settings["seed"],
            "steps": settings["warm_up"] + settings["steps"],
            "model": {"name": settings["model"]},
            "task": {"name": "jsonl", "path": str(data), "raw": isinstance(prompts[0], str)},
            "reward": bytes_modulo.__name__ + PYTHON_REWARD,
            "algorithm": settings["algorithm"],
            "rollout": {
                "prompts": len(prompts),
                "completions": settings["completions"],
                "max_tokens": settings["max_tokens"],
            },
            "optimizer": {"lr": settings["lr"]},
            "engine": {
                "device": "cpu",
                "autocast": "bfloat16" if settings["bf16"] else "none",
                "micro_batch_tokens": settings["micro_batch_tokens"],
            },
            "log": {"samples": 0},
        }
        run = build(resolve(validate(recipe, where="benchmark"), bytes_modulo), Screen(silent=True))
        # The loop keeps no groups: what was sampled is seen where the rollout engine is shown it.
        sampled: list[list[Any]] = []
        run.rollout.observe = sampled.append
        loop = import_module("covary.train")  # `covary.train` is the function
        step = loop.train_step
        steps = []

        def timed_step(*args: Any) -> dict[str, float]:
            begun = time.perf_counter()
            row = step(*args)
            steps.append((time.perf_counter() - begun, row))
            return row

        loop.train_step = timed_step  # pyright: ignore[reportAttributeAccessIssue]
        loop.train(run)
    memory = peak_mib()
    measured = steps[settings["warm_up"] :]
    result = {
        "step": [seconds for seconds, _ in measured],
        "rollout": [row["time/rollout"] for _, row in measured],
        "update": [row["time/score"] + row["time/train"] for _, row in measured],
        "memory": memory,
        "lengths": [[len(c.tokens) for group in groups for c in group.completions] for groups in sampled],
        "prompt_ids": sorted(group.contexts["prompt"] for group in sampled[-1]),
        "versions": {
            "covary": covary.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if settings["bf16"]:
        score = [Score("logp", Stream("old"))]
        half, full = (
            LocalEngine(run.model, autocast=dtype).score(sampled[-1], score)["logp"] for dtype in (torch.bfloat16, None)
        )
        result |= error(torch.cat(half), torch.cat(full))  # pyright: ignore[reportArgumentType]
    return result


def products_side(settings: dict[str, Any]) -> dict[str, Any]:
    """Every product of a step with the model's own weights, and nothing else: what no program with this torch goes below.

    Rollout: prompts once, then every decode step with the rows that are left, weights reordered. Update: all packed tokens
    in one pass, forwards, and backwards to states and weights; the output projection where tokens are scored.
    """
    import torch
    from torch import nn
    from torch.nn.functional import linear

    from covary.memory import memory_for_training
    from covary.models.loading import load_model
    from covary.rollout.linear import good_rows, reordered_weights

    torch.set_num_threads(settings["threads"])
    model: Any = load_model(settings["model"])
    dtype = torch.bfloat16 if settings["bf16"] else torch.float32
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    lengths, prompts = settings["lengths"], settings["prompt_ids"]
    left = [sum(length > t for length in lengths) for t in range(1, max(lengths))]  # rows that read one more token
    packed = sum(map(len, prompts)) + sum(length - 1 for length in lengths)

    widths = {layer.in_features for layer in layers}
    halves = {layer: layer.weight.detach().to(dtype) for layer in [*layers, head]}

    def states(rows: int) -> dict[int, torch.Tensor]:
        return {width: torch.randn(rows, width).to(dtype) for width in widths}

    def multiply(rows: int) -> None:
        given = states(good_rows(rows))
        for layer in layers:
            layer(given[layer.in_features])

    def rollout() -> float:
        given, begun = states(sum(map(len, prompts))), time.perf_counter()
        for layer in layers:
            linear(given[layer.in_features], halves[layer])
        seconds = time.perf_counter() - begun
        with reordered_weights([model], None if dtype == torch.float32 else dtype):
            begun = time.perf_counter()  # copies of weights are no products
            head(states(good_rows(len(prompts)))[head.in_features])
            for rows in left:
                multiply(rows)
                head(states(good_rows(rows))[head.in_features])
            return seconds + time.perf_counter() - begun

    def update() -> float:
        seconds = 0.0
        for layer in [*layers, head]:
            rows, weight = sum(lengths) if layer is head else packed, halves[layer]
            x, begun = states(rows)[layer.in_features], time.perf_counter()
            for columns in weight.split(max(1, 2**23 // rows)):
                out = x @ columns.t()
                _ = out @ columns
                _ = out.t() @ x
            seconds += time.perf_counter() - begun
        return seconds

    result: dict[str, list[float]] = {"step": [], "rollout": [], "update": []}
    with torch.no_grad(), memory_for_training(torch.device("cpu")):
        for _ in range(settings["warm_up"] + settings["steps"]):
            for part, seconds in (("rollout", rollout()), ("update", update())):
                result[part].append(seconds)
            result["step"].append(result["rollout"][-1] + result["update"][-1])
    return {
        **{part: seconds[settings["warm_up"] :] for part, seconds in result.items()},
        "memory": peak_mib(),
        "lengths": [lengths],
        "prompt_ids": prompts,
        "versions": {"torch": torch.__version__},
    }


def trl_side(settings: dict[str, Any]) -> dict[str, Any]:
    """`GRPOTrainer.train`, with timers around the trainer's own methods."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    prompts, k = settings["prompts"], settings["completions"]
    rows, steps = len(prompts) * k, settings["warm_up"] + settings["steps"]
    spent = {"step": [], "_generate": [], "_prepare_inputs": []}
    sampled: list[tuple[list[list[int]], list[list[int]]]] = []

    class Trainer(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            result = timed(spent["_generate"], super()._generate, *args, **kwargs)
            sampled.append((result[0], result[1]))
            return result

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            return timed(spent["_prepare_inputs"], super()._prepare_inputs, *args, **kwargs)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun, self.prepared = time.perf_counter(), len(spent["_prepare_inputs"])

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            spent["step"].append(time.perf_counter() - self.begun)
            # One call a micro-batch.
            spent["_prepare_inputs"][self.prepared :] = [sum(spent["_prepare_inputs"][self.prepared :])]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            seed=settings["seed"],
            max_steps=steps,
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.0,
            num_generations=k,
            max_completion_length=settings["max_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            num_iterations=1,
            loss_type="grpo",
            bf16=settings["bf16"],
            disable_dropout=True,
            shuffle_dataset=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **micro_batches(rows, settings["trl"]),
        )
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, attn_implementation="sdpa")
        trainer = Trainer(
            model=model,
            args=config,
            reward_funcs=bytes_modulo,
            processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts] * steps),
            callbacks=[Clock()],
        )
        trainer.train()
    memory = peak_mib()
    measured = slice(settings["warm_up"], None)
    result = {
        "step": spent["step"][measured],
        "rollout": spent["_generate"][measured],
        "update": [a - b for a, b in zip(spent["step"], spent["_prepare_inputs"], strict=True)][measured],
        "memory": memory,
        "lengths": [[len(ids) for ids in completions] for _, completions in sampled],
        "prompt_ids": sorted(sampled[-1][0][::k]),
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if settings["bf16"]:
        plain = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        plain.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
        half, full = [], []
        with torch.no_grad():
            for prompt, completion in zip(*sampled[-1], strict=True):
                ids = torch.tensor([prompt + completion])
                n = len(completion)
                logps = trainer._get_per_token_logps_and_entropies(trainer.model.eval(), ids, torch.ones_like(ids), n)
                half.append(logps[0][0])
                logits = plain(ids).logits[0, -n - 1 : -1]
                full.append(logits.log_softmax(-1).gather(-1, ids[0, -n:, None])[:, 0])
        result |= error(torch.cat(half), torch.cat(full))
    return result


def micro_batches(rows: int, choice: dict[str, Any]) -> dict[str, Any]:
    """TRL's own choices that change its speed and not its result: rows a pass, and recomputing activations."""
    size = min(rows, choice["rows"])
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": rows // size,
        "gradient_checkpointing": choice["gradient_checkpointing"],
    }


def timed(seconds: list[float], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` returns, its seconds appended."""
    begun = time.perf_counter()
    result = function(*args, **kwargs)
    seconds.append(time.perf_counter() - begun)
    return result


def error(half: Any, full: Any) -> dict[str, float]:
    """Log-probs of bfloat16 against those of float32 of the same weights and tokens, in nats per token."""
    away = (half.float() - full).abs()
    return {"logp_error_mean": float(away.mean()), "logp_error_max": float(away.max())}


def peak_mib() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    side, settings, result = sys.argv[1:]
    run = {"trl": trl_side, "covary": covary_side, "products": products_side}[side]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    Path(result).write_text(json.dumps(run(json.loads(Path(settings).read_text()))))


if __name__ == "__main__":
    main()
