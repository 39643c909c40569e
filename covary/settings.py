"""The sections of a recipe as plain frozen dataclasses: fields, units, ranges, defaults.

No torch and nothing of covary is imported here, so every module may name its own section in a
signature. `config.py` checks values against these annotations; a range stands in the annotation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Text = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, lt=1)]


def check_address(url: str) -> None:
    """Refuse what no request can be sent to.

    Raises:
        ValueError: not the base of a server.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port out of range
        good = False
    if not good or not re.fullmatch(r"[!-~]+", url):  # neither blanks nor what a request's first line cannot hold
        raise ValueError(f"url: takes an address such as http://localhost:8000/v1, got {url!r}")


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter that is trained in place of the weights. Without dropout, as all of covary."""

    rank: PositiveInt = 16
    """Rank of the adapter's matrices (peft's `r`)."""
    alpha: PositiveFloat = 32.0
    """The adapter's part is scaled by alpha / rank (peft's `lora_alpha`)."""
    targets: Literal["all-linear"] | tuple[Text, ...] = "all-linear"
    """Layers that are adapted, by the last part of their names; never embeddings or the output projection."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("targets: names no layer; takes all-linear or a list of layer names")


@dataclass(frozen=True)
class Model:
    """The policy to start from."""

    name: Text = "tiny"
    """`tiny` (shipped with covary), a Hugging Face hub id, a folder, or a GGUF file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory. Trained weights are float32 master weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    lora: Lora | None = None
    """Train a low-rank adapter. None: train all weights."""


@dataclass(frozen=True)
class Replay:
    """Experience replay: part of each group from that prompt's own past."""

    history: PositiveInt
    """Past completions in a group; the other `completions - history` are fresh."""
    size: PositiveInt = 32
    """Newest completions that are kept per prompt."""


@dataclass(frozen=True)
class Given:
    """Completions from a file as part of each group."""

    path: Text
    """JSON Lines: `completion` (a text or a list), and `id` or `prompt` (the question's text) of the example it answers."""
    count: PositiveInt = 1
    """Given completions in a group, at most; the others are fresh."""


@dataclass(frozen=True)
class RolloutServer:
    """A server of vLLM that samples the policy, with its own copy of the weights."""

    url: Text
    """Its base, such as http://127.0.0.1:8000/v1."""
    weights: Text | None = None
    """Folder that run and server both see, where new weights are put down for a moment. None: in the run folder."""
    concurrency: PositiveInt = 64
    """Requests under way at a time; the server batches them."""
    timeout: PositiveFloat = 600.0
    """Seconds without a byte from the server."""
    attempts: PositiveInt = 5
    """Times that one request is made, with pauses that double, before the run stops."""
    api_key: Text | None = None
    """The environment variable that holds the server's key. None: no key is sent."""

    def __post_init__(self) -> None:
        check_address(self.url)


@dataclass(frozen=True)
class Rollout:
    """Where completions come from, how many and how they are sampled.

    top-p, top-k and penalties are absent on purpose, see `covary.types.Sampling`.
    """

    engine: Literal["transformers", "vllm", "dataset"] = "transformers"
    """Sample from the policy, with the trainer's own model or with vLLM; or take the completions that the task's rows hold."""
    prompts: PositiveInt = 64
    """Prompts a step."""
    completions: PositiveInt = 8
    """Completions a prompt (k), all sources together."""
    max_tokens: PositiveInt = 256
    """Tokens a completion, at most."""
    temperature: PositiveFloat = 1.0
    """The policy's logits are divided by it before sampling."""
    stop: tuple[Text, ...] = ()
    """Texts that end a completion; graders read the text before them."""
    replay: Replay | None = None
    """Past completions in each group, for methods that learn from any sampler."""
    file: Given | None = None
    """Completions of a file in each group, for methods that learn from any sampler."""
    max_regenerations: NonNegativeInt = 4
    """Times a step may draw new prompts for groups that the algorithm's `select` dropped."""
    server: RolloutServer | None = None
    """Who runs vLLM. None: this process."""
    memory_share: Share = 0.3
    """Share of the GPU's memory (without one, of the machine's) that vLLM takes in this process, its weights included."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW, and how a rollout is cut into updates."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    prompts: PositiveInt | None = None
    """Prompts (groups) an update; divides `rollout.prompts`. None: the whole rollout."""
    passes: PositiveInt = 1
    """Times that each rollout is learned from."""
    warmup: NonNegativeFloat = 0.0
    """Linear warm-up of the learning rate: below 1 a share of the steps, from 1 a number of steps."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up; `cosine` and `linear` fall to 0 at the last step."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient of an update is scaled down to this L2 norm."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""


@dataclass(frozen=True)
class Engine:
    """How scores and gradients are computed; only `autocast` and `logprob_temperature` change their values."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU where there is one."""
    micro_batch_tokens: PositiveInt = 8192
    """Tokens (prompt and completions) a forward pass, at most; bounds memory."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Compute in bfloat16 over float32 master weights, in rollout and scoring alike."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    logprob_temperature: PositiveFloat = 1.0
    """Logits are divided by it before the log-probs that algorithms see."""


@dataclass(frozen=True)
class RewardModel:
    """A reward that a sequence classifier of one label gives: its logit."""

    model: Text
    """A folder or a Hugging Face hub id. Weights are read from safetensors only."""
    micro_batch_tokens: PositiveInt = 8192
    """Tokens (prompts, completions and padding) a forward pass, at most; bounds memory."""


@dataclass(frozen=True)
class JudgeServer:
    """An OpenAI-compatible server that runs the judge."""

    url: Text
    """Its base, such as http://localhost:8000/v1."""
    concurrency: PositiveInt = 8
    """Requests under way at a time."""
    timeout: PositiveFloat = 60.0
    """Seconds that one request may take."""
    api_key: Text | None = None
    """The environment variable that holds the server's key. None: no key is sent."""

    def __post_init__(self) -> None:
        check_address(self.url)


@dataclass(frozen=True)
class Judge:
    """A chat model that is shown question, reference answer and completion, and says Correct or Incorrect."""

    model: Text
    """A folder or a Hugging Face hub id; with `server`, the name by which that knows the model."""
    server: JudgeServer | None = None
    """Who runs the model. None: this process."""
    style: Literal["plain", "xverify"] = "plain"
    """What is sent and how the reply is read: covary's own wording (or `prompt_file`), or that of xVerify."""
    prompt_file: Text | None = None
    """A prompt of your own: text with {question}, {answer} and {completion} (or {output})."""
    max_tokens: PositiveInt = 16
    """Tokens a reply, at most; more for a judge that thinks aloud first."""
    cache: Text | None = None
    """JSON Lines file that keeps replies for later runs. None: they are kept as long as the run lasts."""

    def __post_init__(self) -> None:
        if self.style == "xverify" and self.prompt_file is None:
            raise ValueError(
                "prompt_file: is required with style: xverify; its prompt is licensed CC BY-NC-ND and not shipped, "
                "copy it from https://github.com/IAAR-Shanghai/xVerify into a text file"
            )


@dataclass(frozen=True)
class JudgeReward:
    """A reward of 1 or 0 that a judge gives."""

    judge: Judge
    """Which one, and how it is asked."""


@dataclass(frozen=True)
class LikelihoodReward:
    """A reward without a verifier: how likely the policy finds the reference answer behind what it sampled."""

    likelihood: Literal["sum", "mean", "prob", "geo", "mean_prob"]
    """Of the answer's tokens: summed or mean log-probs; their probability, or its geometric or arithmetic mean."""


@dataclass(frozen=True)
class Teacher:
    """The model that a distillation method learns from, in this process."""

    model: Text
    """A shipped model, a Hugging Face hub id, a folder, or a GGUF file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its weights; its log-softmax is float32 either way."""
    device: Text = "auto"
    """`auto` (that of the student), `cpu`, `cuda`, or one of several GPUs, such as `cuda:1`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    cache: Text | None = None
    """JSON Lines file that keeps the teacher's completions for other runs. None: `teacher.jsonl` in the run folder."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device: takes auto, cpu, cuda or cuda:N, got {self.device!r}")


@dataclass(frozen=True)
class TeacherServer:
    """A teacher behind an OpenAI-compatible server that returns the log-probs of a prompt, such as vLLM."""

    url: Text
    """Its base, such as http://localhost:8000/v1."""
    tokenizer: Text
    """The teacher's tokenizer: a Hugging Face hub id or a folder. Texts are rendered and encoded here."""
    served_model: Text | None = None
    """The name by which the server knows the teacher. None: that of `tokenizer`."""
    concurrency: PositiveInt = 8
    """Requests under way at a time."""
    timeout: PositiveFloat = 120.0
    """Seconds without a byte from the server."""
    attempts: PositiveInt = 6
    """Times that one request is made, with pauses that double, before the run stops."""
    api_key: Text | None = None
    """The environment variable that holds the server's key. None: no key is sent."""
    cache: Text | None = None
    """JSON Lines file that keeps the teacher's completions for other runs. None: `teacher.jsonl` in the run folder."""

    def __post_init__(self) -> None:
        check_address(self.url)


@dataclass(frozen=True)
class Eval:
    """Evaluation on the task's test split, before the first and after the last step."""

    every: PositiveInt | None = None
    """Steps between further evaluations. None: only before and after."""
    samples: PositiveInt = 1
    """Completions a test question."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    max_tokens: PositiveInt | None = None
    """Tokens a completion, at most. None: `rollout.max_tokens`."""
    reward: Text | RewardModel | JudgeReward | None = None
    """As the recipe's `reward`. None: the task's grader, or `reward` where it has none."""
    tasks: tuple[Text, ...] = ()
    """Benchmarks that are evaluated beside the task's test split, each by its own grader."""
    data_dir: Text | None = None
    """Folder with a folder per benchmark. None: from the hub."""
    limit: PositiveInt | None = None
    """Questions of each benchmark, at most, the same ones every time. None: all."""


@dataclass(frozen=True)
class Checkpoint:
    """When the run can be resumed from; the end is always kept."""

    every: PositiveInt | None = 50
    """Steps between checkpoints. None: only at the end."""
    keep_last: PositiveInt | Literal[-1] = 2
    """Newest checkpoints that stay on disk; -1 keeps all."""


@dataclass(frozen=True)
class Log:
    """What is reported beside `metrics.jsonl`."""

    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Experiment tracker that gets every row of `metrics.jsonl` too. One that fails is told of once and left out."""
    project: Text | None = None
    """What wandb or trackio file the run under. None: covary."""
    samples: NonNegativeInt = 2
    """Sampled completions that each step shows on screen."""
