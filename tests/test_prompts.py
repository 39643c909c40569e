"""Prompts reach the model as its tokenizer's template makes them, once; text templates fill in literally."""

from __future__ import annotations

from copy import deepcopy

import pytest

from covary.prompts import Template, fill, load_template, prompt_group, shipped_templates
from covary.types import Example, UserError
from tests.models import byte_tokenizer

CHAT = Example("e", [{"role": "user", "content": "2 + 2 ="}], answer="4")


def test_a_chat_prompt_is_rendered_and_encoded_once():
    tokenizer = byte_tokenizer()
    group = prompt_group(CHAT, load_template("chat"), tokenizer)
    text = "<|im_start|>user\n2 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(group.contexts["prompt"]) == text
    assert group.contexts["prompt"] == tokenizer.encode(text, add_special_tokens=False)
    assert group.contexts["prompt"].count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_a_template_that_writes_its_own_start_token_gets_no_second_one():
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.chat_template = "{{ bos_token }}User: {{ messages[0]['content'] }} Assistant:"
    ids = prompt_group(CHAT, load_template("chat"), tokenizer).contexts["prompt"]
    assert ids.count(bos) == 1
    # A raw text prompt gets the start token that the tokenizer adds by itself.
    assert prompt_group(Example("t", "2 + 2 ="), load_template("chat"), tokenizer).contexts["prompt"].count(bos) == 1


def test_text_templates_fill_question_and_answer_literally():
    example = Example("e", [{"role": "user", "content": "what is {answer} in \\frac{1}{2}?"}], answer="{question} 7")
    text = "Q: {question} A({answer}) {x}"
    assert fill(text, example) == "Q: what is {answer} in \\frac{1}{2}? A({question} 7) {x}"
    system = Example("s", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert fill("{question}", system) == "Be brief.\n\nhi"


def test_every_shipped_template_loads_and_renders():
    assert {"chat", "r1"} <= set(shipped_templates())
    for name in shipped_templates():
        template = load_template(name)
        group = prompt_group(CHAT, template, byte_tokenizer())
        assert all(group.contexts[context] for context in template.contexts)
    r1 = byte_tokenizer().decode(prompt_group(CHAT, load_template("r1"), byte_tokenizer()).contexts["prompt"])
    assert r1.endswith("User: 2 + 2 =\nAssistant: <think>")


def test_mistakes_are_named(tmp_path):
    bare = deepcopy(byte_tokenizer())
    bare.chat_template = None
    with pytest.raises(UserError, match=r"'e', context 'prompt': the prompt is a chat.*no chat template"):
        prompt_group(CHAT, load_template("chat"), bare)
    answered = Example("c", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(UserError, match="'c', context 'prompt': the chat ends with an assistant message"):
        prompt_group(answered, load_template("chat"), byte_tokenizer())
    with pytest.raises(UserError, match="'t', context 'prompt': the prompt has no tokens"):
        prompt_group(Example("t", ""), load_template("chat"), byte_tokenizer())
    turns = Example("m", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(UserError, match=r"'m'.*one user message.*\['user', 'assistant'\]"):
        prompt_group(turns, load_template("r1"), byte_tokenizer())
    with pytest.raises(UserError, match="'n' has no answer"):
        prompt_group(Example("n", "x"), Template("t", {"prompt": "{question}", "q": "{answer}"}), byte_tokenizer())
    with pytest.raises(UserError, match="did you mean r1"):
        load_template("r11")
    for content, message in (
        ("contexts: {prior: x}", "at least `prompt`"),
        ("contexts: {prompt: x}\nstops: y", "unknown key 'stops'"),
        ("contexts: [", "not valid YAML"),
        ("contexts: {prompt: 3}", "contexts.prompt takes text, got 3"),
        ("contexts: {prompt: x}\nstop: a\nanswer: 5", "answer takes text, got 5"),
        ("contexts: {prompt: x}\nanswer: y", "which is missing"),
        ("contexts: {prompt: x}\nstop: a\nanswer: y", "`answer` holds no {answer}"),
        ("contexts: {prompt: 'x {answer}'}", "contexts.prompt shows {answer}"),
    ):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(UserError, match=message):
            load_template(str(tmp_path / "bad.yaml"))
