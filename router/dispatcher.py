"""Sends one client's request to the instances that serve it, and their answer back.

One attempt at a pair: both legs are sent at once and run as tasks. The decode's leg answers the client; the
prefill's is only watched. The first of these ends the attempt:

    prefill fails, nothing sent to the client yet ─▶ the decode's leg is dropped, the attempt failed
    decode fails                                  ─▶ the prefill's leg is dropped, the attempt failed
    decode's answer is complete                   ─▶ done; the prefill's leg may take a moment more to end
    the client leaves (this task is cancelled)    ─▶ both legs are dropped

A prefill that fails once the client has been sent something ends nothing: the decode goes on. A dropped leg's
connection is closed, which aborts its request there. A failed attempt is repeated only while the client has been sent
nothing, with a new room, and on other instances if there are any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ..messages.error_codes import INSTANCE_FAILED
from ..runtime.web.client.client import Body, HttpClient
from ..runtime.web.errors import error_status, without_frames
from ..runtime.web.moved_answer import FOLLOW, MOVED_TYPE, TICKET, Ticket, read_ticket
from ..runtime.web.sse import OPENAI_STREAM, StreamFormat
from .attempts import Attempt
from .client_answer import ClientAnswer
from .errors import (
    InstanceAnsweredError,
    InstanceCrashedError,
    MovedAwayError,
    NoInstanceError,
    QuarantinedError,
    RouterError,
    error_of,
    parse_error,
)
from .facts import Facts
from .fleet import Fleet
from .headers import CONTENT_TYPE, Headers, passed_back
from .health import seconds_to_notice
from .instance import Instance
from .leg import Leg, LegLimits
from .options import RouterOptions
from .quarantine import WINDOW_SECONDS, Quarantine, digest_of
from .request_body import RequestBody
from .retries import RetryBudget, blamed, charge
from .targets import Pair, Target, legs
from .work import Answering, Computing

logger = logging.getLogger(__name__)

RETRY_PAUSE = 0.05
"""Seconds before a retry: time for a dropped leg's abort to arrive, so that the same rid is free again."""
LINGER = 5.0
"""Seconds that a prefill's leg may stay open after the decode's answer is complete."""
CRASH_SHOWS = 0.1
"""Seconds in which a broken connection shows that a pair's hand-over failed because an instance died."""
FAILED_CODE = f'"code":"{INSTANCE_FAILED}"'.encode()
"""Part of an error event after an instance died in the middle of its answer."""
TICKET_REFUSED = (400, 401, 403, 404, 429)
"""Statuses below 500 with which an instance refuses to go on with an answer. Others are the request's own errors."""
UNTYPED = (CONTENT_TYPE, b"application/octet-stream")
UNCACHED = (b"cache-control", b"no-cache")
CAN_FOLLOW = (FOLLOW, b"1")


@dataclass(frozen=True)
class RoutedRequest:
    """A client's request as it is sent to instances."""

    path: str
    headers: Headers
    """The headers that are passed on."""
    facts: Facts
    stream_format: StreamFormat = OPENAI_STREAM
    """Format of the answer if it is a stream."""
    is_probe: bool = False
    """Whether the body is the router's own (``/health_generate``), which is never suspected of crashing instances."""

    @property
    def body(self) -> RequestBody:
        """The client's body."""
        return self.facts.body


class Dispatcher:
    """Sender of requests to the instances of a fleet, and of their answers to the clients."""

    def __init__(self, fleet: Fleet, client: HttpClient, options: RouterOptions) -> None:
        self._fleet = fleet
        self._client = client
        self._options = options
        # Never sooner than health checks take to find an instance dead.
        unseen = max(options.first_byte_timeout, seconds_to_notice(options))
        self._limits = LegLimits(options.first_byte_timeout, options.idle_timeout, unseen)
        self._quarantine = Quarantine()
        self._lingering: set[asyncio.Task[None]] = set()

    async def serve(self, request: RoutedRequest, answer: ClientAnswer) -> None:
        """Serve a client's request by the instances of the fleet, and write their answer into ``answer``.

        A failed attempt is repeated, on other instances if there are any, while ``answer`` has not started. Raises the
        last attempt's ``RouterError`` on failure; it is not written into ``answer``. Cancelling it ends the request at
        all instances.
        """
        await self._check_quarantine(request)
        now = asyncio.get_running_loop().time
        deadline = now() + self._options.retry_window
        budget = RetryBudget(self._options.retries, self._options.retries_after_crash)
        failed: set[Instance] = set()
        tried: set[Instance] = set()
        last_error: RouterError | None = None
        while True:
            # The event loop's own clock stands still within one iteration.
            asked_at = time.monotonic()
            try:
                target = await self._choose(request.facts, failed, tried, deadline, retrying=last_error is not None)
            except NoInstanceError as exc:
                raise last_error or exc from None
            self._fleet.pick_seconds.observe(time.monotonic() - asked_at)
            logger.debug("goes to %s", " and ".join(map(str, legs(target))))
            try:
                await self._attempt(target, request, answer)
            except RouterError as exc:
                at_fault = blamed(exc, target)
                charge(exc, at_fault, asked_at)
                if isinstance(exc, InstanceCrashedError):
                    await self._check_quarantine(request)
                if last_error is None:
                    # Counted from here: a request may have been running for long when its instance dies.
                    deadline = now() + self._options.retry_window
                elif now() > deadline:
                    raise
                if answer.started or not budget.take(exc):
                    raise
                failed |= at_fault
                tried.update(legs(target))
                if (pause := self._pause(request.body, exc, failed, deadline - now())) is None:
                    raise
                last_error = without_frames(exc)
            else:
                await self._served(target, request, answer)
                return
            self._fleet.retries[last_error.status] += 1
            logger.warning("%s: %s; trying again", request.path, last_error.message)
            await asyncio.sleep(pause)

    async def _attempt(self, target: Target, request: RoutedRequest, answer: ClientAnswer) -> None:
        """Send the request to ``target`` and pass its answer on. Raises ``RouterError``."""
        # The work is counted before anything is awaited, so that the next choice sees it.
        decodes, count = target.decode if isinstance(target, Pair) else target, request.body.batch_size or 1
        with Attempt(self._fleet.policy, target, request.facts) as attempt, Answering(decodes, count) as answering:
            if isinstance(target, Pair):
                await self._serve_by_pair(target.prefill, answering, request, answer)
            else:
                await self._serve_alone(answering, request, answer)
            attempt.sent_error = answer.sent_error

    async def _served(self, target: Target, request: RoutedRequest, answer: ClientAnswer) -> None:
        """Note that ``target`` served the request: reset its breakers' failure counts, and clear the request.

        A cleared request is no longer suspected of crashing instances. Do nothing if the answer's stream had an error
        event.
        """
        if answer.sent_error:
            return
        for instance in legs(target):
            instance.breaker.succeeded()
        if self._quarantine:
            self._quarantine.clear(await digest_of(request.body.raw))

    async def _check_quarantine(self, request: RoutedRequest) -> None:
        """Raise ``QuarantinedError`` for a request during which several instances died within ``WINDOW_SECONDS``.

        The router's own probe always passes.
        """
        if not self._quarantine or request.is_probe:
            return
        if not (deaths := self._quarantine.culprits(await digest_of(request.body.raw))):
            return
        urls = ", ".join(death.url for death in deaths)
        logger.error(
            "%s: request %s is refused: %d instances died while they had it within %g s (%s)",
            *(request.path, request.body.request_id or "without an id", len(deaths), WINDOW_SECONDS, urls),
        )
        raise QuarantinedError(
            f"{len(deaths)} instances died while they had this request ({urls}); "
            f"it is not tried again for up to {WINDOW_SECONDS:g} s"
        )

    @contextlib.asynccontextmanager
    async def _leg(self, instance: Instance, request: RoutedRequest) -> AsyncIterator[Leg]:
        """Open a leg: one exchange of ``request`` with ``instance``, which is closed when the block ends.

        If the instance dies meanwhile, the request is recorded as a suspected cause.
        """
        begun_at = time.monotonic()
        try:
            async with Leg(self._client, self._fleet, instance, self._limits, request.stream_format) as leg:
                yield leg
        except InstanceCrashedError:
            self._quarantine.record(await digest_of(request.body.raw), instance.url, begun_at)
            raise

    def _pause(self, body: RequestBody, error: RouterError, failed: set[Instance], seconds_left: float) -> float | None:
        """Return the seconds to wait before the next attempt; None if there should be no other one.

        The next attempt goes to instances outside ``failed`` if there are any. Otherwise it waits as long as an
        instance asked by ``Retry-After``, if that is within ``seconds_left``. An overloaded instance is not asked
        again.
        """
        if self._fleet.has_others(body, failed) or (error.retry_after is None and not error.is_load):
            return RETRY_PAUSE
        if error.is_load or error.retry_after is None or error.retry_after > seconds_left:
            return None
        return max(RETRY_PAUSE, error.retry_after)

    async def _choose(
        self, facts: Facts, failed: set[Instance], tried: set[Instance], deadline: float, *, retrying: bool
    ) -> Target:
        """Choose the instances for a request. Raises ``NoInstanceError`` if there are none.

        It waits until ``deadline`` (loop time) while a health check may still find an instance, and on a retry in any
        case. Instances in ``failed``, on which the request has failed, come last. Those in ``tried``, which took part
        in earlier attempts, come after unused ones.
        """
        try:
            async with asyncio.timeout_at(deadline):
                while (target := self._fleet.pick(facts, failed, tried)) is None:
                    if not retrying and not self._fleet.undecided():
                        break
                    await self._fleet.wait_change()
        except TimeoutError:
            target = None
        if target is None:
            needed = "prefill" if facts.is_prompt_alone else "prefill-decode pair"
            raise NoInstanceError(f"no instance can serve at the moment: no healthy {needed} and no worker")
        return target

    async def _serve_by_pair(
        self, instance: Instance, answering: Answering, request: RoutedRequest, answer: ClientAnswer
    ) -> None:
        bodies = request.body.for_pair(instance)
        computing = Computing(instance, request.body.prompt_tokens, request.body.batch_size or 1, for_decode=True)
        prefill = asyncio.create_task(self._watch_prefill(instance, request, bodies.prefill))
        prefill.add_done_callback(computing.done)  # also if it is cancelled before it runs
        decode = asyncio.create_task(self._answer_from(answering, request, bodies.decode, answer))
        del bodies
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            try:
                if prefill.done() and not answer.started and not decode.done():
                    prefill.result()
                await decode
            except InstanceAnsweredError as exc:
                if exc.blames_peer and not answer.started:
                    await raise_crash(prefill, decode)
                raise
            self._let_linger(prefill)
        finally:
            await drop(decode, *({prefill} - self._lingering))

    async def _watch_prefill(self, instance: Instance, request: RoutedRequest, body: Body) -> None:
        """Send ``body`` to a pair's prefill, wait for the end of its answer, and discard it. Raises ``RouterError``."""
        async with self._leg(instance, request) as leg:
            await leg.open(request.path, body, request.headers, streams=False)
            await leg.discard()

    async def _serve_alone(self, answering: Answering, request: RoutedRequest, answer: ClientAnswer) -> None:
        """Have one instance compute the prompt and the answer, which goes to the client. Raises ``RouterError``."""
        with Computing(answering.instance, request.body.prompt_tokens) as computing:
            # The prompt is computed when the answer begins. An answer that does not stream only shows its end.
            await self._answer_from(answering, request, request.body.raw, answer, computing.done)

    async def _answer_from(
        self,
        answering: Answering,
        request: RoutedRequest,
        body: Body,
        answer: ClientAnswer,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Send ``body`` to the instance that decodes, and pass its answer on to the client. Raises ``RouterError``.

        ``begun`` is called when the answer begins. If the instance hands the request on in the middle of it, the rest
        comes from the instance that it names.
        """
        headers = [*request.headers, CAN_FOLLOW]
        ticket = await self._read_leg(answering.instance, request, headers, body, answer, begun)
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
                ticket = await self._read_leg(follower, request, ticketed, request.body.raw, answer, begun)
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
        instance: Instance,
        request: RoutedRequest,
        headers: Headers,
        body: Body,
        answer: ClientAnswer,
        begun: Callable[[], None],
    ) -> Ticket | None:
        """Pass an instance's answer on to the client.

        Return None at its end, or the ``Ticket`` with which the rest is to be fetched from another instance. ``begun``
        is called before the first part is sent. Raises ``RouterError``.
        """
        begun_at, framing = time.monotonic(), request.stream_format
        async with self._leg(instance, request) as leg:
            head = await leg.open(request.path, body, headers, streams=request.body.stream)
            content_type = head.header(CONTENT_TYPE)
            if content_type == MOVED_TYPE:
                return ticket_in(await leg.read_all(), instance)
            back = [*([] if content_type else [UNTYPED]), *passed_back(head.headers)]
            if content_type is None or not content_type.lower().startswith(framing.media_type):
                begun()
                await answer.whole(head.status, back, await leg.read_all())
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
                    if framing.is_keep_alive(events):
                        await answer.keep_alive(head.status, back, events)
                        continue
                    raise_first_error(events, instance, framing)
                    begun()
                    await answer.start(head.status, back)
                if framing.has_error(events):
                    answer.sent_error = True
                    if FAILED_CODE in events:
                        self._quarantine.record(await digest_of(request.body.raw), instance.url, begun_at)
                if events:
                    await answer.write(events)
            if ticket is not None:
                return ticket
            if not answer.started:
                await answer.start(head.status, back)
            await answer.finish()
            return None

    def _let_linger(self, prefill: asyncio.Task[None]) -> None:
        """Leave a prefill's task running after the client has been served, so that its connection can be used again.

        It is cancelled after ``LINGER`` seconds. An error of it is only logged.
        """
        if prefill.done():
            if error := failure_of(prefill):
                logger.info("a prefill failed after its request was served: %s", error)
            return
        self._lingering.add(prefill)
        timer = asyncio.get_running_loop().call_later(LINGER, prefill.cancel)

        def ended(task: asyncio.Task[None]) -> None:
            timer.cancel()
            self._lingering.discard(task)
            if error := failure_of(task):
                logger.info("a prefill failed after its request was served: %s", error)

        prefill.add_done_callback(ended)


async def raise_crash(*tasks: asyncio.Task[None]) -> None:
    """Raise the ``InstanceCrashedError`` that one of a pair's tasks ends with within ``CRASH_SHOWS`` seconds, if any.

    When an instance dies, its peer may report a failed hand-over before the router sees the connection close.
    """
    if waiting := [task for task in tasks if not task.done()]:
        await asyncio.wait(waiting, timeout=CRASH_SHOWS)
    for task in tasks:
        if task.done() and not task.cancelled() and isinstance(error := task.exception(), InstanceCrashedError):
            raise error


async def drop(*tasks: asyncio.Task[object]) -> None:
    """Cancel ``tasks``, all at once, and wait until they have closed their connections.

    Their errors are only logged.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if error := failure_of(task):
            logger.debug("what was dropped had failed: %s", error)


def failure_of(task: asyncio.Task[object]) -> BaseException | None:
    """Return the error of a task that has ended, a ``RouterError`` without its frames; None if it has none.

    None also means that it was cancelled. A task keeps its error, and the error's frames, until its result is read. The
    frames refer back to the task, for example by ``asyncio.Timeout``, and keep the request's body in memory (see
    ``without_frames``).
    """
    try:
        task.result()
    except asyncio.CancelledError:
        return None
    except RouterError as e:
        e.__context__ = None  # an error that is on its way through the caller keeps its frames
        return without_frames(e)
    except Exception as e:  # noqa: BLE001  Told with its frames: it is a fault of ours.
        return e
    return None


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
