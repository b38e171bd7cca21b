"""Answers that begin at one instance and end at another.

Two kinds are kept here. Answers that go on at this instance wait until they are read. Answers of this instance's own
clients that go on elsewhere are read there and relayed, if the client can't follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from ....messages.moves import ReqArrived, ReqMoved
from ....messages.outputs import FinishReason, FinishType, ReqText, TextBatch
from ....runtime.web.client.client import HttpClient
from ....runtime.web.client.errors import ClientError
from ....runtime.web.client.events import EventBuffer
from ....runtime.web.cluster_auth import OPEN_CLUSTER, ClusterAccess
from ....runtime.web.moved_answer import MOVED_PATH, TICKET, Ticket
from ....runtime.web.sse import DATA_PREFIX, DONE_EVENT, EVENT_END
from ..errors import ApiError
from .logprob_account import LogprobAccount
from .plan import PromptPlan
from .submission import Choice, Kind, ScoredSubmission, Submission

log = logging.getLogger(__name__)

ARRIVAL_SECONDS = 5.0
"""How long a ticket waits for its answer. It may come first: schedulers notify each other, and the detokenizer is
slower.
"""
UNREAD_SECONDS = 30.0
"""A moved answer ends if it is not read within this time."""
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""Maximum silence of a relayed stream; streams send something every 15 s."""
ERROR = b'{"error"'

OnText = Callable[[TextBatch], None]
_ITEM = msgspec.json.Decoder(ReqText)


class _Error(msgspec.Struct):
    """The ``error`` object of ``runtime/web/errors.py``."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | None = None
    status: int = 502


class _ErrorAnswer(msgspec.Struct):
    error: _Error


_ERROR = msgspec.json.Decoder(_ErrorAnswer)


def _as_api_error(error: _Error) -> ApiError:
    """Convert an error object of the peer to an ``ApiError``. A status outside 400 to 599 becomes 502."""
    status = error.status if 400 <= error.status <= 599 else 502
    return ApiError(status, error.message, param=error.param, kind=error.type, code=error.code)


class _ParkedAnswer(NamedTuple):
    submission: Submission
    timer: asyncio.TimerHandle


class _Relay(NamedTuple):
    task: asyncio.Task[None]
    choice: Choice
    on_text: OnText


class RecognizesKeys(Protocol):
    """Interface to ``AnswerKeys``."""

    def is_genuine(self, key: str) -> bool:
        """Return whether a process of this instance made ``key``, so that its answer may be yet to come."""


class MovedAnswers:
    """Moved answers that wait to be read here, and those relayed from elsewhere. Event-loop thread only."""

    def __init__(
        self,
        account: LogprobAccount,
        keys: RecognizesKeys,
        cluster: ClusterAccess = OPEN_CLUSTER,
    ) -> None:
        self._account = account
        self._keys = keys
        self._parked: dict[str, _ParkedAnswer] = {}
        self._awaited: dict[str, asyncio.Event] = {}
        self._relays: dict[str, _Relay] = {}
        self._away: set[str] = set()
        """Ids of the requests that ended here while their answers go on elsewhere."""
        self._client = HttpClient((), CONNECT_SECONDS, cluster=cluster)
        self._when_quiet: Callable[[], None] | None = None

    # --- answers that go on here ---

    def park(self, arrived: ReqArrived, give_up: Callable[[Submission], None]) -> Submission:
        """Keep an answer that arrives from another instance until its client presents the key. Return its submission.

        Call ``give_up`` with the submission if that does not happen within ``UNREAD_SECONDS``.
        """
        choice = Choice(0, 0, arrived.rid, arrived.rid, arrived.arrival, kind=Kind.STREAM)
        choice.replay = arrived.output_tokens > 0
        submission = ScoredSubmission(self._account, [choice], names=[], streaming=True)

        def late() -> None:
            if self._parked.pop(arrived.key, None) is not None:
                log.warning("no client fetched its answer in %.0f s", UNREAD_SECONDS, extra={"rid": arrived.rid})
                give_up(submission)
                self._look()

        timer = asyncio.get_running_loop().call_later(UNREAD_SECONDS, late)
        self._parked[arrived.key] = _ParkedAnswer(submission, timer)
        if (awaited := self._awaited.pop(arrived.key, None)) is not None:
            awaited.set()
        return submission

    async def take(self, ticket: Ticket, plan: PromptPlan, *, streaming: bool, keeps_sent: bool = True) -> Submission:
        """Return the submission of the moved answer that ``ticket`` names, and no longer keep it for a client.

        Wait up to ``ARRIVAL_SECONDS`` if the answer has not arrived. By the ticket, its deltas leave out what the
        client has received. ``plan`` gives its name, and whether output is wanted. ``streaming``: it is sent in deltas.
        ``keeps_sent``: what a delta has returned is kept, too. Raises ``ApiError`` 404 if there is no such answer.
        """
        if ticket.key not in self._parked and self._keys.is_genuine(ticket.key):
            awaited = self._awaited.setdefault(ticket.key, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(ARRIVAL_SECONDS):
                    await awaited.wait()
            self._awaited.pop(ticket.key, None)
        parked = self._parked.pop(ticket.key, None)
        self._look()
        if parked is None:
            raise ApiError(404, "there is no moved answer for this ticket: it was read, or not fetched in time")
        parked.timer.cancel()
        (choice,) = parked.submission.choices
        choice.rid, choice.keep_output, choice.keeps_sent = plan.rid, plan.keep_output, keeps_sent
        choice.kind = Kind.STREAM if streaming else Kind.WHOLE
        choice.opened, choice.sent_chars, choice.sent_tokens = ticket.opened, ticket.chars, ticket.tokens
        return parked.submission

    # --- answers that go on elsewhere ---

    def relay(self, moved: ReqMoved, choice: Choice, owner: Submission, on_text: OnText) -> None:
        """Start a task that reads the rest of ``choice`` at another instance, for a client that can't follow.

        ``moved`` names that instance. ``on_text`` is called with each new output. ``owner`` fails if the answer can't
        be read to its end.
        """
        sent = (choice.chars, choice.completion_tokens, choice.opened)
        ticket = Ticket(moved.epoch, moved.host, moved.port, moved.key, *sent, choice.rid, 0)
        self._away.add(moved.rid)
        task = asyncio.get_running_loop().create_task(self._read(ticket, choice, owner, on_text))
        self._relays[moved.rid] = _Relay(task, choice, on_text)
        task.add_done_callback(lambda _: self._ended(moved.rid))

    async def _read(self, ticket: Ticket, choice: Choice, owner: Submission, on_text: OnText) -> None:
        try:
            answer = await self._client.send(
                "POST", ticket.url, MOVED_PATH, b"", [(TICKET, ticket.dump())], silence=SILENCE_SECONDS
            )
            try:
                if answer.status != 200:
                    raise ApiError(502, f"{ticket.url} does not go on with this answer (it said {answer.status})")
                events = EventBuffer()
                while data := await answer.read():
                    for event in events.whole(data).split(EVENT_END):
                        self._take(event, choice.wire_rid, on_text)
            finally:
                answer.close()
            if choice.finish is None:
                raise ApiError(502, f"{ticket.url} ended this answer, which it went on with, too early")
        except ApiError as e:
            owner.fail(e)
        except Exception as e:
            # Catch everything: the peer's data may make any decoder fail, no task awaits this one, and the client
            # of the answer would wait for ever.
            if not isinstance(e, (ClientError, TimeoutError, msgspec.MsgspecError)):
                log.exception("what %s sent of a moved answer can't be read", ticket.url, extra={"rid": choice.rid})
            reason = str(e) or type(e).__name__
            owner.fail(ApiError(502, f"{ticket.url}, where this answer goes on, is gone: {reason}"))

    @staticmethod
    def _take(event: bytes, rid: str, on_text: OnText) -> None:
        if not event.startswith(DATA_PREFIX) or event + EVENT_END == DONE_EVENT:
            return
        content = event.removeprefix(DATA_PREFIX)
        if content.startswith(ERROR):
            raise _as_api_error(_ERROR.decode(content).error)
        item = _ITEM.decode(content)
        item.rid = rid
        on_text(TextBatch([item]))

    def abort(self, choices: Iterable[Choice], reason: str) -> None:
        """Stop reading those of ``choices`` that go on at other instances. End each with an abort for ``reason``."""
        for choice in choices:
            relay = self._relays.pop(choice.wire_rid, None)
            if relay is not None:
                relay.task.cancel()
                finish = FinishReason(FinishType.ABORT, message=reason)
                relay.on_text(TextBatch([ReqText(choice.wire_rid, "", [], finish, choice.meta)]))

    def is_away(self, rid: str) -> bool:
        """Return whether the request ``rid`` has ended here while its answer goes on at another instance, or did."""
        return rid in self._away

    def leave(self, rid: str) -> bool:
        """Stop relaying the answer of the request ``rid``, and forget that it has moved. Return whether it had."""
        relay = self._relays.pop(rid, None)
        if relay is not None:
            relay.task.cancel()
        was_away = rid in self._away
        self._away.discard(rid)
        return was_away

    def abort_all(self, reason: str) -> None:
        """Stop reading all answers that go on at other instances. End each with an abort for ``reason``."""
        self.abort([relay.choice for relay in self._relays.values()], reason)

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, as soon as no moved answer waits to be read here and none is relayed; that may be now."""
        self._when_quiet = call
        self._look()

    def _ended(self, rid: str) -> None:
        self._relays.pop(rid, None)
        self._look()

    def _look(self) -> None:
        if self._when_quiet is not None and not self._relays and not self._parked:
            call, self._when_quiet = self._when_quiet, None
            call()
