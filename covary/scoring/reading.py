r"""What a teacher reads: a student's prompt and completion as the teacher's own token ids (GVPO++ section V).

With another tokenizer the two meet in the text. The teacher's chat template renders the messages; the completion's text
is encoded apart from it, so that no token spans the boundary; the teacher's end of turn follows where the student
ended by itself. What a student cut at its token limit has said is the beginning of something: nothing is appended.

The text is that of every sampled token, a stop string included: it is what the student's own log-prob counts. Control
tokens inside it stay visible as text, and text is never read as one of the teacher's control tokens. Left out (as
`skip_special_tokens` would) they would cost the teacher nothing, so a student could add any number of them.

With the same tokenizer the student's ids are read as they are, and only the prompt is rendered anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covary.prompts import Template, prompt_group, turn_end_token
from covary.types import Completion, Example, Group, UserError

_OPENED = re.compile(r"<think(?:ing)?>\s*$")  # a prompt that begins the thinking itself
_OPENS = re.compile(r"\s*<think(?:ing)?>\s*")
_PADDING = re.compile(r"[\[<].*(?:pad|unused|reserved|extra|dummy).*\d+.*[\]>]", re.IGNORECASE)
_REPLACEMENT = "\ufffd"  # what decoders make of bytes that are no character
_LONGEST_PART = 3  # bytes of a character that lacks its last


@dataclass(frozen=True)
class Reading:
    """How one teacher reads one student.

    Attributes:
        student: the student's tokenizer.
        teacher: the teacher's.
        template: the student's prompt form; the teacher takes its text where it has no chat template of its own.
        end: the id by which the teacher ends its turn.
        same_tokens: ids mean the same to both, their ends aside (`same_tokens`).
        relabelled: the student's end id, where the same tokens have other ends: it stands for `end`.
        context: tokens that the teacher can read; None: no limit known.
        vocabulary: ids that the teacher knows; None: not known.
    """

    student: Any
    teacher: Any
    template: Template
    end: int
    same_tokens: bool = False
    relabelled: int | None = None
    context: int | None = None
    vocabulary: int | None = None

    def prompt(self, example: Example) -> list[int]:
        """The teacher's ids of an example's prompt.

        Raises:
            UserError: its chat template refuses the messages, or there is none and the student's prompt is a chat.
        """
        chats = not isinstance(example.prompt, str) and self.teacher.chat_template is not None
        form = "chat" if chats else self.template.contexts["prompt"]
        try:
            ids = _render(example, form, self.teacher)
        except UserError as error:
            raise UserError(f"teacher: {error}") from error
        opening = _OPENED.search(self._student_prompt(example))
        if opening and not _OPENED.search(self.teacher.decode(ids)):
            # The student goes on inside a thought: so does the teacher, and nobody is scored for its opening.
            ids += self._encode(opening[0])
        return ids

    def opening(self, example: Example) -> str:
        """How the teacher's prompt begins the thinking, where the student's does not: a completion lacks it then."""
        opened = _OPENED.search(self.teacher.decode(self.prompt(example)[-16:]))
        return opened[0] if opened and not _OPENED.search(self._student_prompt(example)) else ""

    def completion(self, completion: Completion, prompt: Sequence[int] = ()) -> list[int]:
        """The teacher's ids of a completion; none where it has no text and no end.

        Args:
            completion: the student's.
            prompt: the teacher's ids of its prompt; one that opens the thinking is not opened twice.
        """
        tokens = [completion.tokens[t] for t in completion.role_positions("sampled")]
        ended = completion.finish == "eos"
        if self.same_tokens:
            return [self.end if token == self.relabelled else token for token in tokens]
        text = self._text(tokens[:-1]) if ended else self._whole(tokens)
        if _OPENED.search(self.teacher.decode(list(prompt[-16:]))):
            opened = _OPENS.match(text)
            text = text[opened.end() :] if opened else text
        return [*self._encode(text), *([self.end] if ended else [])]

    def read(self, group: Group) -> tuple[list[int], list[list[int] | None]]:
        """A group's prompt and completions in the teacher's ids; None for a completion that the teacher cannot read.

        It cannot where there is nothing to read, too much for its context, or an id that its model lacks.
        """
        prompt = self.prompt(group.example)
        completions: list[list[int] | None] = []
        for completion in group.completions:
            ids = self.completion(completion, prompt)
            fits = self.context is None or len(prompt) + len(ids) <= self.context
            known = self.vocabulary is None or max([*prompt, *ids]) < self.vocabulary
            completions.append(ids if ids and fits and known else None)
        return prompt, completions

    def _student_prompt(self, example: Example) -> str:
        ids = _render(example, self.template.contexts["prompt"], self.student)
        return self.student.decode(ids[-16:])

    def _text(self, tokens: list[int]) -> str:
        return self.student.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _whole(self, tokens: list[int]) -> str:
        """The text of an unfinished completion without the character in which it was cut."""
        text = self._text(tokens)
        if not text.endswith(_REPLACEMENT):
            return text
        starts = range(len(tokens) - 1, max(-1, len(tokens) - 1 - _LONGEST_PART), -1)
        cut = any(not self._text(tokens[:start]).endswith(_REPLACEMENT) for start in starts)
        return text.rstrip(_REPLACEMENT) if cut else text  # more bytes than a character has are no cut one

    def _encode(self, text: str) -> list[int]:
        return list(self.teacher.encode(text, add_special_tokens=False, split_special_tokens=True))


def _render(example: Example, form: str, tokenizer: Any) -> list[int]:
    return list(prompt_group(example, Template("", {"prompt": form}), tokenizer).contexts["prompt"])


def end_of_turn(tokenizer: Any, end_ids: frozenset[int]) -> int:
    """The id that ends an answer in a tokenizer's chat template; without such a one, its end token.

    Args:
        tokenizer: the teacher's.
        end_ids: every id that ends a completion of its model; of several markup tokens one of these is the end.

    Raises:
        UserError: it has no end token at all.
    """
    token = turn_end_token(tokenizer, end_ids)
    token = tokenizer.eos_token_id if token is None else token
    if token is None:
        raise UserError("teacher: its tokenizer has no end token, so it cannot tell an answer from its beginning")
    return token


def same_tokens(student: Any, teacher: Any) -> bool:
    """Whether every ordinary id means the same text to both tokenizers.

    Padding of the vocabulary does not count, nor do added tokens (markup, end tokens, tags): ids that both
    have added may be named differently (`other_markup`).
    """
    ours, theirs = _ordinary(student), _ordinary(teacher)
    ids = sorted(ours)
    return ours == theirs and student.decode(ids) == teacher.decode(ids)


def other_markup(student: Any, teacher: Any) -> dict[int, tuple[str, str]]:
    """Added tokens of one id and two names: id -> (the student's, the teacher's)."""
    ours, theirs = student.added_tokens_decoder, teacher.added_tokens_decoder
    both = sorted(ours.keys() & theirs.keys())
    return {id: (str(ours[id]), str(theirs[id])) for id in both if str(ours[id]) != str(theirs[id])}


def _ordinary(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder
    return {
        id: token for token, id in tokenizer.get_vocab().items() if id not in added and not _PADDING.fullmatch(token)
    }
