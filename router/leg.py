"""One request to one instance.

    created ──open()──▶ answered 2xx ──next_events() | read_all() | read_begin(), read() | discard()──▶ done
       └────────┴── any failure raises ──┴── leaving the block drops the connection, which aborts the request there

The request counts as the instance's until the end of its answer has arrived, or the block is left. The client may read
the rest later. An end that still lies in the socket, because the router holds enough unread bytes, has not arrived.

An answer's bytes are passed on unchanged: nothing is decompressed, and events are not parsed. They are kept whole if
the router has room for them (``held_events.py``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from ..runtime.web.client.client import Body, HttpClient
from ..runtime.web.client.errors import AnswerTooLong, CannotConnect, ClientError, ConnectionGone
from ..runtime.web.client.response import ClientResponse
from ..runtime.web.sse import OPENAI_STREAM, StreamFormat
from .errors import (
    SUCCESS,
    AnswerTooLongError,
    InstanceCrashedError,
    InstanceGoneError,
    InstanceRemovedError,
    InstanceSilentError,
    InstanceUnreachableError,
    RouterError,
    SlowClientError,
    error_of,
)
from .fleet import Fleet
from .headers import Headers, passed_back
from .held_events import HeldEvents
from .instance import Instance
from .membership import MemberState

MAX_WHOLE_BYTES = 1 << 24
"""Maximum length of an error or of a ticket."""
LONG_PAUSE_SECONDS = 1.0
"""Pause in reading from an instance after which the end of its connection may have been caused by the client.

While a client does not read, neither does the router. The instance ends connections that are not read, by its
``--send-timeout``. What the kernel has received by then can still be read for any time. The pause counts until that is
read.
"""


class LegLimits(NamedTuple):
    """Limits on an instance's silence, in seconds."""

    first_byte: float
    """Time until a streamed answer begins."""
    idle: float
    """Silence in the middle of an answer."""
    unseen: float
    """Time since the instance was last seen alive, while a whole answer is awaited."""


class Leg:
    """A request to ``instance``. A context manager: leaving it closes the connection unless the answer is complete."""

    def __init__(
        self,
        client: HttpClient,
        fleet: Fleet,
        instance: Instance,
        limits: LegLimits,
        events: HeldEvents,
        stream_format: StreamFormat = OPENAI_STREAM,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a leg. ``ended`` is called when all of a successful answer has arrived."""
        self.instance = instance
        self._ended = ended
        self._client = client
        self._fleet = fleet
        self._limits = limits
        self._answer: ClientResponse | None = None
        self._format = stream_format
        self._events = events
        """Events of the answer, from their arrival until the client has read them."""
        self._patience = limits.first_byte
        self._spoke_at = time.monotonic()
        """When the instance last sent more than a keep-alive that had not waited for the router."""
        self._was_behind_at = 0.0
        """When the router last read something that may have waited for it."""
        self._has_passed_on = False
        """Whether a part of the answer has been returned to be sent to the client."""
        self._task: asyncio.Task[Any] | None = None
        self._given_up: RouterError | None = None
        self._renewal: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self.instance.legs.add(self)
        self.instance.in_flight += 1
        self.instance.requests += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count_no_more()
        self._events.close()
        if isinstance(error, RouterError):
            error.url = self.instance.url
        if self._answer is not None:
            self._answer.close()
        # If the task was cancelled for another reason as well, it ends as cancelled.
        gone = self._given_up
        if gone is not None and isinstance(error, asyncio.CancelledError) and self._task and not self._task.uncancel():
            gone.url = self.instance.url
            raise gone from None

    def _count_no_more(self) -> None:
        if self in self.instance.legs:
            self.instance.legs.discard(self)
            self.instance.in_flight -= 1

    def _arrived(self) -> None:
        self._count_no_more()
        self._ended()

    def give_up(self, since: float, reason: str) -> None:
        """Cancel the task of this request, because the instance hangs. Its block ends with ``InstanceCrashedError``.

        Do nothing if the instance sent more than keep-alives after ``since`` (``time.monotonic()``).
        """
        if self._spoke_at <= since:
            self._cancel(InstanceCrashedError(f"{self.instance} hangs: {reason}"))

    def instance_removed(self) -> None:
        """Cancel the task of this request, because its instance was removed from the fleet.

        Its block ends with ``InstanceRemovedError``.
        """
        self._cancel(self._removed())

    def _cancel(self, reason: RouterError) -> None:
        if self._given_up is None and self._task is not None:
            self._given_up = reason
            self._task.cancel()

    def _removed(self) -> InstanceRemovedError:
        return InstanceRemovedError(f"{self.instance} was removed from this router")

    async def open(self, path: str, body: Body, headers: Headers, *, streams: bool) -> ClientResponse:
        """Send the request and wait for the answer's head.

        The head of a stream (``streams``) has to come within ``LegLimits.first_byte`` seconds. The head of a whole
        answer comes when all of it is computed, which may take hours. Its limit (``LegLimits.unseen``) is on the time
        since a health check last found the instance alive.

        Raises ``InstanceGoneError``, ``InstanceSilentError``, or ``InstanceAnsweredError`` for a status that is not in
        ``SUCCESS``.
        """
        if self.instance.withheld is MemberState.GONE:  # since it was chosen
            raise self._removed()
        url, limits = self.instance.url, self._limits
        patience = limits.first_byte if streams else limits.unseen
        try:
            async with asyncio.timeout(patience) as deadline:
                if not streams:
                    self._renew_while_alive(deadline)
                self._answer = await self._client.send(
                    "POST", url, path, body, headers, silence=limits.idle, at_most_once=True
                )
        except TimeoutError:
            what = "did not begin to answer" if streams else "did not answer, and no health check,"
            raise self._silent(patience, what) from None
        except ClientError as exc:
            raise self._gone("before it answered", exc) from exc
        finally:
            if self._renewal is not None:
                self._renewal.cancel()
        self.instance.heard_at = time.monotonic()
        answer = self._answer
        if answer.status not in SUCCESS:
            answer_body = await self.read_all()
            raise self._answered(answer.status, answer_body, passed_back(answer.headers))
        answer.when_complete(self._arrived)
        return answer

    def _renew_while_alive(self, deadline: asyncio.Timeout) -> None:
        """Keep ``deadline`` at ``LegLimits.unseen`` seconds after the instance was last seen alive."""
        if deadline.expired():
            return
        loop, seconds = asyncio.get_running_loop(), self._limits.unseen
        alive_at = max(self._spoke_at, self.instance.alive_at)
        deadline.reschedule(loop.time() + max(0.0, alive_at + seconds - time.monotonic()))
        # Health checks see the instance alive within half of that time, so the deadline moves before it passes.
        self._renewal = loop.call_later(seconds / 2, self._renew_while_alive, deadline)

    async def read_all(self) -> bytes:
        """Wait for all of an error or of a ticket, and return it.

        Raises ``InstanceGoneError``, ``InstanceSilentError`` or ``AnswerTooLongError``.
        """
        try:
            return await self._begun.read_all(MAX_WHOLE_BYTES)
        except AnswerTooLong:
            raise AnswerTooLongError(
                f"{self.instance} sent an error or a ticket of more than {MAX_WHOLE_BYTES} bytes"
            ) from None
        except (ClientError, TimeoutError) as exc:
            raise self._broken(exc) from exc

    async def read_begin(self, most: int) -> tuple[bytes, bool]:
        """Wait for the whole answer, or for more than ``most`` bytes of it; return that, and whether it is all.

        Raises ``InstanceGoneError`` or ``InstanceSilentError``.
        """
        parts, size = list[bytes](), 0
        while size <= most and (part := await self.read()):
            parts.append(part)
            size += len(part)
        self._has_passed_on = True
        return b"".join(parts), size <= most

    async def read(self) -> bytes:
        """Wait for the next part of the answer, and return it; b"" at the end.

        Raises ``InstanceGoneError``, ``InstanceSilentError`` or ``SlowClientError``.
        """
        try:
            part = await self._begun.read()
        except (ClientError, TimeoutError) as exc:
            raise self._broken(exc) from exc
        self._note_sign_of_life(is_progress=True)
        return part

    async def discard(self) -> None:
        """Wait for the answer's end, and keep nothing of it. Raises ``InstanceGoneError``, ``InstanceSilentError``."""
        while await self.read():
            pass

    async def next_events(self) -> bytes:
        """Wait for the next events of a stream, and return them; b"" at the end of the answer.

        They are whole unless ``cuts_event`` is set afterwards. The client must have read those returned before.

        Raises ``InstanceGoneError``, ``InstanceSilentError`` or ``SlowClientError``, and drops half an event, if the
        answer breaks off. Raises ``AnswerTooLongError`` for an event that is longer than the router holds.
        """
        held = self._events
        held.sent()
        try:
            if held.was_cut and (whole := held.whole(b"")):
                return whole
            while data := await self._begun.read():
                self._hear(data)
                if whole := held.whole(data):
                    if not self._has_passed_on:
                        self._has_passed_on = held.is_cut or not self._format.is_keep_alive(whole)
                    return whole
        except AnswerTooLong as exc:
            raise self._too_long(exc) from None
        except (ClientError, TimeoutError) as exc:
            raise self._broken(exc) from exc
        part = held.rest()
        return part + self._format.event_ends[0] if part else b""

    @property
    def cuts_event(self) -> bool:
        """Whether ``next_events`` returned the begin of an event. Then ``rest_of_event`` must be called until b""."""
        return self._events.is_cut

    async def rest_of_event(self) -> bytes:
        """Wait for more of the event that is cut, and return it; b"" after its end. Raises as ``next_events`` does."""
        if not self._events.is_cut:
            return b""
        self._events.sent()
        try:
            return self._events.rest_of_event(await self.read())
        except AnswerTooLong as exc:
            raise self._too_long(exc) from None

    def _too_long(self, exc: AnswerTooLong) -> AnswerTooLongError:
        # The client may have asked for that much.
        return AnswerTooLongError(f"{self.instance} sent {exc}")

    def _hear(self, data: bytes) -> None:
        """Note that ``data`` arrived. A keep-alive only shows that the instance is alive, not that the request gets on.

        Raises ``InstanceSilentError`` if there was nothing else for too long.
        """
        is_keep_alive = self._format.is_keep_alive(data)
        now = self._note_sign_of_life(is_progress=not is_keep_alive)
        if not is_keep_alive:
            self._patience = self._limits.idle
        elif now - max(self._spoke_at, self._was_behind_at) > self._patience:
            raise self._silent(self._patience, "said nothing but that it is alive")

    def _note_sign_of_life(self, *, is_progress: bool) -> float:
        """Note that something was read, and return the time. ``is_progress``: it was more than a keep-alive.

        What is read after a long pause is no sign of life. It may have waited in the kernel since before the instance
        hung.
        """
        now = time.monotonic()
        if self._is_behind:
            self._was_behind_at = now
        else:
            self.instance.heard_at = now
            if is_progress:
                self._spoke_at = now
        return now

    @property
    def _is_behind(self) -> bool:
        """Whether the router did not read from the instance for long, and has not caught up with it since."""
        return self._answer is not None and self._answer.longest_pause >= LONG_PAUSE_SECONDS

    @property
    def _begun(self) -> ClientResponse:
        assert self._answer is not None, "open() comes first"
        return self._answer

    def _broken(self, exc: ClientError | TimeoutError) -> RouterError:
        # Before anything was passed on, the client held up nothing: the router itself was slow.
        if isinstance(exc, ConnectionGone) and self._is_behind and self._has_passed_on:
            # It may have crashed all the same. The check finds that out. The request is not suspected then, because
            # its error does not wait for the check.
            self.instance.check_now.set()
            return SlowClientError(f"{self.instance} ended the answer, which the client read too slowly")
        if isinstance(exc, ClientError):
            return self._gone("in the middle of its answer", exc)
        return self._silent(self._limits.idle, "went silent in the middle of its answer")

    def _answered(self, status: int, answer_body: bytes, headers: Headers) -> RouterError:
        error = error_of(status, answer_body, str(self.instance), headers)
        if isinstance(error, InstanceCrashedError):
            self._fleet.report_failure(self.instance, error.message)
        return error

    def _gone(self, when: str, cause: ClientError) -> InstanceGoneError:
        kind: type[InstanceGoneError] = InstanceCrashedError
        match cause:
            case CannotConnect():
                message, kind = f"{self.instance} can't be reached", InstanceUnreachableError
            case ConnectionGone():
                message = f"{self.instance} closed the connection {when}"
            case _:
                message = f"{self.instance} does not answer as an HTTP server does"
        self._fleet.report_failure(self.instance, f"{message} ({cause})")
        return kind(message)

    def _silent(self, seconds: float, what: str) -> InstanceSilentError:
        # Not reported as a failure, because this is the router's own deadline. Health checks notice a hanging instance.
        return InstanceSilentError(f"{self.instance} {what} within {seconds:g} s")
