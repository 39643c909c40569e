"""The teacher of a distillation run: what it reads, known from two tokenizers alone, and its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covary.models.loading import (
    context_length,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    pick_device,
)
from covary.prompts import Template, turn_end_token
from covary.rollout.transformers import end_ids
from covary.scoring.reading import Reading, end_of_turn, other_markup, same_tokens
from covary.settings import Teacher, TeacherServer
from covary.types import Example, Group, UserError


@dataclass(frozen=True)
class LocalTeacher:
    """A teacher in this process.

    Attributes:
        model: frozen. With the student's tokens its outputs are labelled as the student's: the student's end token
            has the log-prob of the teacher's end of turn, so the student's ids need no translation.
        tokenizer: the teacher's own; its chat template renders the prompts that `model` reads.
        end_ids: ids of `model`'s outputs that end a completion.
        same_tokens: its ids mean what the student's mean; else text is all that the two have in common.
        name: as the recipe has it.
        reading: how it reads the student.
    """

    model: nn.Module
    tokenizer: Any
    end_ids: frozenset[int]
    same_tokens: bool
    name: str
    reading: Reading


def read_teacher(
    teacher: Teacher | TeacherServer,
    student: Any,
    student_ends: frozenset[int],
    template: Template,
    *,
    offline: bool = False,
) -> Reading:
    """How the recipe's teacher reads the student. No weights are loaded.

    Args:
        teacher: the recipe's section.
        student: the student's tokenizer.
        student_ends: ids that end its completions.
        template: the student's prompt form.
        offline: ask no hub.

    Raises:
        UserError: the teacher's tokenizer cannot be loaded, or has no end token.
    """
    try:
        if isinstance(teacher, Teacher):
            key, trusted = "teacher.model", teacher.trust_remote_code
            tokenizer = load_tokenizer(teacher.model, trusted, offline=offline)
            architecture = load_config(teacher.model, trusted, offline=offline)
            text_config = architecture.get_text_config(decoder=True)
            ends = end_ids(tokenizer, load_generation_config(teacher.model, offline=offline), text_config)
            context, vocabulary = context_length(architecture), text_config.vocab_size
        else:
            key, tokenizer = "teacher.tokenizer", load_tokenizer(teacher.tokenizer, offline=offline)
            ends, context, vocabulary = end_ids(tokenizer), None, None
    except UserError as error:
        raise UserError(str(error).replace("model.name", key)) from error
    end, same = end_of_turn(tokenizer, ends), same_tokens(student, tokenizer)
    relabelled = _students_end(student, student_ends) if same and end not in student_ends else None
    return Reading(student, tokenizer, template, end, same, relabelled, context, vocabulary)


def _students_end(tokenizer: Any, ends: frozenset[int]) -> int | None:
    """The end id that a student really writes: that of its chat template, else its end token."""
    token = turn_end_token(tokenizer, ends)
    return token if token in ends else tokenizer.eos_token_id


def load_teacher(teacher: Teacher, reading: Reading, *, device: str, student_vocabulary: int) -> LocalTeacher:
    """The teacher with its weights.

    Args:
        teacher: the recipe's section.
        reading: what `read_teacher` gave for it.
        device: the student's, for a teacher whose device is `auto`.
        student_vocabulary: ids that the student can write, padding included.

    Raises:
        UserError: it cannot be loaded.
    """
    device = device if teacher.device == "auto" else _device(teacher.device)
    try:
        model = load_model(
            teacher.model,
            device=device,
            dtype=getattr(torch, teacher.dtype),
            trust_remote_code=teacher.trust_remote_code,
        )
    except UserError as error:
        raise UserError(str(error).replace("model.name", "teacher.model")) from error
    text_config = model.config.get_text_config(decoder=True)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    ends = end_ids(reading.teacher, getattr(model, "generation_config", None), text_config)
    if reading.same_tokens:
        _read_every_id(model, student_vocabulary)
        if reading.relabelled is not None:
            swapped = (reading.relabelled, reading.end)
            head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
            model.set_output_embeddings(RelabelledHead(head, swapped))  # pyright: ignore[reportCallIssue]
            ends = frozenset({reading.relabelled if id == reading.end else id for id in ends})
    model.requires_grad_(False)
    return LocalTeacher(model, reading.teacher, ends, reading.same_tokens, teacher.model, reading)


class RelabelledHead(nn.Module):
    """An output projection in which two ids have changed places."""

    def __init__(self, head: nn.Module, swapped: tuple[int, int]) -> None:
        super().__init__()
        self.head = head
        self.swapped = swapped

    @property
    def weight(self) -> Tensor:
        """The projection's own: its shape is what callers want."""
        return self.head.weight  # pyright: ignore[reportReturnType]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits, relabelled."""
        logits = self.head(hidden)
        order = torch.arange(logits.shape[-1], device=logits.device)
        order[list(self.swapped)] = order[list(reversed(self.swapped))]
        return logits.index_select(-1, order)


def _read_every_id(model: nn.Module, vocabulary: int) -> None:
    """Give an embedding to ids that only the student's padding has: one of them in a row must not end the run.

    The model gives them no probability: a row that has one leaves.
    """
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    missing = vocabulary - embedding.weight.shape[0]
    if missing > 0:
        padding = embedding.weight.new_zeros(missing, embedding.weight.shape[1])
        embedding.weight = nn.Parameter(torch.cat([embedding.weight.detach(), padding]))
        embedding.num_embeddings = vocabulary


def _device(name: str) -> str:
    kind, _, number = name.partition(":")
    try:
        device = pick_device(kind)
    except UserError as error:
        raise UserError(str(error).replace("engine.device", "teacher.device")) from error
    if number and int(number) >= torch.cuda.device_count():
        raise UserError(f"teacher.device: {name}, but torch sees {torch.cuda.device_count()} CUDA devices here")
    return f"{device}:{number}" if number else device


def check_prompts(
    reading: Reading, examples: Sequence[Example], max_tokens: int, *, samples: bool = False
) -> str | None:
    """Refuse a teacher that cannot read any of some prompts; a note where it cannot read a part of them.

    Args:
        reading: what it reads.
        examples: training rows.
        max_tokens: tokens a completion, at most; of a student's completion in the teacher's tokens their number is not
            known, and taken as 1.
        samples: the teacher writes completions itself, in its own tokens.

    Raises:
        UserError: it can read none, with the reason for the first.
    """
    room = max_tokens if reading.same_tokens or samples else 1
    complaints = [complaint for example in examples if (complaint := _complaint(reading, example, room))]
    if complaints and len(complaints) == len(examples):
        raise UserError(complaints[0])
    if complaints:
        return (
            f"the teacher cannot read {len(complaints)} of {len(examples)} prompts that were looked at, and their "
            f"completions leave when drawn (rows/invalid); {complaints[0]}"
        )
    return None


def _complaint(reading: Reading, example: Example, room: int) -> str | None:
    try:
        length = len(reading.prompt(example)) + room
    except UserError as error:
        return str(error)
    if reading.context is not None and length > reading.context:
        return (
            f"example {example.id!r}: the teacher's prompt and a completion have {length} tokens, "
            f"more than its context of {reading.context}"
        )
    return None


def describe(reading: Reading, group: Group) -> list[str]:
    """What a person should see before a run: both renderings of one prompt, the ends, and how tokens meet."""
    student, teacher = reading.student, reading.teacher
    ids = reading.prompt(group.example)
    end = f"{teacher.decode([reading.end])!r} ({reading.end})"
    lines = [
        f"student reads {group.example.id} as {len(group.contexts['prompt'])} tokens: "
        f"{student.decode(group.contexts['prompt'])!r}",
        f"teacher reads {group.example.id} as {len(ids)} tokens: {teacher.decode(ids)!r}",
    ]
    if not reading.same_tokens:
        return [
            *lines,
            "teacher: another tokenizer, so each completion's text is encoded anew and has one number; "
            f"where the student ended by itself, {end} ends the teacher's turn",
        ]
    told = (
        f"the student's end {reading.relabelled} stands for {end}"
        if reading.relabelled is not None
        else f"{end} ends turns for both"
    )
    lines.append(f"teacher: the same tokens, so the student's ids are scored as they are; {told}")
    named = other_markup(student, teacher)
    named = {id: names for id, names in named.items() if id not in (reading.relabelled, reading.end)}
    if named:
        shown = ", ".join(
            f"{id} {ours!r} is the teacher's {theirs!r}" for id, (ours, theirs) in list(named.items())[:4]
        )
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        lines.append(f"teacher: added tokens of another name: {shown}{more}")
    return lines
