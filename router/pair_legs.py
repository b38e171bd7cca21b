"""Sends one request to both legs of a pair. See ``dispatcher.py`` for what ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..runtime.web.client.client import Body
from .answer_relay import AnswerRelay
from .client_answer import ClientAnswer
from .errors import InstanceAnsweredError, InstanceCrashedError
from .instance import Instance
from .routed_request import RoutedRequest
from .tasks import drop, failure_of
from .work import Answering, Computing

logger = logging.getLogger(__name__)

LINGER = 5.0
"""Seconds that a prefill's leg may stay open after the decode's answer is complete."""
CRASH_SHOWS = 0.1
"""Seconds in which a broken connection shows that a pair's hand-over failed because an instance died."""


class PairLegs:
    """Server of requests by pairs. It keeps the prefills' legs that outlast their request for a moment."""

    def __init__(self, relay: AnswerRelay) -> None:
        self._relay = relay
        self._lingering: set[asyncio.Task[None]] = set()

    async def serve(
        self,
        instance: Instance,
        answering: Answering,
        request: RoutedRequest,
        answer: ClientAnswer,
        began: Callable[[], None],
    ) -> None:
        """Have the prefill ``instance`` compute the prompt, and the instance of ``answering`` decode the answer.

        ``began`` is called when the answer begins. Raises the ``RouterError`` that ended the attempt.
        """
        bodies = request.body.for_pair(instance)
        computing = Computing(instance, request.body.prompt_tokens, request.body.batch_size or 1, for_decode=True)
        prefill = asyncio.create_task(self._watch_prefill(instance, request, bodies.prefill))
        prefill.add_done_callback(computing.done)  # also if it is cancelled before it runs
        decode = asyncio.create_task(self._relay.pass_on(answering, request, bodies.decode, answer, began))
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
        async with self._relay.leg(instance, request) as leg:
            await leg.open(request.path, body, request.headers, streams=False)
            await leg.discard()

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
