"""A teacher that samples: what its completions are known by, and who makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from covary.http import read_key
from covary.models.loading import fingerprint
from covary.models.teacher import LocalTeacher
from covary.rollout.server import ServerRollout
from covary.rollout.store import Store
from covary.rollout.teacher import TeacherRollout, Translation
from covary.rollout.transformers import TransformersRollout
from covary.scoring.reading import Reading
from covary.settings import Teacher, TeacherServer


def teacher_rollout(
    teacher: Teacher | TeacherServer,
    reading: Reading,
    local: LocalTeacher | None,
    *,
    student_ends: frozenset[int],
    student_vocabulary: int,
    folder: Path,
    seed: int,
    say: Callable[[str], None],
    on_progress: Callable[[int, int], None],
) -> TeacherRollout:
    """Completions of the recipe's teacher for the student.

    Args:
        teacher: the recipe's section.
        reading: how it reads the student; its prompts are the teacher's.
        local: its weights, where it is in this process.
        student_ends: ids that end the student's completions.
        student_vocabulary: ids that its model has.
        folder: of the run: completions are kept there unless the section names a file.
        seed: of its samples.
        say: where to tell of damaged lines of the file.
        on_progress: called with (completions finished, completions in all).

    Raises:
        UserError: the file of completions cannot be read, the server's key is not set, or the student's tokenizer has
            no end token.
    """
    if reading.student.eos_token_id is None:
        raise UserError("model.name: its tokenizer has no end token, so the teacher's completions cannot be ended")
    sampler: TransformersRollout | ServerRollout
    if local is not None:
        sampler = TransformersRollout(local.model, local.tokenizer)  # pyright: ignore[reportArgumentType]
        sampler.end_ids = local.end_ids
        identity = f"{local.name} {fingerprint(local.model)}"
    else:
        assert isinstance(teacher, TeacherServer)
        name = teacher.served_model or teacher.tokenizer
        key = read_key(teacher.api_key, "teacher.api_key") if teacher.api_key is not None else None
        sampler = ServerRollout(
            teacher.url, name, reading.teacher, key, teacher.concurrency, teacher.timeout, teacher.attempts
        )
        identity = f"server {name}"
    sampler.on_progress = on_progress
    return TeacherRollout(
        sampler,
        identity,
        reading.prompt,
        reading.opening,
        Translation(reading.student, reading.teacher, student_ends, reading.same_tokens, student_vocabulary),
        Store(Path(teacher.cache).expanduser() if teacher.cache else folder / "teacher.jsonl", say),
        seed,
        reading.context,
    )
