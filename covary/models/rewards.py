"""Rewards that models give, from a recipe's words: reward models and judges.

What can be told without their weights is checked at once; the weights are read when the run is put together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from covary.http import read_key
from covary.models.loading import (
    check_labels,
    context_length,
    load_classifier,
    load_config,
    load_model,
    load_tokenizer,
    model_path,
    pick_device,
)
from covary.prompts import Room
from covary.rewards import Graded, Reward
from covary.rewards.judge import PROMPT, JudgedReward, JudgePrompt, Replies, control_tokens, load_form
from covary.rewards.reward_model import ModelReward
from covary.rewards.server import ChatServer
from covary.rewards.types import TokenIds
from covary.rollout.chat import LocalChat
from covary.rollout.transformers import TransformersRollout
from covary.settings import Judge, JudgeReward, RewardModel
from covary.types import Example, UserError

_SLOTS = {"plain": (("completion", "output"),), "xverify": (("question",), ("answer",), ("output", "completion"))}


class WithModel:
    """A reward whose model is loaded on `load`, or when it is first asked for.

    Attributes:
        name: how messages call it.
        prompt_sha256: of what a judge is sent around an answer; None where nothing is.
        elsewhere: the model is behind a server, so grading takes nothing from this process.
    """

    def __init__(
        self, name: str, make: Callable[[], Reward], form: str | None = None, *, elsewhere: bool = False
    ) -> None:
        self.name = name
        self.elsewhere = elsewhere
        self.prompt_sha256 = None if form is None else hashlib.sha256(form.encode()).hexdigest()
        self._make = make
        self._made: Reward | None = None

    def load(self) -> Reward:
        """The reward with its model.

        Raises:
            UserError: the model cannot be loaded.
        """
        if self._made is None:
            self._made = self._make()
        return self._made

    def __call__(
        self, examples: Sequence[Example], completions: Sequence[str], token_ids: TokenIds | None = None
    ) -> list[Graded]:
        """Grade `completions[i]` as an answer to `examples[i]`."""
        return self.load()(examples, completions, token_ids)

    def close(self) -> None:
        """Let the model go."""
        self._made = None


def build_model_reward(spec: RewardModel | JudgeReward, key: str, device: str) -> WithModel:
    """The reward of a recipe's section.

    Args:
        spec: the section.
        key: where it stands in the recipe (`reward` or `eval.reward`), for messages.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        UserError: what can be told without the model's weights.
    """
    if isinstance(spec, RewardModel):
        with _called(f"{key}.model"):
            if Path(model_path(spec.model)).is_dir():  # a hub is not asked before the run is put together
                check_labels(spec.model, load_config(spec.model))
        return WithModel(spec.model, lambda: _reward_model(spec, f"{key}.model", device))
    judge, key = spec.judge, f"{key}.judge"
    form = PROMPT
    if judge.prompt_file is not None:
        form = load_form(judge.prompt_file, f"{key}.prompt_file", _SLOTS[judge.style])
    api_key = None
    if judge.server is None:
        with _called(f"{key}.model"):
            model_path(judge.model)
    elif judge.server.api_key is not None:
        api_key = read_key(judge.server.api_key, f"{key}.server.api_key")
    replies = Replies(
        repr((judge.model, judge.server and judge.server.url, judge.max_tokens)),
        Path(judge.cache).expanduser() if judge.cache is not None else None,
    )
    if judge.server is not None:
        server = judge.server
        ask = ChatServer(server.url, judge.model, judge.max_tokens, server.concurrency, server.timeout, api_key)
        return WithModel(
            judge.model, lambda: JudgedReward(judge.model, JudgePrompt(form), ask, replies), form, elsewhere=True
        )
    return WithModel(judge.model, lambda: _local_judge(judge, form, replies, f"{key}.model", device), form)


def _reward_model(spec: RewardModel, key: str, device: str) -> ModelReward:
    with _called(key):
        model = load_classifier(spec.model, device=pick_device(device))
        tokenizer = load_tokenizer(spec.model)
    limits = [context_length(model.config), tokenizer.model_max_length]  # an absent one of a tokenizer is 1e30
    context = min((limit for limit in limits if limit is not None and limit < 1e9), default=None)
    return ModelReward(spec.model, model, tokenizer, context, spec.micro_batch_tokens)


def _local_judge(judge: Judge, form: str, replies: Replies, key: str, device: str) -> JudgedReward:
    with _called(key):
        model = load_model(judge.model, device=pick_device(device))
        tokenizer = load_tokenizer(judge.model)
    rollout = TransformersRollout(model, tokenizer)  # pyright: ignore[reportArgumentType]
    room = Room(context_length(model.config), max_tokens=judge.max_tokens)
    chat = LocalChat(rollout, tokenizer, room, judge.max_tokens)
    return JudgedReward(judge.model, JudgePrompt(form, control_tokens(tokenizer)), chat, replies)


@contextmanager
def _called(key: str) -> Iterator[None]:
    """Loading speaks of `model.name`; here the model has another place in the recipe."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.name", key)) from error
