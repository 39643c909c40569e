r"""Prompt templates: examples -> prompt token ids, by context.

A template is a YAML file that declares its pieces:

    contexts:            # name -> text with {question} and {answer}, or the word `chat`: the tokenizer's own template
      prompt: chat
    stop: "</think>"     # optional: what ends a sampled trace
    glue: "\n<answer>"   # optional: fixed tokens between the trace and the reference answer
    answer: "{answer}</answer>"   # optional: the reference answer, appended and scored after the trace
    tags: [<think>, </think>, <answer>, </answer>]   # optional: marks that are always encoded alone, never merged with
                         # what stands beside them, and that neither data nor traces may hold

Shipped templates lie beside this file; a recipe may name a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError

from covary.types import Example, Group, Prompt, UserError

_KEYS = ("contexts", "stop", "glue", "answer", "tags")


@dataclass(frozen=True)
class Template:
    """The pieces of a prompt form (see the module's text)."""

    name: str
    contexts: Mapping[str, str] = field(default_factory=lambda: {"prompt": "chat"})
    stop: str | None = None
    glue: str = ""
    answer: str | None = None
    tags: tuple[str, ...] = ()
    others: Mapping[str, Callable[[Example], list[int]]] = field(default_factory=dict)
    """Contexts that another model reads, such as a teacher: what renders them."""

    def encode(self, text: str, tokenizer: Any, start: bool = False) -> list[int]:
        """Token ids of a text, every tag encoded alone; with the tokenizer's start token where `start`."""
        longest_first = "|".join(re.escape(tag) for tag in sorted(self.tags, key=len, reverse=True))
        pieces = [piece for piece in re.split(f"({longest_first})", text) if piece] if self.tags else [text]
        ids = [tokenizer.encode(piece, add_special_tokens=start and i == 0) for i, piece in enumerate(pieces)]
        return [id for own in ids for id in own]

    @property
    def reads_answer(self) -> bool:
        """Whether it shows the reference answer or appends it."""
        return self.answer is not None or any("{answer}" in form for form in self.contexts.values())

    def tag_in(self, *texts: str | None) -> str | None:
        """The first tag that one of the texts holds."""
        return next((tag for text in texts for tag in self.tags if text and tag in text), None)

    def complaint(self, example: Example) -> str | None:
        """Why the example's question or answer would be read as markup; None where it would not."""
        tag = self.tag_in(example.answer, *_texts(example.prompt))
        if tag is None:
            return None
        return f"example {example.id!r}: its text holds {tag}, which is a mark of the template {self.name}"


def shipped_templates() -> list[str]:
    """Names of the templates that come with covary."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def load_template(name: str) -> Template:
    """A shipped template by name, or a YAML file by path.

    Raises:
        UserError: no such template, an unknown key, no `prompt` context or one that shows the answer, or an answer of
            fixed text.
    """
    path = Path(__file__).parent / f"{name}.yaml" if "/" not in name and "." not in name else Path(name)
    if not path.is_file():
        near = get_close_matches(name, shipped_templates(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"template {name!r} is no file and not shipped (shipped: {', '.join(shipped_templates())}){hint}"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"template {path}: not valid YAML ({str(error).splitlines()[0]})") from error
    contexts = data.get("contexts") if isinstance(data, dict) else None
    if not isinstance(contexts, dict) or "prompt" not in contexts:
        raise UserError(f"template {path}: needs `contexts` with at least `prompt`")
    unknown = [key for key in data if key not in _KEYS]
    if unknown:
        raise UserError(f"template {path}: unknown key {unknown[0]!r}; valid keys: {', '.join(_KEYS)}")
    texts = {
        **{f"contexts.{key}": value for key, value in contexts.items()},
        **{k: data[k] for k in ("stop", "glue", "answer") if k in data},
        **{f"tags, item {i}": tag for i, tag in enumerate(_listed(data.get("tags", []), path), 1)},
    }
    for key, value in texts.items():
        if not isinstance(value, str) or not value:
            raise UserError(f"template {path}: {key} takes text, got {value!r}")
    if "answer" in data and "stop" not in data:
        raise UserError(f"template {path}: `answer` follows a trace that ended at `stop`, which is missing")
    if "answer" in data and "{answer}" not in data["answer"]:
        raise UserError(
            f"template {path}: `answer` holds no {{answer}}, so every row would be scored for the same text"
        )
    if "{answer}" in contexts["prompt"]:
        raise UserError(
            f"template {path}: contexts.prompt shows {{answer}}, and evaluation asks by it; name another context"
        )
    pieces = (data.get("stop"), data.get("glue", ""), data.get("answer"))
    return Template(name, contexts, *pieces, tags=tuple(data.get("tags", [])))


def _listed(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"template {path}: tags takes a list of texts, got {value!r}")
    return value


def prompt_group(example: Example, template: Template, tokenizer: Any) -> Group:
    """A group without completions: every context of the template rendered and encoded for `example`.

    Raises:
        UserError: a chat prompt without a chat template or that ends with an assistant message, an example without
            the answer a context needs, or a prompt of no tokens.
    """
    contexts = {
        name: _encode(example, form, template, tokenizer, where=f"example {example.id!r}, context {name!r}")
        for name, form in template.contexts.items()
    }
    contexts |= {name: render(example) for name, render in template.others.items()}
    answer = None
    if template.answer is not None and example.answer is not None:
        answer = template.encode(fill(template.answer, example), tokenizer)
    return Group(example, contexts, answer_tokens=answer)


@dataclass(frozen=True)
class TurnEnd:
    """What a chat template puts behind an answer: a token of its markup, or text (token None)."""

    text: str
    token: int | None


def open_turn_end(tokenizer: Any, end_ids: frozenset[int], stop: Sequence[str]) -> TurnEnd | None:
    """The end of an answer's turn, where it does not end a completion; None where it does or cannot be told.

    A model that was taught with the template will write it, and go on behind it with the next turn.

    Args:
        tokenizer: its chat template is rendered for a conversation.
        end_ids: tokens that end a completion.
        stop: texts that end a completion.
    """
    behind = _behind_answer(tokenizer)
    if behind is None:
        return None
    ends = [_first_markup(tokenizer, text) for text in behind]
    if any(token in end_ids for token in ends) or any(text in behind[0] for text in stop):
        return None
    token = next((token for token in ends if token is not None), None)
    if token is not None:
        return TurnEnd(tokenizer.decode([token]), token)
    return TurnEnd(behind[0].rstrip(), None) if behind[0].strip() else None


def turn_end_token(tokenizer: Any, end_ids: frozenset[int]) -> int | None:
    """The token of its markup by which a chat template ends an answer, of several one of `end_ids`; None where it has none."""
    ends = [_first_markup(tokenizer, text) for text in _behind_answer(tokenizer) or ()]
    found = [token for token in ends if token is not None]
    return next((token for token in found if token in end_ids), found[0] if found else None)


def _behind_answer(tokenizer: Any) -> tuple[str, str] | None:
    """What a chat template puts between an answer and the next turn, and behind the last answer; None: cannot be told.

    Some templates end the last turn with another token than those before it.
    """
    question, answer, following = "covary-question", "covary-answer", "covary-following"
    turns = [
        {"role": role, "content": content}
        for role, content in (("user", question), ("assistant", answer), ("user", following))
    ]
    try:
        longer, shorter = (tokenizer.apply_chat_template(part, tokenize=False) for part in (turns, turns[:2]))
    except (TemplateError, ValueError):  # no template, or one that refuses such a conversation
        return None
    between, found, _ = longer.rpartition(answer)[2].partition(following)
    return (between, shorter.rpartition(answer)[2]) if found and answer in shorter else None


def _first_markup(tokenizer: Any, text: str) -> int | None:
    markup = tokenizer.added_tokens_decoder
    return next((token for token in tokenizer.encode(text, add_special_tokens=False) if token in markup), None)


@dataclass(frozen=True)
class Room:
    """What a model can read: positions, of which a completion takes its share, and token ids. None: no limit known."""

    context: int | None = None
    vocabulary: int | None = None
    max_tokens: int = 0
    others: Mapping[str, Room] = field(default_factory=dict)
    """That of another model, by the name of the context that it reads."""
    glue: int | None = None
    """Tokens, at most, between a completion and the answer appended to it. None: nothing is appended."""

    def complaint(self, group: Group) -> str | None:
        """Why the group's prompt leaves no room for a completion; None where it does.

        Raises:
            UserError: a token that the model does not know.
        """
        appended = self.glue + len(group.answer_tokens or ()) if self.glue is not None else 0
        for name, ids in group.contexts.items():
            other = self.others.get(name)
            what = f"example {group.example.id!r}: its {name}"
            complaint = (
                self._complaint(what, ids, appended) if other is None else other._complaint(f"{what}'s prompt", ids, 0)
            )
            if complaint is not None:
                return complaint
        return None

    def _complaint(self, what: str, ids: list[int], appended: int) -> str | None:
        if self.vocabulary is not None and max(ids) >= self.vocabulary:
            raise UserError(
                f"{what} has token {max(ids)}, and the model knows {self.vocabulary} tokens: tokenizer and model do not "
                "belong together"
            )
        if self.context is not None and len(ids) + self.max_tokens + appended > self.context:
            behind = f" and the answer's {appended}" if appended else ""
            return (
                f"{what} has {len(ids)} tokens, and with max_tokens {self.max_tokens}{behind} that is more than the "
                f"model's context of {self.context}; shorten it or lower max_tokens"
            )
        return None


def fill(form: str, example: Example) -> str:
    """`form` with {question} and {answer} put in; other braces stay (mathematics is full of them)."""
    if "{answer}" in form and example.answer is None:
        raise UserError(f"example {example.id!r} has no answer, and the template's text {form!r} shows it")
    # Split first, so that a question that itself contains "{answer}" is left alone.
    parts = [part.replace("{question}", _question(example)) for part in form.split("{answer}")]
    return (example.answer or "").join(parts)


def _encode(example: Example, form: str, template: Template, tokenizer: Any, where: str) -> list[int]:
    if form != "chat":
        ids = template.encode(fill(form, example), tokenizer, start=True)
    elif isinstance(example.prompt, str):
        ids = tokenizer.encode(example.prompt)
    elif tokenizer.chat_template is None:
        raise UserError(
            f"{where}: the prompt is a chat, and the model's tokenizer has no chat template; "
            "use a text template (task.template: r1) or raw text prompts"
        )
    elif example.prompt[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the chat ends with an assistant message, and the model would answer itself; "
            "a prompt ends with the user's message"
        )
    else:
        # Rendered and encoded in one call: encoding rendered text again would add a second start token.
        try:
            ids = tokenizer.apply_chat_template(
                example.prompt, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:  # some refuse a system message, or turns that do not alternate
            raise UserError(f"{where}: the model's chat template refuses this prompt ({error})") from error
    if not ids:
        raise UserError(f"{where}: the prompt has no tokens")
    return list(ids)


def _question(example: Example) -> str:
    """The text of a one-turn prompt, its system message first."""
    if isinstance(example.prompt, str):
        return example.prompt
    turns = [message for message in example.prompt if message["role"] != "system"]
    if len(turns) != 1 or turns[0]["role"] != "user":
        raise UserError(
            f"example {example.id!r}: a text template takes one user message (and a system message), "
            f"got roles {[message['role'] for message in example.prompt]}"
        )
    return "\n\n".join(message["content"] for message in example.prompt)


def _texts(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
