"""Passes the answers of instances on to clients.

An instance may hand a request on to another one in the middle of its answer. Then the rest comes from there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator

from ..messages.error_codes import INSTANCE_FAILED
from ..runtime.web.client.client import Body, HttpClient
from ..runtime.web.client.response import ClientResponse
from ..runtime.web.errors import error_status
from ..runtime.web.moved_answer import FOLLOW, MOVED_TYPE, TICKET, Ticket, read_ticket
from ..runtime.web.sse import StreamFormat
from .byte_budget import ByteBudget
from .client_answer import ClientAnswer
from .errors import InstanceAnsweredError, InstanceCrashedError, MovedAwayError, RouterError, error_of, parse_error
from .fleet import Fleet
from .headers import CONTENT_LENGTH, CONTENT_TYPE, Headers, passed_back
from .held_events import SMALL_BYTES, HeldEvents
from .instance import Instance
from .leg import Leg, LegLimits
from .quarantine import Quarantine, digest_of
from .routed_request import RoutedRequest
from .work import Answering

logger = logging.getLogger(__name__)

FAILED_CODE = f'"code":"{INSTANCE_FAILED}"'.encode()
"""Part of an error event after an instance died in the middle of its answer."""
TICKET_REFUSED = (400, 401, 403, 404, 429)
"""Statuses below 500 with which an instance refuses to go on with an answer. Others are the request's own errors."""
UNTYPED = (CONTENT_TYPE, b"application/octet-stream")
UNCACHED = (b"cache-control", b"no-cache")
CAN_FOLLOW = (FOLLOW, b"1")


HELD_BYTES = 256 << 10
"""Bytes that the router holds of an answer that does not stream. Up to its end, the request can be retried.

Of a longer one it passes on the rest as it arrives. So a client that reads slowly holds memory of the instance, which
has limits for that, and not of the router.
"""
MAX_HELD_BYTES = 256 << 20
"""Maximum of such bytes in all. Beyond it, answers are passed on as they arrive from their first byte."""


class AnswerRelay:
    """Sender of requests to single instances, and of their answers to the clients."""

    def __init__(
        self, fleet: Fleet, client: HttpClient, limits: LegLimits, quarantine: Quarantine, max_held_event_bytes: int
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._limits = limits
        self._quarantine = quarantine
        self._held = 0
        """Bytes of answers that do not stream, and that clients have not read."""
        self._held_events = ByteBudget(max_held_event_bytes)
        """Bytes of long events that clients have not read."""

    @contextlib.asynccontextmanager
    async def leg(
        self, instance: Instance, request: RoutedRequest, ended: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Leg]:
        """Open a leg: one exchange of ``request`` with ``instance``, which is closed when the block ends.

        ``ended`` is called when all of a successful answer has arrived, which the client may still have to read.
        If the instance dies meanwhile, the request is recorded as a suspected cause.
        """
        begun_at, framing = time.monotonic(), request.stream_format
        events = HeldEvents(self._held_events, request.facts.owner, framing.event_ends)
        try:
            async with Leg(self._client, self._fleet, instance, self._limits, events, framing, ended) as leg:
                yield leg
        except InstanceCrashedError:
            self._quarantine.record(await digest_of(request.body.raw), instance.url, begun_at)
            raise

    @contextlib.contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    async def pass_on(
        self,
        answering: Answering,
        request: RoutedRequest,
        body: Body,
        answer: ClientAnswer,
        began: Callable[[], None],
    ) -> None:
        """Send ``body`` to the instance that decodes, and pass its answer on to the client. Raises ``RouterError``.

        ``began`` is called when a successful answer begins, perhaps more than once. If the instance hands the request
        on in the middle of it, the rest comes from the instance that it names.
        """
        headers = [*request.headers, CAN_FOLLOW]
        ticket = await self._read_leg(answering, request, headers, body, answer, began)
        while ticket is not None:
            follower = self._fleet.named(ticket.epoch, ticket.url)
            if follower is None:
                raise MovedAwayError(
                    f"{answering.instance} handed the request on to {ticket.url}, which this router does not know"
                )
            logger.debug("goes on at %s", follower)
            answering.move(follower)
            ticketed = [*headers, (TICKET, ticket.dump())]
            try:
                ticket = await self._read_leg(answering, request, ticketed, request.body.raw, answer, began)
            except InstanceAnsweredError as e:
                if e.status < 500 and e.status not in TICKET_REFUSED:
                    e.blames_no_instance = True  # the request's own error, as at any instance
                    raise
                raise MovedAwayError(f"{follower}, which was to go on with the request, refused: {e.message}") from e
            except RouterError as e:
                e.blames_no_instance = True  # health checks find the instance that is at fault
                raise

    async def _read_leg(
        self,
        answering: Answering,
        request: RoutedRequest,
        headers: Headers,
        body: Body,
        answer: ClientAnswer,
        began: Callable[[], None],
    ) -> Ticket | None:
        """Pass the answer of the instance of ``answering`` on to the client.

        Return None at its end, or the ``Ticket`` with which the rest is to be fetched from another instance. ``began``
        is called before the first part is sent. Raises ``RouterError``.
        """
        begun_at, framing, instance = time.monotonic(), request.stream_format, answering.instance
        async with self.leg(instance, request, answering.done) as leg:
            head = await leg.open(request.path, body, headers, streams=request.body.stream)
            content_type = head.header(CONTENT_TYPE)
            if content_type == MOVED_TYPE:
                return ticket_in(await leg.read_all(), instance)
            back = [*([] if content_type else [UNTYPED]), *passed_back(head.headers)]
            if content_type is None or not content_type.lower().startswith(framing.media_type):
                await self._pass_on_plain(leg, head, back, answer, began)
                return None
            if head.header(b"cache-control") is None:
                back.append(UNCACHED)
            ticket: Ticket | None = None
            while events := await leg.next_events():
                events, last = framing.split_moved(events)
                if last is not None:
                    ticket = ticket_in(last, instance)
                    if not events:
                        return ticket
                if not answer.started:
                    if framing.is_keep_alive(events) and not leg.cuts_event:
                        await answer.keep_alive(head.status, back, events)
                        continue
                    raise_first_error(events, instance, framing)
                    began()
                    await answer.start(head.status, back)
                if framing.has_error(events):
                    answer.sent_error = True
                    if FAILED_CODE in events:
                        self._quarantine.record(await digest_of(request.body.raw), instance.url, begun_at)
                if events:
                    answer.is_in_event = leg.cuts_event
                    await answer.write(events)
                    if len(events) > SMALL_BYTES:
                        events = b""  # the server has a copy, which the client may take long to read
                        await answer.flush()
                        await pass_on_rest(leg, answer)
            if ticket is not None:
                return ticket
            if not answer.started:
                began()
                await answer.start(head.status, back)
            await answer.finish()
            return None

    async def _pass_on_plain(
        self, leg: Leg, head: ClientResponse, back: Headers, answer: ClientAnswer, began: Callable[[], None]
    ) -> None:
        """Pass on an answer that does not stream, whole if there is room for it."""
        part, is_all = await leg.read_begin(HELD_BYTES if self._held < MAX_HELD_BYTES else 0)
        began()
        if is_all:
            with self._holding(len(part)):
                await answer.whole(head.status, back, part)
        else:
            await pass_on_whole(leg, head, back, answer, part)


async def pass_on_rest(leg: Leg, answer: ClientAnswer) -> None:
    """Pass on the rest of an event that is too long to hold as it arrives. Do nothing if none is cut."""
    while part := await leg.rest_of_event():
        await answer.write(part)
        answer.is_in_event = leg.cuts_event
        del part
        await answer.flush()


async def pass_on_whole(leg: Leg, head: ClientResponse, back: Headers, answer: ClientAnswer, part: bytes) -> None:
    """Pass on an answer that does not stream and is too long to hold, of which ``part`` has come, as it arrives."""
    length = head.header(CONTENT_LENGTH)
    await answer.start_whole(head.status, [*back, (CONTENT_LENGTH, length)] if length is not None else back)
    while part:
        await answer.write(part)
        part = await leg.read()
    await answer.finish()


def ticket_in(text: bytes, instance: Instance) -> Ticket:
    """Parse the ticket by which ``instance`` hands a request on to another one.

    Raises ``MovedAwayError`` if invalid.
    """
    try:
        return read_ticket(text)
    except ValueError as e:
        raise MovedAwayError(f"{instance} handed the request on, but does not say to whom: {e}") from None


def raise_first_error(events: bytes, instance: Instance, stream_format: StreamFormat) -> None:
    """Raise ``RouterError`` if an answer's first event is an error. Keep-alives may precede it in the same read.

    The client has been sent nothing yet, so the error can still become a status, or lead to a retry.
    """
    if (first := stream_format.first_error(events)) is not None:
        raise error_of(error_status(parse_error(first) or {}), first, str(instance), ())
