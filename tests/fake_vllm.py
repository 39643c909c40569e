"""A vLLM for tests: it computes with a model of its own, takes new weights as vLLM does, and can be made to fail as it does.

`serving_vllm` puts it behind vLLM's server, `installed` behind a module `vllm`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.models import byte_tokenizer
from tests.servers import Answer, serving

DEFAULTS = {"top_k": 3, "top_p": 0.5, "repetition_penalty": 1.5, "min_p": 0.1, "temperature": 0.3}
"""What a checkpoint may store and vLLM takes where a request leaves it open."""


class FakeVllm:
    """Attributes:
    model: its own copy, random until weights come; the output projection is another copy of the embedding.
    eos: the end id of its own folder, which may be another than the trainer's.
    takes: whether it takes a tensor of that name.
    tempered: gives log-probs at the temperature (`--logprobs-mode processed_logprobs`).
    remembers: forgot to reset its prefix cache: goes on with what it computed for a prompt under old weights.
    spoil: changes an answer before it is given.
    synced: names of the tensors of every sync.
    """

    def __init__(self, like: PreTrainedModel, tokenizer: Any, seed: int = 99) -> None:
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(like.config).eval()
        head = self.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.tokenizer = tokenizer
        self.eos = 7
        self.takes: Callable[[str], bool] = lambda name: True
        self.tempered = True
        self.resets = True
        self.remembered: dict[tuple[int, ...], Tensor] = {}
        self.spoil: Callable[[dict[str, Any]], None] = lambda said: None
        self.synced: list[list[str]] = []
        self.asked: list[dict[str, Any]] = []

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """As `reload_weights`: what is not sent stays."""
        own = self.model.state_dict()
        assert set(weights) <= set(own)
        self.synced.append(sorted(weights))
        with torch.no_grad():
            for name, weight in weights.items():
                if self.takes(name):
                    own[name].copy_(weight)

    def reset(self) -> bool:
        """As `reset_prefix_cache`."""
        if self.resets:
            self.remembered.clear()
        return True

    @torch.no_grad()
    def logits(self, tokens: list[int], remembered: bool = False) -> Tensor:
        """(n, V). Where it may, the prediction behind a whole prompt is remembered."""
        found = self.remembered.get(tuple(tokens))
        if remembered and found is not None:
            return found
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0].float()
        if remembered:
            self.remembered[tuple(tokens)] = logits
        return logits

    def answer(self, prompt: list[int], given: Mapping[str, Any]) -> dict[str, Any]:
        """A completion by vLLM's rules."""
        self.asked.append({"prompt": prompt, **given})
        p = {**DEFAULTS, **given}
        assert (p["top_p"], p["top_k"], p["min_p"], p["repetition_penalty"]) == (1.0, 0, 0.0, 1.0), "a default leaked"
        generator = torch.Generator().manual_seed(p["seed"])
        tokens: list[int] = []
        logps: list[float] = []
        reason, stop_reason = "length", None
        while len(tokens) < p["max_tokens"]:
            logits = self.logits([*prompt, *tokens], remembered="prompt_logprobs" not in p and not tokens)[-1]
            greedy = p["temperature"] == 0
            tempered = torch.log_softmax(logits if greedy else logits / p["temperature"], -1)
            token = int(logits.argmax() if greedy else torch.multinomial(tempered.exp(), 1, generator=generator))
            tokens.append(token)
            logps.append(float((tempered if self.tempered else torch.log_softmax(logits, -1))[token]))
            text = self.tokenizer.decode(tokens, skip_special_tokens=p["skip_special_tokens"])
            found = [stop for stop in p.get("stop", []) if stop in text]
            if token in p.get("stop_token_ids", []) or (token == self.eos and not p["ignore_eos"]) or found:
                reason, stop_reason = "stop", found[0] if found else token
                break
        said = {
            "text": self.tokenizer.decode(tokens),
            "token_ids": tokens,
            "finish_reason": reason,
            "stop_reason": stop_reason,
            "logprobs": {"token_logprobs": logps},
            "prompt_token_ids": prompt,
        }
        if "prompt_logprobs" in p:
            read = torch.log_softmax(self.logits(prompt), -1)
            said["prompt_logprobs"] = [
                None,
                *({str(id): {"logprob": float(read[at, id])}} for at, id in enumerate(prompt[1:])),
            ]
        self.spoil(said)
        return said


@contextmanager
def serving_vllm(vllm: FakeVllm, development: bool = True) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """`vllm` behind the paths of its server; address and requests."""

    def answer(asked: dict[str, Any]) -> Answer:
        path = asked["path"]
        if path == "/v1/completions":
            assert asked["return_token_ids"]
            given = {k: v for k, v in asked.items() if k not in ("path", "key", "prompt", "return_token_ids")}
            return 200, {"choices": [vllm.answer(asked["prompt"], given)]}
        if not development:
            return 404, {"detail": "Not Found"}
        if path == "/reset_prefix_cache":
            return 200, {"success": vllm.reset()}
        assert (path, asked["method"]) == ("/collective_rpc", "reload_weights")
        file = Path(asked["kwargs"]["weights_path"], "model.safetensors")
        if not file.is_file():
            return 500, {"error": {"message": f"Repo id must be in the form 'repo_name': '{file.parent}'"}}
        vllm.load(load_file(file))
        return 200, {"results": [None]}

    with serving(answer) as served:
        yield served


@contextmanager
def installed(vllm: FakeVllm) -> Iterator[list[dict[str, Any]]]:
    """A module `vllm` whose `LLM` is `vllm`; the arguments of every `LLM` that was made."""
    made: list[dict[str, Any]] = []

    class SamplingParams:
        def __init__(self, **given: Any) -> None:
            self.given = given

    class LLM:
        def __init__(self, model: str, **settings: Any) -> None:
            config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
            assert config.vocab_size == vllm.model.config.vocab_size
            assert tokenizer.get_vocab() == byte_tokenizer().get_vocab()
            made.append(settings)
            vllm.tempered = settings["logprobs_mode"] == "processed_logprobs"
            self.waiting: dict[str, tuple[list[int], dict[str, Any]]] = {}
            self.llm_engine = SimpleNamespace(has_unfinished_requests=lambda: bool(self.waiting), step=self.step)

        def enqueue(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[str]:
            start = len(vllm.asked)
            ids = [str(start + n) for n in range(len(prompts))]
            for id, prompt, params in zip(ids, prompts, sampling, strict=True):
                self.waiting[id] = prompt["prompt_token_ids"], params.given
            return [f"{id}-internal" for id in ids]

        def step(self) -> list[Any]:
            id, (prompt, given) = self.waiting.popitem()  # the last one first: answers come in any order
            said = vllm.answer(prompt, given)
            assert said["prompt_token_ids"] == prompt
            pairs = zip(said["token_ids"], said["logprobs"]["token_logprobs"], strict=False)
            output = SimpleNamespace(
                token_ids=said["token_ids"],
                finish_reason=said["finish_reason"],
                logprobs=[{token: SimpleNamespace(logprob=logp)} for token, logp in pairs],
            )
            read = [
                at and {int(id): SimpleNamespace(**value) for id, value in at.items()}
                for at in said.get("prompt_logprobs", [])
            ]
            whole = {"prompt_token_ids": prompt, "prompt_logprobs": read}
            return [
                SimpleNamespace(request_id=id, finished=False),
                SimpleNamespace(request_id=id, finished=True, outputs=[output], **whole),
            ]

        def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
            assert method == "reload_weights"
            vllm.load(dict(kwargs["weights_iterator"]))

        def reset_prefix_cache(self) -> bool:
            return vllm.reset()

    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    vars(module).update(LLM=LLM, SamplingParams=SamplingParams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", module)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "unset")
        patch.setenv("VLLM_LOGGING_LEVEL", "unset")
        yield made
