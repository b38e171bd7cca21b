"""Chat templates: what published ones use, and what a bad one may not do."""

import pytest

from pdserve.messages.requests import ChatMessage
from pdserve.model_files.text.chat_template import ChatTemplate
from pdserve.model_files.text.errors import PromptError, TokenizerLoadError
from pdserve.model_files.text.load import load_chat_template, load_tokenizer
from pdserve.runtime.options import ServerOptions

HI = [ChatMessage("user", "Hi <b>é</b>")]


def render(source, messages=HI):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def test_the_embedded_models_template():
    template = load_chat_template(ServerOptions(), load_tokenizer(ServerOptions()))
    assert template.render([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>Hi <b>é</b>"),
        ("{{ messages[0].content | tojson }}", '"Hi <b>é</b>"'),
        ("  {% if add_generation_prompt %}\nx{% endif %}", "x"),
        ("{% for m in messages %}{% if 1 %}{% break %}{% endif %}{% endfor %}y", "y"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}t{% else %}none{% endif %}", "none"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_what_templates_use(source, text):
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.deeper }}", "nothing"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_a_template_that_fails_names_its_reason(source, message):
    with pytest.raises(PromptError, match=message) as e:
        render(source)
    assert e.value.field == "messages"


def test_a_broken_template_is_refused_at_start():
    with pytest.raises(TokenizerLoadError, match="line 2"):
        ChatTemplate("\n{% if %}", {})
