"""vLLM in the trainer's process, beside its model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from covary.rollout.vllm import Answer, Job
from covary.types import RunError, UserError


def need_vllm(where: str) -> None:
    """Refuse what needs vLLM where it is not installed.

    Raises:
        UserError: with the command that installs it.
    """
    if find_spec("vllm") is None:
        raise UserError(
            f"{where}: vllm in this process needs vLLM: pip install 'covary[vllm]'; or name a server of it (rollout.server)"
        )


class LocalVllm:
    """An engine of vLLM for a model's architecture; its weights come from `load` alone.

    It starts with random weights, so that nothing which was not sent can pass for the policy's.
    """

    name = "vLLM"

    def __init__(
        self, config: Any, tokenizer: Any, *, dtype: str, memory_share: float, eager: bool, trust_remote_code: bool
    ) -> None:
        """Reserves its memory.

        Args:
            config: of the model.
            tokenizer: the model's; vLLM looks for stop strings in what it decodes.
            dtype: float32 or bfloat16: that of the trainer's forward passes.
            memory_share: of the GPU's memory (without one, of the machine's), weights included.
            eager: compile nothing.
            trust_remote_code: run Python code that comes with the checkpoint.

        Raises:
            RunError: vLLM does not start.
        """
        # One process: the trainer's tensors are handed over as they are. Read by vLLM when its engine is made.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(Path(folder))
            tokenizer.save_pretrained(folder)
            try:
                self.llm = LLM(
                    model=folder,
                    dtype=dtype,
                    load_format="dummy",
                    logprobs_mode="processed_logprobs",  # at the temperature
                    generation_config="vllm",  # nothing of the checkpoint's
                    max_model_len=-1,  # the model's, or what fits into the memory
                    gpu_memory_utilization=memory_share,
                    enforce_eager=eager,
                    trust_remote_code=trust_remote_code,
                    seed=0,
                )
            except Exception as error:  # vLLM's own kinds, and those of what it is made of
                raise RunError(f"rollout.engine: vLLM does not start: {_line(error)}") from error

    def complete(self, jobs: Sequence[Job], on_progress: Callable[[int, int], None] | None) -> list[Answer]:
        """As `Vllm`."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        outputs: list[Any] = []
        try:
            prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
            self.llm.enqueue(prompts, [SamplingParams(**job.parameters) for job in jobs], use_tqdm=False)
            while self.llm.llm_engine.has_unfinished_requests():
                finished = [output for output in self.llm.llm_engine.step() if output.finished]
                outputs += finished
                if finished and on_progress is not None:
                    on_progress(len(outputs), len(jobs))
        except Exception as error:
            raise RunError(f"vLLM: {_line(error)}") from error
        outputs.sort(key=lambda output: int(output.request_id))  # vLLM counts requests
        return [_answer(output, job) for output, job in zip(outputs, jobs, strict=True)]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """As `Vllm`."""
        try:
            tensors = [(name, weight.detach()) for name, weight in weights.items()]
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            # Keys and values of prompts that it remembers belong to the old weights.
            if not self.llm.reset_prefix_cache():
                raise RunError("vLLM: did not reset its prefix cache")
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"vLLM: takes no weights: {_line(error)}") from error


def _answer(output: Any, job: Job) -> Answer:
    """A finished `RequestOutput`.

    Raises:
        RunError: it belongs to another prompt, or broke off.
    """
    (said,) = output.outputs
    if said.finish_reason not in ("stop", "length"):
        raise RunError(f"vLLM broke a completion off ({said.finish_reason})")
    tokens = list(said.token_ids)
    logps = [at[token].logprob for token, at in zip(tokens, said.logprobs, strict=True)]
    if list(output.prompt_token_ids) != job.prompt:
        raise RunError("vLLM answered to another prompt than it was given")
    if "prompt_logprobs" not in job.parameters:
        return Answer(tokens, logps)
    read = [at[id].logprob for id, at in zip(job.prompt[1:], output.prompt_logprobs[1:], strict=True)]
    return Answer(tokens, logps, read)


def _line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
