"""Conversations in the tokenizer process: what waits for a template, in which order, and how it ends early."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import FakeEngine, with_engine
from support.machine import limit

from pdserve.messages.base import Message
from pdserve.messages.control import Ping
from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.messages.grammar import Grammar
from pdserve.messages.outputs import FinishType, ReqError, TextBatch
from pdserve.messages.requests import AbortReq, ChatRendered, TokenizeReq
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.sessions import SnapshotReq
from pdserve.messages.text import EncodeReq
from pdserve.model_files.text.errors import PromptError
from pdserve.server.chat_renderer import FAILED, ChatRenderer, Exits, Sorted


def chat(rid: str, key: str = "", forks: int = 0) -> TokenizeReq:
    conversation = Conversation([ChatMessage("user", rid)])
    names = [f"{rid}-{i}" for i in range(1, forks + 1)]
    return TokenizeReq(rid, SamplingParams(seed=1), 0.0, chat=conversation, key_name=key, forks=names)


def raw(rid: str) -> TokenizeReq:
    return TokenizeReq(rid, SamplingParams(seed=1), 0.0, text="x")


class Tokenizer:
    """A tokenizer's loop with a template that renders a conversation on command, as "<rid>"."""

    def __init__(self, most_waiting: int = 64) -> None:
        self._channel: queue.Queue[ChatRendered] = queue.Queue()
        self._begun: queue.Queue[str] = queue.Queue()
        self._told: queue.Queue[Exception | None] = queue.Queue()
        self.begun: list[str] = []
        self.answered: queue.Queue[tuple[int, str | PromptError]] = queue.Queue()
        """Questions that were passed on to be answered, and their texts."""
        self.http: queue.Queue[Message] = queue.Queue()
        self.is_deaf = False
        """Whether the loop can't be woken up."""
        self.checking: queue.Queue[str] = queue.Queue()
        """Requests with a grammar that has come to its check, in order."""
        self.verdicts: queue.Queue[PromptError | None] = queue.Queue()
        receiver = SimpleNamespace(send=lambda *messages: [self.http.put(message) for message in messages])
        asked = SimpleNamespace(ask=lambda question, text: self.answered.put((question.id, text)))
        self.renderer = ChatRenderer(self._render, self._check, Exits(self, receiver, asked), most_waiting, "decode")

    def _check(self, req: TokenizeReq) -> PromptError | None:
        self.checking.put(req.rid)
        return self.verdicts.get(timeout=limit(10))

    def _render(self, req: TokenizeReq | EncodeReq) -> str | PromptError:
        name = req.rid if isinstance(req, TokenizeReq) else f"?{req.id}"
        self._begun.put(name)
        assert threading.current_thread() is not threading.main_thread()
        error = self._told.get(timeout=limit(10))
        if isinstance(error, PromptError):
            return error
        if error is not None:
            raise error
        return f"<{name}>"

    def send(self, *messages: Message) -> None:
        """Take what the thread sends to the loop."""
        if self.is_deaf:
            raise OSError("too many open files")
        for message in messages:
            assert isinstance(message, ChatRendered)
            self._channel.put(message)

    def sort(self, *messages: Any) -> Sorted:
        return self.renderer.sort(messages)

    def begin(self) -> str:
        """Wait until the next conversation is being rendered; return its rid."""
        self.begun.append(self._begun.get(timeout=limit(10)))
        return self.begun[-1]

    def render(self, error: Exception | None = None) -> None:
        """Have the conversation rendered that is being rendered."""
        self._told.put(error)

    def rendered(self) -> ChatRendered:
        """Wait for what the thread sends to the loop next."""
        return self._channel.get(timeout=limit(10))

    def finish(self, error: Exception | None = None) -> Sorted:
        """Have the conversation of a request rendered; return what the loop does then."""
        self.render(error)
        return self.sort(self.rendered())

    def close(self) -> None:
        for _ in range(1000):
            self._told.put(None)
            self.verdicts.put(None)
        self.renderer.close()


def constrained(rid: str, key: str = "") -> TokenizeReq:
    sampling = SamplingParams(seed=1, grammar=Grammar("regex", rid))
    return TokenizeReq(rid, sampling, 0.0, text="x", key_name=key)


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    with closing(Tokenizer()) as tokenizer:
        yield tokenizer


def ends(out: Sorted) -> list[tuple[str, str]]:
    """Rids and reasons of the requests that ended as aborted."""
    items = [item for answer in out.answers if isinstance(answer, TextBatch) for item in answer.items]
    assert all(item.finish is not None and item.finish.type is FinishType.ABORT for item in items)
    return [(item.rid, item.finish.message if item.finish else "") for item in items]


def test_nothing_but_conversations_waits_for_a_template(tokenizer: Tokenizer) -> None:
    first, second = chat("a"), chat("b")
    out = tokenizer.sort(raw("x"), first, Ping(id=1), second, raw("y"))
    assert out == Sorted([raw("x"), Ping(id=1), raw("y")], {}, [])
    assert tokenizer.begin() == "a"
    assert tokenizer.sort(Ping(id=2), raw("z")).messages == [Ping(id=2), raw("z")]
    assert tokenizer.finish() == Sorted([first], {"a": "<a>"}, [])
    tokenizer.begin()
    assert tokenizer.finish() == Sorted([second], {"b": "<b>"}, [])


def test_what_names_a_conversation_follows_it(tokenizer: Tokenizer) -> None:
    request, snapshot = chat("a", forks=2), SnapshotReq("a-1", True, 0.0, id=1)
    tokenizer.sort(request)
    tokenizer.begin()
    out = tokenizer.sort(snapshot, AbortReq("a-2"), AbortReq("other"), AbortReq("a"), AbortReq("a"))
    assert out == Sorted([AbortReq("other")], {}, [])
    assert tokenizer.finish().messages == [request, snapshot, AbortReq("a-2"), AbortReq("a")]
    assert tokenizer.sort(AbortReq("a")).messages == [AbortReq("a")]


def test_a_conversation_that_still_waits_is_not_rendered_after_its_abort(tokenizer: Tokenizer) -> None:
    tokenizer.sort(chat("a"), chat("b", forks=1), chat("c"))
    tokenizer.begin()
    snapshot = SnapshotReq("b", True, 0.0, id=1)
    assert tokenizer.sort(snapshot, AbortReq("b", "gone")) == Sorted([], {}, [])
    out = tokenizer.sort(AbortReq("b-1", "gone too"))
    assert ends(out) == [("b", "gone"), ("b-1", "gone too")]
    assert out.messages == [snapshot], "the scheduler answers it"
    tokenizer.finish()
    assert tokenizer.begin() == "c"
    tokenizer.finish()


def test_a_conversation_whose_answers_are_all_aborted_is_not_encoded(tokenizer: Tokenizer) -> None:
    tokenizer.sort(chat("a", forks=1))
    tokenizer.begin()
    snapshot = SnapshotReq("a", True, 0.0, id=1)
    assert tokenizer.sort(AbortReq("a-1", "gone"), snapshot, AbortReq("a", "gone too")) == Sorted([], {}, [])
    out = tokenizer.finish()
    assert ends(out) == [("a-1", "gone"), ("a", "gone too")]
    assert (out.messages, out.texts) == ([snapshot], {})
    assert tokenizer.sort(AbortReq("a")).messages == [AbortReq("a")]


def test_an_abort_of_all_ends_what_waits_and_what_has_begun(tokenizer: Tokenizer) -> None:
    tokenizer.sort(chat("a"), chat("b", forks=1))
    tokenizer.begin()
    out = tokenizer.sort(AbortReq("", "all"), chat("c"))
    assert out.messages == [AbortReq("", "all")]
    assert ends(out) == [("b", "all"), ("b-1", "all")]
    assert ends(tokenizer.finish()) == [("a", "all")]
    tokenizer.begin()
    assert tokenizer.finish().messages == [chat("c")]


def test_keys_take_turns(tokenizer: Tokenizer) -> None:
    tokenizer.sort(*(chat(f"greedy{i}", "greedy") for i in range(4)))
    tokenizer.begin()
    tokenizer.sort(*(chat(f"other{i}", "other") for i in range(2)))
    for _ in range(5):
        tokenizer.finish()
        tokenizer.begin()
    tokenizer.finish()
    assert tokenizer.begun == ["greedy0", "greedy1", "other0", "greedy2", "other1", "greedy3"]


def test_one_key_cannot_fill_the_queue() -> None:
    with closing(Tokenizer(most_waiting=8)) as tokenizer:
        tokenizer.sort(*(chat(f"greedy{i}", "greedy") for i in range(4)))
        errors = tokenizer.sort(chat("more", "greedy", forks=1)).answers
        for error, rid in zip(errors, ("more", "more-1"), strict=True):
            assert isinstance(error, ReqError)
            assert (error.rid, error.status, error.code) == (rid, 429, "key_limit_exceeded")
            assert "the limit is 8 (twice --max-queued-requests)" in error.message
        assert not tokenizer.sort(chat("other", "other")).answers
        tokenizer.begin()
        tokenizer.finish()
        tokenizer.begin()
        assert tokenizer.sort(chat("again", "greedy")).answers
        assert ends(tokenizer.sort(AbortReq("greedy2"))) == [("greedy2", "aborted by the client")]
        assert not tokenizer.sort(chat("again", "greedy")).answers, "what has ended leaves room"


def test_a_conversation_that_is_refused_or_fails_stops_no_other(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.sort(*map(chat, "abc"))
    refusal = PromptError("messages", "no such role")
    tokenizer.begin()
    assert tokenizer.finish(refusal).texts == {"a": refusal}
    tokenizer.begin()
    failed = tokenizer.finish(RuntimeError("a plain one")).texts["b"]
    assert isinstance(failed, PromptError)
    assert str(failed) == FAILED
    assert "a plain one" in caplog.text
    tokenizer.begin()
    assert tokenizer.finish().texts == {"c": "<c>"}


def test_questions_take_turns_with_conversations_of_all_keys(tokenizer: Tokenizer) -> None:
    tokenizer.sort(*(chat(f"greedy{i}", "greedy") for i in range(4)))
    tokenizer.begin()
    for i, key in enumerate(("greedy", "other", "other")):
        tokenizer.renderer.ask(EncodeReq(chat=Conversation([ChatMessage("user", "x")]), key_name=key, id=i))
    order = ["greedy0", "greedy1", "?0", "?1", "greedy2", "?2", "greedy3"]
    for name in order:
        assert tokenizer.begun[-1] == name
        if name.startswith("?"):
            tokenizer.render()
            assert tokenizer.answered.get(timeout=limit(10)) == (int(name[1:]), f"<{name}>")
        else:
            tokenizer.finish()
        if name != order[-1]:
            tokenizer.begin()


def test_a_question_about_a_conversation_that_is_refused_is_answered(tokenizer: Tokenizer) -> None:
    tokenizer.renderer.ask(EncodeReq(chat=Conversation([ChatMessage("user", "x")]), id=7))
    tokenizer.begin()
    refusal = PromptError("messages", "no such role")
    tokenizer.render(refusal)
    assert tokenizer.answered.get(timeout=limit(10)) == (7, refusal)


def test_a_conversation_that_can_not_be_passed_on_is_answered_with_an_error(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = SnapshotReq("a", True, 0.0, id=1)
    tokenizer.sort(chat("a", forks=1), chat("b"))
    tokenizer.begin()
    assert tokenizer.sort(snapshot, AbortReq("a")) == Sorted([], {}, [])
    tokenizer.is_deaf = True
    tokenizer.render()
    for rid in ("a", "a-1"):
        error = tokenizer.http.get(timeout=limit(10))
        assert isinstance(error, ReqError)
        assert (error.rid, error.status, error.message) == (rid, 500, FAILED)
    assert "too many open files" in caplog.text
    tokenizer.is_deaf = False
    tokenizer.begin()
    assert tokenizer.finish() == Sorted([snapshot, chat("b")], {"b": "<b>"}, [])
    assert tokenizer.sort(AbortReq("a")).messages == [AbortReq("a")], "nothing is left of it"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_is_told_of_such_an_end_as_of_any_other_abort(stream: bool) -> None:
    async def check(engine: FakeEngine) -> str:
        engine.hold, engine.end_aborted = True, False
        body = {"messages": [{"role": "user", "content": "x"}], "rid": "a", "stream": stream}
        answer = asyncio.ensure_future(engine.post("/v1/chat/completions", body))
        await engine.wait_for(lambda: bool(engine.requests))
        with closing(Tokenizer()) as tokenizer:
            tokenizer.sort(chat("first"), *engine.sent)
            tokenizer.begin()
            await engine.post("/abort_request", {"rid": "a"})
            await engine.wait_for(lambda: bool(engine.aborts))
            engine.client.dispatch(tokenizer.sort(*engine.aborts).answers)  # type: ignore[arg-type]
        response = await answer
        assert response.status_code == 200
        assert not len(engine.client.live)
        return response.text

    assert '"pdserve_finish"' in (text := with_engine(check))
    assert '"abort"' in text


def test_conversations_go_on_while_a_grammar_is_checked(tokenizer: Tokenizer) -> None:
    tokenizer.sort(constrained("slow", "hostile"), constrained("next", "hostile"), chat("a"), constrained("b", "other"))
    assert tokenizer.checking.get(timeout=limit(10)) == "slow"
    assert tokenizer.begin() == "a"
    assert tokenizer.finish().texts == {"a": "<a>"}
    refusal = PromptError("regex", "too slow")
    tokenizer.verdicts.put(refusal)
    assert tokenizer.checking.get(timeout=limit(10)) == "b", "keys take turns"
    assert tokenizer.sort(tokenizer.rendered()).texts == {"slow": refusal}
    tokenizer.verdicts.put(None)
    assert tokenizer.checking.get(timeout=limit(10)) == "next"
    tokenizer.begin()
    assert tokenizer.finish().texts == {"b": "<b>"}


def test_an_abort_ends_a_request_whose_grammar_waits_to_be_checked(tokenizer: Tokenizer) -> None:
    tokenizer.sort(constrained("a"), constrained("b"))
    assert tokenizer.checking.get(timeout=limit(10)) == "a"
    assert ends(tokenizer.sort(AbortReq("b", "gone"))) == [("b", "gone")]
    assert tokenizer.sort(AbortReq("a", "gone too")) == Sorted([], {}, [])
    tokenizer.verdicts.put(None)
    tokenizer.begin()
    assert ends(tokenizer.finish()) == [("a", "gone too")]
    assert tokenizer.checking.empty()
