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
import logging
import time
from collections.abc import Callable

from ..runtime.web.client.client import HttpClient
from ..runtime.web.errors import without_frames
from .answer_relay import AnswerRelay
from .attempts import Attempt
from .client_answer import ClientAnswer
from .errors import InstanceCrashedError, NoInstanceError, QuarantinedError, RouterError
from .facts import Facts
from .fleet import Fleet
from .health import seconds_to_notice
from .instance import Instance
from .leg import LegLimits
from .options import RouterOptions
from .pair_legs import PairLegs
from .quarantine import WINDOW_SECONDS, Quarantine, digest_of
from .request_body import RequestBody
from .retries import RetryBudget, blamed, charge
from .routed_request import RoutedRequest
from .targets import Pair, Target, legs
from .work import Answering, Computing

logger = logging.getLogger(__name__)

RETRY_PAUSE = 0.05
"""Seconds before a retry: time for a dropped leg's abort to arrive, so that the same rid is free again."""
UNSEEN_SECONDS = 10.0
"""Seconds for which a prompt counts as waiting if its answer does not stream: when it was computed can't be seen."""


class Dispatcher:
    """Sender of requests to the instances of a fleet, and of their answers to the clients."""

    def __init__(self, fleet: Fleet, client: HttpClient, options: RouterOptions) -> None:
        self._fleet = fleet
        self._options = options
        # Never sooner than health checks take to find an instance dead.
        unseen = max(options.first_byte_timeout, seconds_to_notice(options))
        limits = LegLimits(options.first_byte_timeout, options.idle_timeout, unseen)
        self._quarantine = Quarantine()
        self._relay = AnswerRelay(fleet, client, limits, self._quarantine, options.max_held_event_bytes)
        self._pair_legs = PairLegs(self._relay)

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
        decodes, count = target.decode if isinstance(target, Pair) else target, request.body.answers
        with Attempt(self._fleet.policy, target, request.facts) as attempt, Answering(decodes, count) as answering:
            if isinstance(target, Pair):
                await self._pair_legs.serve(target.prefill, answering, request, answer, attempt.began)
            else:
                await self._serve_alone(answering, request, answer, attempt.began)
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

    def _pause(self, body: RequestBody, error: RouterError, failed: set[Instance], seconds_left: float) -> float | None:
        """Return the seconds to wait before the next attempt; None if there should be no other one.

        The next attempt goes to instances outside ``failed`` if there are any. Otherwise it waits as long as an
        instance asked by ``Retry-After``, if that is within ``seconds_left``. An instance that is overloaded, or
        where the client's key is at its limit, is not asked again.
        """
        is_refused = error.is_load or error.is_key_limit
        if self._fleet.has_others(body, failed) or (error.retry_after is None and not is_refused):
            return RETRY_PAUSE
        if is_refused or error.retry_after is None or error.retry_after > seconds_left:
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
            shortage = self._fleet.shortage(f"no healthy {needed} and no worker")
            raise NoInstanceError(f"no instance can serve at the moment: {shortage}")
        return target

    async def _serve_alone(
        self, answering: Answering, request: RoutedRequest, answer: ClientAnswer, began: Callable[[], None]
    ) -> None:
        """Have one instance compute the prompt and the answer, which goes to the client. Raises ``RouterError``.

        ``began`` is called when the answer begins.
        """
        body = request.body
        with Computing(answering.instance, body.prompt_tokens, body.batch_size or 1) as computing:
            timer = asyncio.get_running_loop().call_later(UNSEEN_SECONDS, computing.done) if not body.stream else None

            def begins() -> None:
                computing.done()  # the prompt is computed
                began()

            try:
                await self._relay.pass_on(answering, request, body.raw, answer, begins)
            finally:
                if timer is not None:
                    timer.cancel()
