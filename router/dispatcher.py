"""Sends one client's request to the instances that serve it, and their answer back.

One attempt at a pair: both legs are sent at once and run as tasks. The decode's leg answers the client; the
prefill's is only watched. The first of these ends the attempt:

    prefill fails, nothing sent to the client yet ─▶ the decode's leg is dropped, the attempt failed
    decode fails                                  ─▶ the prefill's leg is dropped, the attempt failed
    decode's answer is complete                   ─▶ done; the prefill's leg may take a moment more to end
    the client leaves (this task is cancelled)    ─▶ both legs are dropped

Both legs or neither: a dropped leg's connection is closed, which aborts its request there. A failed attempt is
repeated, with a new room and on other instances where there are any, only while the client has been sent nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..runtime.cluster_secret import BootstrapSignature, ClusterSecret
from ..runtime.web.client.client import HttpClient
from ..runtime.web.errors import error_status, without_frames
from ..runtime.web.moved_answer import FOLLOW, MOVED_EVENT, MOVED_TYPE, TICKET, Ticket, read_ticket
from .client_answer import ClientAnswer
from .errors import InstanceAnsweredError, MovedAwayError, NoInstanceError, RouterError, parse_error
from .fleet import Fleet, Pair, Target
from .headers import CONTENT_TYPE, Headers, passed_back
from .instance import Answering, Instance
from .leg import Leg, LegLimits, is_comment
from .options import RouterOptions
from .request_body import RequestBody

logger = logging.getLogger(__name__)

RETRY_PAUSE = 0.05
"""Seconds before a retry: time for a dropped leg's abort to arrive, so that the same rid is free again."""
TOO_MANY = 429
LINGER = 5.0
"""Seconds that a prefill's leg may stay open after the decode's answer is complete."""
ERROR_EVENT = b'data: {"error"'
EVENT_STREAM = b"text/event-stream"
UNTYPED = (CONTENT_TYPE, b"application/octet-stream")
UNCACHED = (b"cache-control", b"no-cache")
CAN_FOLLOW = (FOLLOW, b"1")


@dataclass(frozen=True)
class RoutedRequest:
    """A client's request: where it goes, what is passed on of its headers, and its body."""

    path: str
    headers: Headers
    body: RequestBody


class Dispatcher:
    """Serves requests from a fleet."""

    def __init__(self, fleet: Fleet, client: HttpClient, options: RouterOptions) -> None:
        self._fleet = fleet
        self._client = client
        self._limits = LegLimits(options.first_byte_timeout, options.idle_timeout)
        secret = ClusterSecret.read(options.cluster_secret_file)
        self._signature = BootstrapSignature(secret) if secret is not None else None
        self._retries = options.retries
        self._retry_window = options.retry_window
        self._lingering: set[asyncio.Task[None]] = set()

    async def serve(self, request: RoutedRequest, answer: ClientAnswer) -> None:
        """Answer the client. Raises ``RouterError`` when that fails; ``answer.started`` says how far it got.

        Cancel to drop the request everywhere.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self._retry_window
        failed: set[Instance] = set()
        tried: set[Instance] = set()
        last_error: RouterError | None = None
        for left in range(self._retries, -1, -1):
            # The loop's own clock stands still within a turn.
            asked_at = time.monotonic()
            try:
                target = await self._choose(request.body, failed, tried, deadline, retrying=last_error is not None)
            except NoInstanceError as exc:
                raise last_error or exc from None
            self._fleet.pick_seconds.observe(time.monotonic() - asked_at)
            logger.debug("goes to %s", " and ".join(map(str, legs(target))))
            try:
                # Counted before anything is awaited: the next one to choose shall see it.
                decodes = target.decode if isinstance(target, Pair) else target
                with Answering(decodes, request.body.batch_size or 1) as place:
                    if isinstance(target, Pair):
                        await self._serve_by_pair(target.prefill, place, request, answer)
                    else:
                        await self._serve_alone(place, request, answer)
            except RouterError as exc:
                at_fault = blamed(exc, target)
                charge(exc, at_fault, asked_at)
                if last_error is None:
                    # Counted from here: a request may have been running for long when its instance dies.
                    deadline = now() + self._retry_window
                elif now() > deadline:
                    raise
                if answer.started or not exc.retryable or not left:
                    raise
                failed |= at_fault
                tried.update(legs(target))
                if (pause := self._pause(exc, failed, deadline - now())) is None:
                    raise
                last_error = without_frames(exc)
            else:
                for instance in legs(target):
                    instance.rest.succeeded()
                return
            self._fleet.retries[last_error.status] += 1
            logger.warning("%s: %s; trying again", request.path, last_error.message)
            await asyncio.sleep(pause)

    def _pause(self, error: RouterError, failed: set[Instance], seconds_left: float) -> float | None:
        """Seconds before the next attempt; None: there should be none.

        Who says when to come again is not asked before that, and who has too much to do not at all.
        """
        if self._fleet.has_others(failed) or (error.retry_after is None and error.status != TOO_MANY):
            return RETRY_PAUSE
        if error.status == TOO_MANY or error.retry_after is None or error.retry_after > seconds_left:
            return None
        return max(RETRY_PAUSE, error.retry_after)

    async def _choose(
        self, body: RequestBody, failed: set[Instance], tried: set[Instance], deadline: float, *, retrying: bool
    ) -> Target:
        """Who serves the request. Waits until ``deadline`` (loop time) while a check under way may still turn up
        somebody, and on a retry in any case. Raises ``NoInstanceError``."""
        try:
            async with asyncio.timeout_at(deadline):
                while (target := self._fleet.pick(body, failed, tried)) is None:
                    if not retrying and not self._fleet.undecided():
                        break
                    await self._fleet.wait_change()
        except TimeoutError:
            target = None
        if target is None:
            raise NoInstanceError("no instance can serve at the moment: no healthy prefill-decode pair and no worker")
        return target

    async def _serve_by_pair(
        self, instance: Instance, place: Answering, request: RoutedRequest, answer: ClientAnswer
    ) -> None:
        bodies = request.body.for_pair(instance, self._signature)
        prefill = asyncio.create_task(self._watch_prefill(instance, request, bodies.prefill))
        decode = asyncio.create_task(self._answer_from(place, request, bodies.decode, answer))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and not answer.started and not decode.done():
                prefill.result()
            await decode
            self._let_linger(prefill)
        finally:
            await drop(decode, *({prefill} - self._lingering))

    async def _watch_prefill(self, instance: Instance, request: RoutedRequest, body: bytes) -> None:
        """Run a prefill's leg to its end; what it says is of no interest, only whether it fails."""
        with instance.computing(request.body.prompt_tokens, for_decode=True):
            async with Leg(self._client, self._fleet, instance, self._limits) as leg:
                await leg.open("POST", request.path, body, request.headers)
                await leg.discard()

    async def _serve_alone(self, place: Answering, request: RoutedRequest, answer: ClientAnswer) -> None:
        """One instance computes the prompt and the answer."""
        with place.instance.computing(request.body.prompt_tokens) as computed:
            # The prompt is done with when the answer begins; of an answer that doesn't stream, only its end is seen.
            await self._answer_from(place, request, request.body.raw, answer, computed)

    async def _answer_from(
        self,
        place: Answering,
        request: RoutedRequest,
        body: bytes,
        answer: ClientAnswer,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the leg whose answer goes to the client, at ``place``; ``begun`` is called when it begins.

        Where the instance hands the request on in the middle of it, the rest comes from the one that it names.
        """
        headers = [*request.headers, CAN_FOLLOW]
        ticket = await self._read_leg(place.instance, request.path, headers, body, answer, begun)
        while ticket is not None:
            follower = self._fleet.named(ticket.epoch, ticket.url)
            if follower is None:
                raise MovedAwayError(
                    f"{place.instance} handed the request on to {ticket.url}, which this router does not know"
                )
            logger.debug("goes on at %s", follower)
            place.move(follower)
            ticketed = [*headers, (TICKET, ticket.dump())]
            try:
                ticket = await self._read_leg(follower, request.path, ticketed, request.body.raw, answer, begun)
            except InstanceAnsweredError as e:
                raise MovedAwayError(f"{follower}, which was to go on with the request, refused: {e.message}") from e
            except RouterError as e:
                e.blames_nobody = True  # health checks look at who is to blame
                raise

    async def _read_leg(
        self,
        instance: Instance,
        path: str,
        headers: Headers,
        body: bytes,
        answer: ClientAnswer,
        begun: Callable[[], None],
    ) -> Ticket | None:
        """Pass an instance's answer on to its end; or up to where it says that it goes on elsewhere."""
        async with Leg(self._client, self._fleet, instance, self._limits) as leg:
            head = await leg.open("POST", path, body, headers)
            content_type = head.header(CONTENT_TYPE)
            if content_type == MOVED_TYPE:
                return ticket_in(await leg.read_all(), instance)
            back = [*([] if content_type else [UNTYPED]), *passed_back(head.headers)]
            if content_type is None or not content_type.lower().startswith(EVENT_STREAM):
                begun()
                await answer.whole(head.status, back, await leg.read_all())
                return None
            if head.header(b"cache-control") is None:
                back.append(UNCACHED)
            ticket: Ticket | None = None
            while events := await leg.next_events():
                if MOVED_EVENT in events:
                    events, _, last = events.partition(MOVED_EVENT)
                    ticket = ticket_in(last.strip(), instance)
                    if not events:
                        return ticket
                if not answer.started:
                    if is_comment(events):
                        await answer.keep_alive(head.status, back, events)
                        continue
                    raise_first_error(events, instance)
                    begun()
                    await answer.start(head.status, back)
                if events:
                    await answer.write(events)
            if ticket is not None:
                return ticket
            if not answer.started:
                await answer.start(head.status, back)
            await answer.finish()
            return None

    def _let_linger(self, prefill: asyncio.Task[None]) -> None:
        """Let a prefill's leg end by itself after the client has been served, so that its connection is kept."""
        if prefill.done():
            if not prefill.cancelled() and prefill.exception():
                logger.info("a prefill failed after its request was served: %s", prefill.exception())
            return
        self._lingering.add(prefill)
        timer = asyncio.get_running_loop().call_later(LINGER, prefill.cancel)

        def ended(task: asyncio.Task[None]) -> None:
            timer.cancel()
            self._lingering.discard(task)
            if not task.cancelled() and task.exception():
                logger.info("a prefill failed after its request was served: %s", task.exception())

        prefill.add_done_callback(ended)


def legs(target: Target) -> tuple[Instance, ...]:
    """The instances that an attempt goes to."""
    return tuple(target) if isinstance(target, Pair) else (target,)


def blamed(error: RouterError, target: Target) -> set[Instance]:
    """Which of the instances that an attempt went to are better avoided by the next one."""
    if error.blames_nobody:
        return set()
    at_fault = {instance for instance in legs(target) if instance.url == error.url}
    return at_fault if at_fault and not error.blames_peer else set(legs(target))


def charge(error: RouterError, at_fault: Iterable[Instance], begun_at: float) -> None:
    """Put a failed attempt to the account of those ``at_fault``, unless it is the client's fault, or health checks see
    its cause too."""
    for instance in at_fault:
        if error.retry_after is not None:
            instance.rest.ask(error.retry_after)
        elif error.status >= 500 and not error.shows_health:
            instance.rest.failed(begun_at)


async def drop(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, all at once, and wait until they have closed their connections. How they end no longer matters."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception():
            logger.debug("what was dropped had failed: %s", task.exception())


def ticket_in(said: bytes, instance: Instance) -> Ticket:
    """What an instance says of where a request goes on; raises ``MovedAwayError`` where that is no sense."""
    try:
        return read_ticket(said)
    except ValueError as e:
        raise MovedAwayError(f"{instance} handed the request on, but does not say to whom: {e}") from None


def raise_first_error(events: bytes, instance: Instance) -> None:
    """Raise ``InstanceAnsweredError`` when an answer's first SSE event is an error: nothing has been sent to the
    client yet, so it can still be a status, or a retry."""
    if not events.startswith(ERROR_EVENT):
        return
    first = events.partition(b"\n\n")[0].removeprefix(b"data: ")
    raise InstanceAnsweredError(error_status(parse_error(first) or {}), first, str(instance), ())
