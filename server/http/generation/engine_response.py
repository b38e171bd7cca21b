"""The answer to a generation request, plain or as a stream in the format of its API.

The response submits the requests itself: whatever ends it (the last token, an error, the client, a bug) ends them as
well. The status line waits for the first delta, so that a request that fails at once gets its true status. A failure
after that is an error event. If nothing comes for ``KEEP_ALIVE_SECONDS``, the status is sent
nonetheless, with an event that means nothing: proxies cut idle connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....messages.outputs import FinishType
from ....runtime.web.access_log import AccessRecord, stream_format
from ....runtime.web.keys import Caller
from ....runtime.web.moved_answer import MOVED_TYPE, TICKET, Ticket, header
from ....runtime.web.sse import DATA_PREFIX, EVENT_END, StreamFormat
from ..engine.engine_client import EngineClient
from ..engine.plan import PromptPlan
from ..engine.request_metrics import CLIENT_GONE, ERROR, HANDED_OVER, MOVED
from ..engine.submission import Choice, Delta, Kind, Submission
from ..errors import AnswerMoved, ApiError, ClientGone, internal_error
from ..state import HttpState
from .tickets import can_follow, ticket_of

log = logging.getLogger(__name__)

LARGE_LOGPROBS = 10_000
"""Number of log-probabilities that take some 10 ms to write."""
KEEP_ALIVE_SECONDS = 15.0
"""Interval of keep-alive events. Most proxies wait for 60 s; shorter answers contain none."""
PROGRESS_SECONDS = 15.0
"""Interval of events that only show progress, while tokens come but nothing of them can be written."""
STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    # nginx would hold small chunks back.
    (b"x-accel-buffering", b"no"),
)


class Renderer(Protocol):
    """Writes answers in the format of one API."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """Return the API's names of the engine's fields that it calls differently, by the engine's names."""

    @property
    def created(self) -> int:
        """Return the creation time that answers report (Unix time), 0 if they report none."""

    @property
    def repeats(self) -> bool:
        """Return whether each event of a stream repeats the output so far, so that all of it must be kept."""

    def answer(self, choices: list[Choice]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the whole answer without a stream, JSON-ready, once all ``choices`` have finished."""

    def events(self, delta: Delta) -> bytes:
        """Return the encoded events for what is new of a choice; may be empty."""

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the encoded events between the last choice's end and ``StreamFormat.last_event``; may be empty."""


def event(content: Any) -> bytes:
    """Encode one server-sent event, with ``content`` as JSON in its data."""
    return DATA_PREFIX + orjson.dumps(content) + EVENT_END


def summary(submission: Submission) -> dict[str, Any]:
    """Return an answer's fields for the access log.

    They are the tokens of all its choices, the seconds to the first token, and how the choices ended.
    """
    choices = submission.choices
    begun = [choice.first_token_at for choice in choices if choice.first_token_at]
    if submission.is_abandoned or submission.is_moved:
        ends = [CLIENT_GONE if submission.is_abandoned else MOVED]
    else:
        ends = sorted({choice_end(choice) for choice in choices})
    return {
        "prompt": sum(choice.prompt_tokens or 0 for choice in choices),
        "cached": sum(choice.cached_tokens or 0 for choice in choices),
        "output": sum(choice.completion_tokens for choice in choices),
        "ttft": round(min(begun) - choices[0].arrival, 6) if begun else None,
        "finish": ",".join(ends),
    }


def choice_end(choice: Choice) -> str:
    """Return why a choice ended, in the words of metrics and the access log: ``ERROR`` if it did not finish."""
    if choice.finish is None:
        return ERROR
    handed_over = choice.kind is Kind.LEG and choice.finish.type is FinishType.LENGTH
    return HANDED_OVER if handed_over else choice.finish.type.value


def unwritten(error: Exception) -> ApiError:
    """Log an unexpected error of a renderer, and return the ``ApiError`` 500 for the client.

    As an unexpected error it would end the connection, which a router takes for a crash of the instance.
    """
    log.error("an answer could not be written", exc_info=error)
    return internal_error(error)


@asynccontextmanager
async def watch_disconnect(receive: Receive, submission: Submission) -> AsyncIterator[None]:
    """Fail ``submission`` with ``ClientGone`` if the client closes its connection before the end of the ``with`` block.

    The body must have been read.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        submission.fail(ClientGone())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class KeepAlive:
    """Wakes the waiter of ``submission`` after a long silence. A context manager."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._tick)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._submission.tick()
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._tick)


class EngineResponse(Response):
    """Submits ``plans``, and answers in the format of ``renderer``."""

    def __init__(
        self,
        engine: EngineClient,
        plans: Sequence[PromptPlan],
        renderer: Renderer,
        *,
        stream: bool,
        group: str | None = None,
    ) -> None:
        # Response.__init__ would render a body; this one is written as it is generated.
        self.status_code = 200
        self.background = None
        self._engine = engine
        self._plans = plans
        self._name = group or plans[0].rid
        self._renderer = renderer
        self._is_stream = stream
        self._group = group
        self._keeps_sent = not stream or renderer.repeats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the plans to the engine and send the answer. Whatever ends this call also aborts what still runs.

        Raises ``ApiError`` while nothing has been sent; a later error is sent as an event.
        """
        record = AccessRecord.of(scope)
        # Without an answer here, a client can't write names of its choice into the log.
        if header(scope["headers"], TICKET) is None:
            record.name(self._name)
        submission = await self._submission(scope)
        record.name(self._name)
        log.debug("%d answers are asked for", len(submission.choices))
        try:
            async with watch_disconnect(receive, submission):
                if self._is_stream:
                    await self._send_stream(submission, scope, send)
                else:
                    await self._send_answer(submission, scope, receive, send)
        except ClientGone:
            return
        except ApiError as e:
            raise e.renamed(self._renderer.field_names) from None
        finally:
            record.details |= summary(submission)
            self._engine.end(submission)
            submission.close()

    async def _submission(self, scope: Scope) -> Submission:
        """Submit the plans, or take over the moved answer that the request's ticket names. Raises ``ApiError``."""
        caller, ticket, follows = Caller.of(scope), ticket_of(scope), can_follow(scope)
        # Don't keep the prompts: they may be megabytes, and the answer may take an hour.
        plans, self._plans = self._plans, ()
        if ticket is not None:
            return await self._engine.adopt(
                ticket, plans, streaming=self._is_stream, caller=caller, follows=follows, keeps_sent=self._keeps_sent
            )
        return await self._engine.submit(
            plans,
            streaming=self._is_stream,
            group=self._group,
            caller=caller,
            follows=follows,
            keeps_sent=self._keeps_sent,
        )

    async def _send_answer(self, submission: Submission, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            choices = await submission.finished()
        except AnswerMoved as e:
            await self._send_ticket(submission, e, send)
            return
        # Encoding many log-probabilities takes a while, and all of it is Python: let the event loop run meanwhile.
        aside = HttpState.of(Request(scope)).aside
        is_large = submission.logprobs + submission.readout_values > LARGE_LOGPROBS
        try:
            body = await aside.run(is_large, lambda: orjson.dumps(self._renderer.answer(choices)))
        except ApiError:
            raise
        except Exception as e:  # noqa: BLE001 - a renderer's bug of any kind
            raise unwritten(e) from None
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_ticket(self, submission: Submission, moved: AnswerMoved, send: Send) -> None:
        """Send a ticket for the instance that ``moved`` names, as the whole response: nothing was sent before."""
        headers = [(b"content-type", MOVED_TYPE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._ticket(submission, moved), "more_body": False})

    def _ticket(self, submission: Submission, moved: AnswerMoved) -> bytes:
        (choice,) = submission.choices
        sent = (choice.sent_chars, choice.sent_tokens, choice.opened)
        named = (self._name, self._renderer.created, self.sent_events())
        return Ticket(moved.epoch, moved.host, moved.port, moved.key, *sent, *named).dump()

    def sent_events(self) -> int:
        """Return the number of events that the client has been sent; 0 if the API does not number them."""
        return 0

    def failure(self, error: ApiError, scope: Scope) -> bytes:
        """Return the encoded events that end a stream with ``error``, after its head was sent."""
        return stream_format(scope).end_with_error(orjson.dumps(error.body(scope)))

    def _written(self, deltas: Sequence[Delta], ended: list[Choice], framing: StreamFormat) -> bytes:
        """Encode the events for ``deltas``, and the last ones if all choices have ``ended``. Raises ``ApiError``."""
        try:
            events = b"".join(map(self._renderer.events, deltas)) if deltas else framing.keep_alive
            if ended:
                events += self._renderer.last_events(ended) + framing.last_event
        except Exception as e:  # noqa: BLE001 - a renderer's bug of any kind
            raise unwritten(e) from None
        return events

    async def _send_stream(self, submission: Submission, scope: Scope, send: Send) -> None:
        started, framing, wrote_at = False, stream_format(scope), time.monotonic()
        head = [(b"content-type", framing.content_type), *STREAM_HEADERS]
        try:
            with KeepAlive(submission):
                while True:
                    deltas = await submission.deltas()
                    # Before the head, so that a failure of the first events gets its true status.
                    ended = submission.choices if submission.done else []
                    events = self._written(deltas, ended, framing)
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": head})
                    if ended:
                        break
                    now = time.monotonic()
                    if not events and now - wrote_at >= PROGRESS_SECONDS:
                        events = framing.progress
                    if events:
                        wrote_at = now
                        await send({"type": "http.response.body", "body": events, "more_body": True})
        except ApiError as e:
            if not started:
                raise
            events = self.failure(e.renamed(self._renderer.field_names), scope)
        except AnswerMoved as e:
            if not started:
                await self._send_ticket(submission, e, send)
                return
            events = framing.moved(self._ticket(submission, e))
            await send({"type": "http.response.body", "body": events, "more_body": False})
            return
        await send({"type": "http.response.body", "body": events, "more_body": False})
