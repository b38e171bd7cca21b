"""The framing of streams: what a router sees in the bytes of an answer."""

from __future__ import annotations

import pytest

from pdserve.runtime.web.apis import OLLAMA_LINES
from pdserve.runtime.web.client.events import EventBuffer
from pdserve.runtime.web.sse import OPENAI_STREAM, StreamFormat

ERROR = b'{"error":{"message":"full"}}'
EVENTS = {OPENAI_STREAM: b'data: {"text":"a"}\n\n', OLLAMA_LINES: b'{"response":"a"}\n'}
BOTH = pytest.mark.parametrize("framing", EVENTS)


@BOTH
def test_an_error_is_found_at_the_begin_of_a_line(framing: StreamFormat) -> None:
    end, event = framing.end_with_error(ERROR), EVENTS[framing]
    assert framing.has_error(event + end)
    assert framing.has_error(end)
    assert not framing.has_error(event.replace(b'"a"', framing.error_sign + b"1}"))


@BOTH
def test_the_first_error_may_follow_keep_alives(framing: StreamFormat) -> None:
    end = framing.end_with_error(ERROR)
    assert framing.first_error(end) == framing.first_error(2 * framing.keep_alive + end) == ERROR
    assert framing.first_error(EVENTS[framing] + end) is None


@BOTH
def test_only_keep_alives_have_no_meaning(framing: StreamFormat) -> None:
    assert framing.is_keep_alive(2 * framing.keep_alive)
    assert not framing.is_keep_alive(framing.keep_alive + EVENTS[framing])
    assert not framing.is_keep_alive(EVENTS[framing])
    assert not framing.is_keep_alive(b"")
    assert not framing.is_keep_alive(framing.progress)


@BOTH
def test_a_ticket_is_found_at_the_begin_of_a_line(framing: StreamFormat) -> None:
    event, moved = EVENTS[framing], framing.moved(b'{"key":"k"}')
    assert framing.split_moved(event + moved) == (event, b'{"key":"k"}')
    assert framing.split_moved(moved) == (b"", b'{"key":"k"}')
    inside = event.replace(b'"a"', b'"' + framing.before_moved.partition(b"\n")[0] + b'"')
    assert framing.split_moved(inside) == (inside, None)


@BOTH
@pytest.mark.parametrize("size", [1, 2, 5])
def test_events_are_put_together_from_pieces(framing: StreamFormat, size: int) -> None:
    buffer, stream = EventBuffer(ends=framing.event_ends), 3 * EVENTS[framing] + b"rest"
    found = [buffer.whole(stream[i : i + size]) for i in range(0, len(stream), size)]
    assert [events for events in found if events] == 3 * [EVENTS[framing]]
    assert buffer.rest() == b"rest"


def test_comments_of_other_servers_have_no_meaning() -> None:
    assert OPENAI_STREAM.is_keep_alive(b": ping 5\n\n")
    spaced = b': ping 5\n\ndata: {"error": {"message": "full"}}\n\n'
    assert OPENAI_STREAM.first_error(spaced) == b'{"error": {"message": "full"}}'
