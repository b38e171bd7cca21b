"""``pdserve chat``: what it sends, what it shows, and what it says when something goes wrong."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.machine import limit
from support.web_server import Connection, WebServer, refusing_port, web_server

from pdserve.terminal.chat import client as client_module
from pdserve.terminal.chat.answer import StreamedAnswer
from pdserve.terminal.chat.chunk import ChoiceDelta, Chunk, ChunkChoice, PromptDetails, TokenUsage
from pdserve.terminal.chat.client import ChatClient, ChatError, ChatTurn, events
from pdserve.terminal.chat.screen import Screen
from pdserve.terminal.chat.session import ChatSession, End

CHAT, MODELS = "/v1/chat/completions", "/v1/models"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
PHASES = [("queue", "decode", 1.2), ("prefill", "prefill", 30.4), ("decode", "decode", 80.0), ("reply", "decode", 0.2)]
TIMING = {"total_ms": 111.8, "phases": [{"phase": phase, "at": at, "ms": ms} for phase, at, ms in PHASES]}


def delta(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]}


def say(*pieces: str) -> Callable[[Connection], None]:
    """Return a script for a good answer of these pieces, framed as our server does."""

    def script(connection: Connection) -> None:
        connection.begin_stream()
        connection.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})
        for piece in pieces:
            connection.event(delta(piece))
        connection.event(delta("", "stop"))
        connection.event({"choices": [], "usage": USAGE, "timing": TIMING})
        connection.send(b"data: [DONE]\n\n")

    return script


def refuse(status: int, message: str) -> Callable[[Connection], None]:
    return lambda connection: connection.answer(status, {"error": {"message": message}})


def talk(
    server: WebServer, *lines: str, goes_on: bool = True, system: str | None = None, out: Any = None
) -> tuple[End, str]:
    """Type ``lines`` at a session; returns how it ended, and all that it showed."""
    out = out or io.StringIO()
    client = ChatClient(server.url, None, {"temperature": 0})
    session = ChatSession(client, Screen(True, out), "m", system, goes_on=goes_on)
    typed = iter(lines)
    try:
        return session.run(lambda: next(typed, None)), out.getvalue()
    finally:
        client.close()


@pytest.fixture
def friendly() -> Iterator[WebServer]:
    with web_server({CHAT: say("Hel", "lo", "!")}) as server:
        yield server


def test_each_question_goes_along_with_what_was_said_before(friendly: WebServer) -> None:
    end, shown = talk(friendly, "one", "", "two\n", "/clear", "three", system="be brief")
    assert end is End.LEFT
    assert shown.count("Hello!\n") == 3
    first, second, third = friendly.asked(CHAT)
    system_message = {"role": "system", "content": "be brief"}
    question, answer = {"role": "user", "content": "one"}, {"role": "assistant", "content": "Hello!"}
    assert first["messages"] == [system_message, question]
    assert second["messages"] == [system_message, question, answer, {"role": "user", "content": "two"}]
    assert third["messages"] == [system_message, {"role": "user", "content": "three"}]
    assert (first["model"], first["stream"], first["temperature"]) == ("m", True, 0)
    assert first["stream_options"] == {"include_usage": True}


def test_commands(friendly: WebServer) -> None:
    end, shown = talk(
        friendly, "/system be kind", "one", "/system", "two", "//path", "/nonsense", "/help", "/exit", "x"
    )
    assert end is End.LEFT
    bodies = friendly.asked(CHAT)
    assert [body["messages"][0]["role"] for body in bodies] == ["system", "user", "user"]
    assert bodies[0]["messages"][0]["content"] == "be kind"
    assert bodies[2]["messages"][-1]["content"] == "/path"
    assert "There is no command /nonsense" in shown
    assert "/clear" in shown.split("There is no command")[1]


def test_text_is_shown_as_it_comes() -> None:
    """The server says the second piece only once the first has been shown."""
    seen = threading.Event()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if "first" in text:
                seen.set()
            return super().write(text)

    def script(connection: Connection) -> None:
        connection.begin_stream()
        connection.event(delta("first "))
        connection.event(delta("second" if seen.wait(limit(20)) else "nobody showed the first"))
        connection.event(delta("", "stop"))
        connection.send(b"data: [DONE]\n\n")

    with web_server({CHAT: script}) as server:
        _, shown = talk(server, "go", out=Out())
    assert "first second\n" in shown


def test_the_line_below_an_answer(friendly: WebServer) -> None:
    _, shown = talk(friendly, "go")
    line = shown.splitlines()[1]
    assert line.startswith("7 prompt tokens (4 cached), 3 output tokens, first after ")
    assert line.endswith(", finish reason stop, 112 ms: queue 1 (decode) + prefill 30 (prefill) + decode 80 (decode)")


@pytest.mark.parametrize(
    ("timing", "said"),
    [
        ({"total_ms": 81, "phases": [{"phase": "decode", "at": "unified", "ms": 81}]}, "81 ms: decode 81"),
        ({"queue": 3}, "stop"),  # another server's
        ([1], "stop"),
    ],
)
def test_phases_are_shown_if_they_are_pdserves(timing: Any, said: str) -> None:
    def script(connection: Connection) -> None:
        connection.begin_stream()
        connection.event(delta("hello", "stop"))
        connection.event({"choices": [], "usage": USAGE, "timing": timing})
        connection.send(b"data: [DONE]\n\n")

    with web_server({CHAT: script}) as server:
        assert talk(server, "go")[1].splitlines()[1].endswith(said)


def test_speed_counts_what_came_after_the_first_token() -> None:
    clock = iter([10.0, 10.25, 10.75, 11.25]).__next__
    answer = StreamedAnswer(clock)
    for text in ("a", "b", "c"):
        assert answer.add(Chunk([ChunkChoice(ChoiceDelta(text))])) == text
    answer.add(Chunk([ChunkChoice(finish_reason="length")]))
    answer.add(Chunk(usage=TokenUsage(5, 3, PromptDetails(None))))
    assert answer.summary() == (
        "5 prompt tokens, 3 output tokens, first after 250 ms, 2.0 tokens/s, finish reason length"
    )


def test_a_server_that_counts_nothing_still_gets_a_line() -> None:
    answer = StreamedAnswer(iter([0.0, 0.1]).__next__)
    answer.add(Chunk([ChunkChoice(ChoiceDelta("a"), "stop")]))
    assert answer.summary() == "first after 100 ms, finish reason stop"


def test_events_end_at_newlines_and_nowhere_else() -> None:
    stream = 'data: {"a": "x\u2028y\u0085z"}\r\n\r\n: keep-alive\n\nevent: x\ndata:tail\n\n'.encode()
    for size in (1, 3, len(stream)):
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert list(events(parts)) == ['{"a": "x\u2028y\u0085z"}'.encode(), b"tail"]


def test_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BYTES", 10)
    with pytest.raises(ChatError, match="without an end"):
        list(events([b"data: ", b"12345678"]))


def test_reasoning_is_shown_on_a_terminal_and_not_remembered() -> None:
    def script(connection: Connection) -> None:
        connection.begin_stream()
        for piece in ("Let me\x1b[2J", " see."):
            connection.event({"choices": [{"index": 0, "delta": {"reasoning_content": piece}}]})
        connection.event(delta("Four."))
        connection.event(delta("", "stop"))
        connection.send(b"data: [DONE]\n\n")

    with web_server({CHAT: script}) as server:
        _, shown = talk(server, "2 + 2?", "and 3?")
        assert "Let me[2J see.\nFour.\n" in shown
        assert [turn["content"] for turn in server.asked(CHAT)[-1]["messages"]] == ["2 + 2?", "Four.", "and 3?"]
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(False, out, err)
    screen.write_reasoning("hm")
    screen.write("Four.")
    assert (out.getvalue(), err.getvalue()) == ("Four.", "")


def test_a_terminal_gets_no_control_characters() -> None:
    with web_server({CHAT: say("a\x1b[2Jb\tc\nd\x9b1m")}) as server:
        _, shown = talk(server, "go")
    assert shown.startswith("a[2Jb\tc\nd1m\n")
    # What the server says beside the answer is no safer.
    odd = [delta("x", "st\x1b[2Jop")]
    with web_server({CHAT: lambda c: (c.begin_stream(), *map(c.event, odd), c.send(b"data: [DONE]\n\n"))}) as server:
        _, shown = talk(server, "go")
    assert "finish reason st[2Jop" in shown


def fail_midway(connection: Connection) -> None:
    connection.begin_stream()
    connection.event(delta("half"))
    connection.event({"error": {"message": "the decode instance died", "code": 502}})
    connection.send(b"data: [DONE]\n\n")


def break_off(connection: Connection) -> None:
    connection.begin_stream()
    connection.event(delta("half"))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (fail_midway, "the server ended the answer: the decode instance died"),
        (break_off, "the connection ended in the middle of the answer"),
        (refuse(503, "no healthy prefill"), "can't take this now: no healthy prefill. Try again"),
        (refuse(429, "2048 requests are waiting"), "can't take this now: 2048 requests are waiting"),
        (refuse(400, "messages: too long"), "the server answers 400: messages: too long"),
        (refuse(401, "needs a key"), "needs a key (give it with --api-key-file)"),
        (lambda c: c.answer(502, b"<html>\nBad gateway</html>", "text/html"), "the server answers 502: <html>"),
        (lambda c: c.answer(200, b"data: 5\n\n", "text/html"), "does not answer as OpenAI's chat API does"),
        (lambda c: c.answer(200, b'data: {"choices": 5}\n\n'), "does not answer as OpenAI's chat API does"),
    ],
)
def test_a_failure_is_one_line_and_the_session_goes_on(script: Callable[[Connection], None], says: str) -> None:
    scripts = [script, say("fine")]
    with web_server({CHAT: lambda connection: scripts.pop(0)(connection)}) as server:
        end, shown = talk(server, "one", "two")
        assert end is End.LEFT
        assert len(server.asked(CHAT)) == 2
        # What failed was not said.
        assert server.asked(CHAT)[1]["messages"] == [{"role": "user", "content": "two"}]
    [line] = [line for line in shown.splitlines() if line.startswith("pdserve chat: ")]
    assert says in line
    assert "fine\n" in shown


def test_without_a_terminal_a_failure_is_the_end() -> None:
    with web_server({CHAT: refuse(503, "loading")}) as server:
        end, _ = talk(server, "one", "two", goes_on=False)
        assert end is End.FAILED
        assert len(server.asked(CHAT)) == 1


def test_no_server_at_the_address() -> None:
    with refusing_port() as port:
        client = ChatClient(f"http://127.0.0.1:{port}", None, {})
        with pytest.raises(ChatError, match=rf"no server answers at http://127.0.0.1:{port} .*--url"):
            client.first_model()
        with pytest.raises(ChatError, match="no server answers"):
            list(client.stream("m", [ChatTurn("user", "x")]))
        client.close()


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "QUESTION_SECONDS", 0.05)
    with web_server({MODELS: lambda connection: connection.wait_until_dropped()}) as server:
        client = ChatClient(server.url, None, {})
        with pytest.raises(ChatError, match="silent for too long"):
            client.first_model()
        client.close()


def test_the_key_and_the_model_that_is_listed() -> None:
    def models(connection: Connection) -> None:
        if connection.headers["authorization"] != "Bearer sesame":
            connection.answer(401, {"error": {"message": "this server needs a key"}})
        else:
            connection.answer(200, {"object": "list", "data": [{"id": "smol", "object": "model"}, {"id": "other"}]})

    with web_server({MODELS: models}) as server:
        for key, outcome in (("sesame", None), ("wrong", "refuses the key in --api-key-file"), (None, "needs a key")):
            client = ChatClient(server.url, key, {})
            if outcome is None:
                assert client.first_model() == "smol"
            else:
                with pytest.raises(ChatError, match=outcome):
                    client.first_model()
            client.close()


def test_bytes_that_are_no_text_do_not_stop_a_question(friendly: WebServer) -> None:
    """A terminal in another encoding gives lone surrogates."""
    talk(friendly, "caf\udce9 é")
    assert friendly.asked(CHAT)[0]["messages"][0]["content"] == "caf? é"
