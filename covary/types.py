"""The nouns of covary that need no torch: what a task, a rollout and a reward speak of.

Lengths are in tokens, log-probs in nats. `batch.py` holds the nouns that need torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]  # {"role": ..., "content": ...}
Prompt = str | list[Message]

Source = Literal["policy", "teacher", "mixed", "dataset", "replay"]
Role = Literal["sampled", "answer", "context"]
Finish = Literal["eos", "stop_string", "length"]
ModelRole = Literal["policy", "old", "initial", "reference", "teacher"]


class UserError(ValueError):
    """A mistake that only the user can mend. The command line prints it as one line and exits with 2."""


class RunError(RuntimeError):
    """A run that cannot go on, through no mistake in its recipe. The command line exits with 1."""


@dataclass
class Example:
    """One row of a task.

    Attributes:
        id: unique within its task and split; seeds and caches are derived from it.
        prompt: text, or chat messages.
        answer: the reference answer, where there is one.
        completions: offline completions (texts), for methods that learn from data.
        rewards: rewards of `completions`, where the data have them.
        columns: every other column of the row; rewards and features receive them.
        given_prompt: the prompt as the data have it, where a task put a form around it (`prompt` is what the model
            sees); reward functions that take all completions at once get this one.
    """

    id: str
    prompt: Prompt
    answer: str | None = None
    completions: list[str] | None = None
    rewards: list[float | None] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    given_prompt: Prompt | None = None


@dataclass
class Completion:
    """One sampled (or given) answer to a prompt.

    Attributes:
        tokens: token ids, with the end token iff the model emitted it.
        text: what graders read: without the end token, cut before a stop string.
        finish: what ended it.
        logps: nats per token, of the sampling policy at its temperature; untempered for greedy
            rows; None where unknown (offline data).
        roles: one per token; None means that every token was sampled.
        source: who produced it.
        context: name of the group's context under which it was sampled.
        learn: False for rows that feed rewards and `prepare` and then leave (greedy baselines).
        weights_version: number of optimizer updates of the weights that sampled it.
        greedy: sampled at temperature 0.
        numbers: what is known of the row beside its reward: features (floats) and frozen scores
            (floats, or 1-D tensors over `tokens`), by name. `collate` puts them into the batch.
        weight: how hard the first update pushed this row: minus the mean over its tokens of
            dloss/dlogp, times the rows of the optimizer batch. None until then, or if it left.
    """

    tokens: list[int]
    text: str
    finish: Finish
    logps: list[float] | None = None
    roles: list[Role] | None = None
    source: Source = "policy"
    context: str = "prompt"
    learn: bool = True
    weights_version: int = 0
    greedy: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)
    weight: float | None = None

    @property
    def sampled_length(self) -> int:
        """Tokens that the sampler chose (an appended answer is none)."""
        return len(self.tokens) if self.roles is None else len(self.role_positions("sampled"))

    @property
    def valid_trace(self) -> bool:
        """A trace that was closed (so the reference answer stands behind it) and is not empty."""
        return "answer" in (self.roles or ()) and bool(self.text.strip())

    def role_positions(self, tokens: Literal["sampled", "answer", "both"]) -> list[int]:
        """Positions in `tokens` whose role is asked for ("both" is sampled and answer, never context)."""
        if self.roles is None:
            return [] if tokens == "answer" else list(range(len(self.tokens)))
        wanted = ("sampled", "answer") if tokens == "both" else (tokens,)
        return [t for t, role in enumerate(self.roles) if role in wanted]


@dataclass
class Group:
    """All completions of one prompt: the unit of every sum in a loss and of computation.

    Attributes:
        example: the row they answer.
        contexts: prompt token ids by name ("prompt" always; a method may declare more).
        completions: in the order of the plan's requests.
        rewards: one per completion; None where the row could not be scored. The list itself is
            None until rewards are known, or where the method needs none.
        answer_tokens: the reference answer's own ids, for scores `per="example"`.
    """

    example: Example
    contexts: dict[str, list[int]]
    completions: list[Completion] = field(default_factory=list)
    rewards: list[float | None] | None = None
    answer_tokens: list[int] | None = None


@dataclass(frozen=True)
class Request:
    """What a plan asks the rollout engine for: `count` completions of one kind.

    `learn=False` rows feed the rewards and `prepare` and then leave. `mixed` draws every token from
    teacher_share * teacher + (1 - teacher_share) * policy.
    """

    count: int
    source: Literal["policy", "teacher", "mixed", "dataset"] = "policy"
    context: str = "prompt"
    decoding: Literal["sample", "greedy"] = "sample"
    learn: bool = True
    teacher_share: float = 0.0


@dataclass(frozen=True)
class Stream:
    """A model that reads the completion under a context. `reference` is `old` or `initial`, as the recipe says.

    A teacher reads its own rendering of the prompt, whatever the context.
    """

    model: ModelRole = "policy"
    context: str = "prompt"


@dataclass(frozen=True)
class Score:
    """One number per token (B, T) or per row (B,), from one or two streams.

    Attributes:
        name: the key under which losses and batches know it.
        streams: one Stream, or a tuple of two for quantities that compare full distributions.
        quantity: a name in `covary.quantities.QUANTITIES`, with arguments: ("jsd", 0.5).
        tokens: which tokens are scored. A row without such tokens has 0 (an answer that was never appended:
            `batch.answer_mask` tells).
        level: per token, or summed over the row (in float64).
        per: "row", or "example": the reference answer itself under the context, once per example; NaN where
            there is no answer.
        early: needed by `reward`, `select` or `prepare`, so computed before them.
    """

    name: str
    streams: Stream | tuple[Stream, Stream] = Stream()
    quantity: str | tuple[str, float] = "logp"
    tokens: Literal["sampled", "answer", "both"] = "sampled"
    level: Literal["token", "sequence"] = "token"
    per: Literal["row", "example"] = "row"
    early: bool = False

    def __post_init__(self) -> None:
        if self.per == "example" and self.level != "sequence":
            raise ValueError(f"score {self.name!r}: per='example' has no token positions, use level='sequence'")

    @property
    def stream_pair(self) -> tuple[Stream, ...]:
        """The streams as a tuple of one or two."""
        return self.streams if isinstance(self.streams, tuple) else (self.streams,)

    @property
    def models(self) -> set[str]:
        """Names of the models that this score reads."""
        return {stream.model for stream in self.stream_pair}


@dataclass(frozen=True)
class Sampling:
    """Every parameter that shapes sampled text, explicit: nothing is read from a checkpoint's defaults.

    top-p, top-k and penalties do not exist here on purpose: GVPO's optimum needs the sampler's support
    to cover the reference's (GVPO++ Thm IV.2).
    """

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
