"""Completions of a teacher as the student's tokens.

A teacher's completions are data: those of a prompt are the same whenever it is drawn. So each is sampled once, and
`store` keeps it for later epochs, for a resume and for other runs. With another tokenizer the two meet in the text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from covary.batch import RolloutEngine
from covary.rollout.store import Store
from covary.types import Completion, Example, Group, Request, RunError, Sampling, UserError

_REPLACEMENT = "\ufffd"  # what decoders make of bytes that are no character


@dataclass(frozen=True)
class Translation:
    """A teacher's completions in the student's tokens.

    Attributes:
        student: the student's tokenizer.
        teacher: the teacher's.
        end_ids: ids that end the student's completions.
        same_tokens: ids mean the same to both.
        vocabulary: ids that the student's model has. A teacher may have more (padding), which nobody should say.
    """

    student: Any
    teacher: Any
    end_ids: frozenset[int]
    same_tokens: bool
    vocabulary: int

    def __call__(self, completion: Completion, opening: str, max_tokens: int) -> Completion:
        """The completion for the student, without log-probs: they belong to the teacher.

        Args:
            completion: the teacher's.
            opening: what the teacher's prompt says already and the student has to say itself.
            max_tokens: of the student; a longer one is cut, its text with it.
        """
        ended = completion.finish == "eos"
        ids = completion.tokens[:-1] if ended else completion.tokens
        if self.same_tokens:
            tokens = [*(self._encode(opening) if opening else []), *ids]
        else:
            # Through the stop string, where there is one: stopping is something to learn too.
            text = self.teacher.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            tokens = self._encode(opening + (text.rstrip(_REPLACEMENT) if completion.finish == "length" else text))
        if ended:
            kept = self.same_tokens and completion.tokens[-1] in self.end_ids
            tokens.append(completion.tokens[-1] if kept else self.student.eos_token_id)
        if max(tokens, default=0) >= self.vocabulary:
            return _nothing()
        if len(tokens) <= max_tokens:
            return Completion(tokens, opening + completion.text, completion.finish, source="teacher")
        text = self.student.decode(tokens[:max_tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Completion(tokens[:max_tokens], text, "length", source="teacher")

    def _encode(self, text: str) -> list[int]:
        # Text is never read as a control token: an end in the middle of a row would be no end.
        return list(self.student.encode(text, add_special_tokens=False, split_special_tokens=True))


@dataclass(frozen=True)
class TeacherRollout:
    """Answers requests for the source `teacher`.

    Attributes:
        sampler: samples the teacher; to it the teacher is the policy.
        identity: of the teacher: what it is, not only what it is called.
        prompt: an example's prompt in the teacher's ids.
        opening: what that prompt says already of a completion (mostly nothing).
        translate: its completions for the student.
        store: its completions that are known.
        seed: of all of them, whatever the step.
        context: tokens that it can read. None: no limit known.
    """

    sampler: RolloutEngine
    identity: str
    prompt: Callable[[Example], list[int]]
    opening: Callable[[Example], str]
    translate: Translation
    store: Store
    seed: int
    context: int | None = None

    def generate(self, plans: list[list[Request]], groups: list[Group], sampling: Sampling, seed: int) -> list[Group]:
        """Groups with the teacher's completions, the same at every step: `seed` is not read.

        A prompt that the teacher cannot read has completions without tokens, and so has one of which its log-probs are
        not finite.

        Raises:
            RunError: they are finite for none.
            ValueError: another source, or greedy decoding.
        """
        if any(request.source != "teacher" or request.decoding != "sample" for plan in plans for request in plan):
            raise ValueError(f"a teacher is asked for samples of its own, got {plans}")
        keys: dict[str, str] = {}
        missing: dict[str, tuple[Group, list[Request]]] = {}
        for plan, group in zip(plans, groups, strict=True):
            id, prompt, count = group.example.id, self._read(group.example, sampling), sum(r.count for r in plan)
            if prompt is None:
                continue
            keys[id] = self._key(id, prompt, sampling)
            if len(self.store.get(keys[id])) < count:
                missing[id] = (replace(group, contexts={"prompt": prompt}), [Request(count)])
        if missing:
            # All of a prompt's, also where some are known: a sample's seed is its place among them.
            asked, wanted = (list(part) for part in zip(*missing.values(), strict=True))
            done = self.sampler.generate(wanted, asked, sampling, self.seed)
            if not any(_is_sound(completion) for group in done for completion in group.completions):
                raise RunError(f"the log-probs of the teacher ({self.identity}) are not finite: its model is broken")
            sound = [[c if _is_sound(c) else _nothing() for c in group.completions] for group in done]
            self.store.add({keys[id]: several for id, several in zip(missing, sound, strict=True)})
        return [
            replace(group, completions=self._rows(plan, group.example, keys.get(group.example.id), sampling))
            for plan, group in zip(plans, groups, strict=True)
        ]

    def observe(self, groups: list[Group]) -> None:
        """Nothing is learned from a step."""

    def load_weights(self, state: Mapping[str, Any] | None, version: int) -> None:
        """A teacher's weights never change."""

    def state(self) -> dict[str, Any]:
        """Nothing: what was sampled lies in the store, and what was not has its seed."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def _read(self, example: Example, sampling: Sampling) -> list[int] | None:
        """The prompt for the teacher; None where it cannot read it, or has no room for an answer."""
        try:
            ids = self.prompt(example)
        except UserError:  # of some prompts only, as was checked before the run
            return None
        return ids if self.context is None or len(ids) + sampling.max_tokens <= self.context else None

    def _key(self, id: str, prompt: list[int], sampling: Sampling) -> str:
        """Everything that determines the completions of a prompt."""
        parts = json.dumps([self.identity, self.seed, id, prompt, astuple(sampling)])
        return hashlib.blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _rows(self, plan: list[Request], example: Example, key: str | None, sampling: Sampling) -> list[Completion]:
        requests = [request for request in plan for _ in range(request.count)]
        if key is None:
            rows = [_nothing() for _ in requests]
        else:
            opening, sampled = self.opening(example), self.store.get(key)
            rows = [
                self.translate(completion, opening, sampling.max_tokens) if completion.tokens else _nothing()
                for completion in sampled[: len(requests)]
            ]
        return [
            replace(row, context=request.context, learn=request.learn)
            for row, request in zip(rows, requests, strict=True)
        ]


def _is_sound(completion: Completion) -> bool:
    """What a model says whose numbers are broken is no sample of it, though it looks like one."""
    return all(map(math.isfinite, completion.logps or ()))


def _nothing() -> Completion:
    """A row without tokens: it leaves, counted."""
    return Completion([], "", "length", source="teacher")
