"""Chat templates: what published ones use, and what a bad one may not do."""

import pytest

from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.model_files.text import chat_template, jinja_environment
from pdserve.model_files.text.chat_template import ChatTemplate, ChatTemplates
from pdserve.model_files.text.errors import PromptError, TokenizerLoadError
from pdserve.model_files.text.load import find_chat_template, load_tokenizer
from pdserve.model_files.text.named_templates import NamedTemplates
from pdserve.server.options import ServerOptions

HI = [ChatMessage("user", "Hi <b>é</b>")]
NOTHING = [ChatMessage("user", "")]
"""A conversation without a text that a template could leave out."""


def render(source, messages=NOTHING, **options):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(Conversation(messages, **options))


def test_the_embedded_models_template():
    tokenizer = load_tokenizer(ServerOptions())
    template = ChatTemplates(find_chat_template(ServerOptions(), tokenizer), tokenizer.special_tokens)
    assert template.render(Conversation([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")])) == (
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
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ dict(a=1)['a'] }}{{ dict.fromkeys('ab') | tojson }}", '1{"a": null, "b": null}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}t{% else %}none{% endif %}", "none"),
        ("{% set ns = namespace(self=1) %}{{ ns.self }}", "1"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_what_templates_use(source, text):
    assert render(source, HI if "content" in source else NOTHING) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.deeper }}", "nothing"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{% set ns = namespace(_a=1) %}", "_a"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
    ],
)
def test_a_template_that_fails_names_its_reason(source, message):
    with pytest.raises(PromptError, match=message) as e:
        render(source)
    assert e.value.field == "messages"


def test_a_template_that_runs_out_of_memory_refuses_the_conversation(monkeypatch):
    def too_much(layout):
        raise MemoryError

    monkeypatch.setattr(jinja_environment, "_strftime_now", too_much)
    with pytest.raises(PromptError, match="refuses this conversation"):
        render("{{ strftime_now('%Y') }}")


def test_what_a_template_makes_of_a_conversation_has_a_limit(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 10)
    assert render("{% for i in range(5) %}ab{% endfor %}") == "ababababab"
    with pytest.raises(PromptError, match="more than 10 characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}ab{% endfor %}{% endfor %}")


def test_there_is_no_text_without_end():
    with pytest.raises(PromptError, match="lipsum"):
        render("{{ lipsum(n=3) }}")


@pytest.mark.parametrize("name", ["raise_exception", "strftime_now", "range", "bos_token"])
def test_a_client_replaces_nothing_that_the_template_calls_or_prints(name):
    with pytest.raises(PromptError, match=f"{name} is the model's own"):
        render("{{ bos_token }}", template_args={name: "x"})


def test_a_broken_template_is_refused_at_start():
    with pytest.raises(TokenizerLoadError, match="line 2"):
        ChatTemplate("\n{% if %}", {})


def test_variables_of_the_request_reach_the_template():
    source = "{% if enable_thinking is defined and not enable_thinking %}no {% endif %}{{ effort }}{{ bos_token }}"
    assert render(source, template_args={"enable_thinking": False, "effort": "low"}) == "no low<s>"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
def test_variables_that_have_fields_of_their_own_are_refused(name):
    with pytest.raises(PromptError, match=name) as e:
        render("x", template_args={name: True})
    assert e.value.field == "chat_template_kwargs"


def test_names_and_thoughts_are_there_only_where_given():
    source = "{% for m in messages %}{{ m.name or '-' }}{{ m.reasoning_content or '' }}{{ m.content }};{% endfor %}"
    messages = [ChatMessage("user", "a", name="Ann"), ChatMessage("assistant", "b", reasoning_content="hm")]
    assert render(source, messages) == "Anna;-hmb;"


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_an_answer_can_go_on_with_the_last_message_or_with_none():
    turns = [ChatMessage("user", "go"), ChatMessage("assistant", "go on ")]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    # The template trims content, and so does transformers what is before the end.
    assert render(CHATML, turns, **options) == "<user>go</><assistant>go on"
    assert render(CHATML.replace(" | trim", ""), turns, **options) == "<user>go</><assistant>go on "
    assert render(CHATML, turns, add_generation_prompt=False) == "<user>go</><assistant>go on</>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    ],
)
def test_a_template_that_hides_the_last_message_cannot_go_on_with_it(source):
    with pytest.raises(PromptError) as e:
        render(source, [ChatMessage("user", "a"), ChatMessage("assistant", "b</think>c")], continue_final_message=True)
    assert e.value.field == "continue_final_message"


def test_conversations_with_tools_have_a_template_of_their_own():
    templates = ChatTemplates(NamedTemplates("{{ 1 }}", "{{ tools | tojson }}"), {})
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert templates.render(Conversation(NOTHING)) == "1"
    assert "now" in templates.render(Conversation(NOTHING, tools=tools))


def test_a_broken_template_is_named():
    with pytest.raises(TokenizerLoadError, match=r"a/b.jinja is wrong in line 1"):
        ChatTemplates(NamedTemplates("{% if %}", origin="a/b.jinja"), {})
    with pytest.raises(TokenizerLoadError, match=r"x.json \(tool_use\) is wrong in line 1"):
        ChatTemplates(NamedTemplates("", "{% if %}", "x.json"), {})
