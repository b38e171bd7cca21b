"""The chat template in a process of its own: what it may take, and that the next conversation is rendered."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from support.machine import limit

from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.messages.packed_text import PackedText, pack
from pdserve.model_files.text import template_process
from pdserve.model_files.text.errors import PromptError, TokenizerLoadError
from pdserve.model_files.text.limited_template import LimitedTemplate
from pdserve.model_files.text.named_templates import NamedTemplates
from pdserve.model_files.text.rendering import BrokenStream, RenderLimits, TemplateSource

LIMITS = RenderLimits(cpu_seconds=1.0, memory_bytes=1 << 27, seconds=limit(30))
BOMBS = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "calls": "{{ (range(99999) | list | tojson) | wordcount }}" * 200,
    "memory": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "text": "{% for a in range(99999) %}{% for b in range(99999) %}ab{% endfor %}{% endfor %}",
}
MAGIC = "{% if messages[0].content == 'NAME' %}BOMB{% endif %}"
TEMPLATE = "".join(MAGIC.replace("NAME", n).replace("BOMB", b) for n, b in BOMBS.items())
TEMPLATE += "{{ bos_token }}{{ messages[0].content }}"


def chat(text: str = "hi", **args: object) -> Conversation:
    return Conversation([ChatMessage("user", text)], template_args=args)


@pytest.fixture(scope="module")
def template() -> Iterator[LimitedTemplate]:
    template = LimitedTemplate(LIMITS)
    template.load(NamedTemplates(TEMPLATE), {"bos_token": "<s>"})
    yield template
    template.close()


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_refuses_its_conversation_and_the_next_one_is_rendered(template: LimitedTemplate, bomb: str) -> None:
    with pytest.raises(PromptError) as refused:
        template.render(chat(bomb))
    assert refused.value.field == "messages"
    assert any(words in str(refused.value) for words in ("1 s of a processor", "MemoryError", "characters of it"))
    assert template.render(chat("é\n\0 \U0001f600")) == "<s>é\n\0 \U0001f600"


def test_a_long_text_is_rendered_as_any_other(template: LimitedTemplate) -> None:
    text = "é \U0001f600" * 30_000
    packed = Conversation([ChatMessage("user", pack(text))])
    assert isinstance(packed.messages[0].content, PackedText)
    assert template.render(packed) == f"<s>{text}"


def test_errors_keep_their_field(template: LimitedTemplate) -> None:
    with pytest.raises(PromptError, match="bos_token is the model's own") as refused:
        template.render(chat(bos_token="x"))
    assert refused.value.field == "chat_template_kwargs"


def test_a_process_that_died_meanwhile_costs_no_conversation(template: LimitedTemplate) -> None:
    template._process.send_signal(signal.SIGKILL)
    template._process.wait(limit(10))
    assert template.render(chat()) == "<s>hi"


def test_threads_wait_for_each_other(template: LimitedTemplate) -> None:
    texts: list[str] = []

    def render(name: str) -> None:
        texts.extend(template.render(chat(f"{name}{i}")) for i in range(50))

    threads = [threading.Thread(target=render, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(f"<s>{name}{i}" for name in "abc" for i in range(50))


def test_a_conversation_is_read_on_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the one before has left may be next to nothing, and a long one takes a while to read."""
    done: list[str] = []
    arriving = iter((TemplateSource(NamedTemplates("{{ messages[0].content }}"), {}, LIMITS), chat(), chat()))

    class Told:
        def receive(self, kind: type) -> object:
            done.append(f"read {kind.__name__}")
            if (message := next(arriving, None)) is None:
                raise BrokenStream
            return message

        def send(self, message: object) -> None:
            done.append("answered")

    monkeypatch.setattr(template_process, "limit_process", lambda memory_bytes: None)
    monkeypatch.setattr(template_process, "start_clock", lambda cpu_seconds: done.append("clock"))
    with pytest.raises(BrokenStream):
        template_process.serve(Told())  # type: ignore[arg-type]
    once = ["clock", "read Conversation", "answered"]
    assert done == ["read TemplateSource", "clock", "answered", *once, *once, "clock", "read Conversation"]


@pytest.mark.parametrize(("source", "reason"), [("\n{% if %}", "line 2"), ("{{ 7 ** 100000000 }}", "1 s of a proc")])
def test_what_does_not_compile_ends_the_start(source: str, reason: str) -> None:
    template = LimitedTemplate(LIMITS)
    with pytest.raises(TokenizerLoadError, match=rf"a/b\.jinja .*{reason}"):
        template.load(NamedTemplates(source, origin="a/b.jinja"), {})
    template.close()


def test_a_constant_that_is_too_large_refuses_each_conversation() -> None:
    template = LimitedTemplate(LIMITS)
    template.load(NamedTemplates("{{ 'a' * 10000000000 }}"), {})
    with pytest.raises(PromptError, match="MemoryError"):
        template.render(chat())
    template.close()


def test_surrogates_that_a_template_writes_arrive() -> None:
    template = LimitedTemplate(LIMITS)
    template.load(NamedTemplates("{{ '\\ud800' }}"), {})
    assert template.render(chat("")) == "\ud800"
    template.close()


def test_a_process_that_reads_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    template = LimitedTemplate(LIMITS)
    template.load(NamedTemplates("{{ messages[0].content | length }}"), {})
    # Only from here on, since a busy machine may take longer to compile it.
    monkeypatch.setattr(template, "_limits", RenderLimits(seconds=1.0))
    os.kill(template._process.pid, signal.SIGSTOP)
    with pytest.raises(PromptError, match="takes more than 1 s"):
        template.render(chat("x" * (8 << 20)))
    assert template._process.poll() is None
    template.close()


def test_a_process_that_does_not_read_its_template_ends_the_start() -> None:
    template = LimitedTemplate(RenderLimits(cpu_seconds=1.0, memory_bytes=1 << 27, seconds=1.0))
    os.kill(template._process.pid, signal.SIGSTOP)
    with pytest.raises(TokenizerLoadError, match="takes more than 1 s"):
        template.load(NamedTemplates("x" * (8 << 20)), {})
    assert template._process.poll() is not None
