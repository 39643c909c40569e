"""vLLM behind its OpenAI-compatible server.

The server is asked for token ids and their log-probs. New weights lie in a folder that both see: it reads them through
its own `reload_weights`, which servers in development mode offer, so it needs nothing of covary.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from covary.http import ask_all, post_json
from covary.rollout.vllm import Answer, Job
from covary.types import RunError, UserError

COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --host 127.0.0.1 --port 8000 "
    "--dtype float32 --logprobs-mode processed_logprobs"
)
"""How a server is started that a run can use."""


@dataclass(frozen=True)
class VllmServer:
    """Asks `POST url/completions`, at most `concurrency` at a time.

    Attributes:
        url: of the API, up to `/v1`.
        folder: where weights are put down for the server to read; it is made where it is missing.
        key: bearer token.
        concurrency: requests at a time; the server batches them.
        timeout: seconds without a byte from the server.
        attempts: per request.
        pause: seconds before the second attempt; doubled each time.
    """

    url: str
    folder: Path
    key: str | None = field(default=None, repr=False)
    concurrency: int = 64
    timeout: float = 600.0
    attempts: int = 5
    pause: float = 1.0

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the vLLM server {self.url}"

    def complete(self, jobs: Sequence[Job], on_progress: Callable[[int, int], None] | None) -> list[Answer]:
        """As `Vllm`."""
        return ask_all(self._ask, jobs, self.concurrency, on_progress)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """As `Vllm`. The folder is removed again: the server has read it when it answers."""
        folder = self._written(weights)
        try:
            self._reload(folder)
            # Keys and values of prompts that it remembers belong to the old weights.
            if self._post("/reset_prefix_cache", {}).get("success") is not True:
                raise RunError(f"{self.name}: did not reset its prefix cache (does somebody else use it?)")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _reload(self, folder: Path) -> None:
        try:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        except RunError as error:
            if "500" not in str(error):
                raise
            raise RunError(
                f"{error}; does the server see {self.folder}? rollout.server.weights names another"
            ) from error

    def _written(self, weights: Mapping[str, Tensor]) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="weights-", dir=self.folder.absolute()))
        except OSError as error:
            raise RunError(f"rollout.server: no folder for weights can be made in {self.folder} ({error})") from error
        file = folder / "model.safetensors"
        try:
            save_file(_apart(weights), file)
            folder.chmod(0o755)  # the server may be another user's
            file.chmod(0o644)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, Exception):  # safetensors has errors of its own for a full disk
                raise RunError(f"rollout.server: weights cannot be written to {folder} ({error})") from error
            raise
        return folder

    def _ask(self, job: Job) -> Answer:
        reply = self._post("/v1/completions", {"prompt": job.prompt, **job.parameters, "return_token_ids": True})
        try:
            return _answer(reply["choices"][0], job)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RunError(
                f"{self.name}: answered without token ids and log-probs, as vLLM gives them ({str(reply)[:200]})"
            ) from error

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = self.url.rstrip("/").removesuffix("/v1") + path
        try:
            return post_json(url, body, key=self.key, timeout=self.timeout, attempts=self.attempts, pause=self.pause)
        except UserError as error:  # in the middle of a run too, which has to be saved then
            hint = f"; start the server with {COMMAND}" if "/v1/" not in path and ": 404 " in str(error) else ""
            raise RunError(f"{error}{hint}") from error


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, of which no two share memory: a file has one of each."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in weights.items():
        tensor = weight.detach().to("cpu").contiguous()
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


def _answer(choice: Mapping[str, Any], job: Job) -> Answer:
    """A choice of the completions API with vLLM's `token_ids`.

    Raises:
        RunError: it belongs to another prompt, or broke off.
        LookupError, TypeError, ValueError, OverflowError: something is missing, or of no use.
    """
    if choice["prompt_token_ids"] != job.prompt:
        raise RunError("the vLLM server answered to another prompt than it was sent")
    if choice["finish_reason"] not in ("stop", "length"):
        raise RunError(f"the vLLM server broke a completion off ({choice['finish_reason']})")
    tokens, logps = list(choice["token_ids"]), [float(logp) for logp in choice["logprobs"]["token_logprobs"]]
    if not all(type(token) is int for token in tokens):
        raise TypeError("token ids that are no integers")
    if "prompt_logprobs" not in job.parameters:
        return Answer(tokens, logps)
    listed = choice["prompt_logprobs"]
    read = [at[str(id)]["logprob"] for id, at in zip(job.prompt[1:], listed[1:], strict=True)]
    return Answer(tokens, logps, [float(value) for value in read])
