"""The HTTP process's side of the ring: sends requests, and receives text and answers.

A request is live from ``submit`` until the engine ends it (``live_requests.py``). If its client goes, it is aborted.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from ....messages.base import Message
from ....messages.channel import AsyncReceiver, FrameTooLarge, SendsMessages, UndeclaredMessage
from ....messages.control import Drained, StopAsked
from ....messages.error_codes import BATCH_TOO_LARGE
from ....messages.metrics import SchedulerMetrics
from ....messages.moves import ReqArrived, ReqMoved
from ....messages.outputs import ReqError, TextBatch
from ....messages.requests import AbortReq
from ....messages.routes import ToHttp
from ....messages.sessions import ReleaseReq, ResumeReq, SessionState
from ....messages.too_large import explain
from ....runtime.web.cluster_auth import OPEN_CLUSTER, ClusterAccess
from ....runtime.web.keys import ANYBODY, Caller
from ....runtime.web.moved_answer import Ticket
from ..errors import AnswerMoved, ApiError, bad_request
from .held_bytes import HeldBytes
from .live_requests import LiveRequest, LiveRequests
from .logprob_account import LogprobAccount
from .moved_answers import MovedAnswers, RecognizesKeys
from .plan import PromptPlan
from .question_client import QuestionClient
from .request_batch import MAX_REQUEST_BYTES, Asker, make_batch
from .request_metrics import CLIENT_GONE, ERROR, MOVED, RequestMetrics
from .submission import Choice, Kind, Submission, make_submission

ABORTED = "aborted by the client"
log = logging.getLogger(__name__)


class AbortCount(NamedTuple):
    """``aborted``: requests that were running. ``legs``: how many of these another instance answers."""

    aborted: int
    legs: int


class EngineClient:
    """Submits requests and delivers each answer to its waiter; ``questions`` asks. Event-loop thread only."""

    def __init__(
        self,
        tokenizer: SendsMessages,
        supervisor: SendsMessages,
        mode: str = "unified",
        *,
        answer_keys: RecognizesKeys,
        cache_by_key: bool = False,
        cluster: ClusterAccess = OPEN_CLUSTER,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        max_logprobs: int | None = None,
        max_requests: int | None = None,
    ) -> None:
        """Make a client of the tokenizer and the supervisor.

        ``mode``: the instance's role until the scheduler reports it. ``cache_by_key``: keep the cached prefixes of API
        keys apart. ``max_request_bytes``: maximum length of one HTTP request's messages. ``max_logprobs``: maximum
        log-probabilities kept for one HTTP request. ``max_requests``: maximum answers in one batch, as no more may be
        queued and running at a time. None: no limit.
        """
        self.metrics = RequestMetrics()
        self.scheduler_metrics: SchedulerMetrics | None = None
        """The scheduler's latest report, None while it is still loading."""
        self._tokenizer = tokenizer
        self._supervisor = supervisor
        self._mode = mode
        self.live = LiveRequests()
        self._max_request_bytes = max_request_bytes
        self.logprobs = LogprobAccount(max_logprobs)
        self.held = HeldBytes()
        self._cache_by_key = cache_by_key
        self.moved = MovedAnswers(self.logprobs, answer_keys, cluster)
        self.questions = QuestionClient(self._send)
        self._max_requests = max_requests
        self._closed: str | None = None

    @property
    def role(self) -> str:
        """Return the instance's current role as last reported; before the first report, the configured mode."""
        return self.scheduler_metrics.role if self.scheduler_metrics is not None else self._mode

    # --- requests ---

    async def submit(
        self,
        plans: Sequence[PromptPlan],
        *,
        streaming: bool,
        group: str | None = None,
        caller: Caller = ANYBODY,
        follows: bool = False,
        keeps_sent: bool = True,
    ) -> Submission:
        """Send one request to the engine for each of ``plans``, and return the submission that waits for the answers.

        ``streaming``: hand out the output as it grows. ``group``: a name for all answers, beside those in ``plans``.
        ``caller``: the sender; each name is unique among its requests. ``follows``: the client can read the rest of an
        answer elsewhere. ``keeps_sent``: keep output after a delta has returned it. Raises ``ApiError``:
        - 400 if a name is in use;
        - 413 if the prompts are too large or ask for too many answers;
        - 429 if the prompts of running requests take too many bytes;
        - 503 after ``close``.
        """
        self._check_open()
        _check_batch(plans, self._max_requests)
        if self._cache_by_key:
            # No key's name contains "\\0", so no client can ask for prefixes of another one.
            plans = [dataclasses.replace(plan, extra_key=f"{caller.name}\0{plan.extra_key}") for plan in plans]
        is_prefill = self.role == "prefill"
        asker = Asker(caller.name, streaming, group, is_prefill, keeps_sent, self._max_request_bytes)
        batch = await make_batch(plans, asker)
        # No await from here on: no answer can come, and no name be taken, before all are known.
        self._check_open()
        choices = batch.choices
        taken = next((name for name in batch.named if self.live.is_named(name, caller)), None)
        if taken is not None:
            raise bad_request("rid", f'"{taken}" is in use by a running request; choose another')
        rids = {choice.rid for choice in choices}
        if len(rids) != len(choices):
            raise bad_request("rid", "two answers of the batch would share an id; choose others")
        if any(rid in self.live for rid in rids):
            for choice in choices:
                choice.wire_rid = self.live.wire_rid(choice.rid, rids if choice.rid in self.live else ())
            batch.rename()
        submission = make_submission(
            self.logprobs,
            (plan.logprobs for plan in plans),
            choices,
            owner=caller.name,
            names=list(batch.named),
            streaming=streaming,
            follows=follows and len(choices) == 1,
            nbytes=batch.nbytes,
        )
        self.held.check(caller.name, batch.nbytes)
        # Send first: a request that can't be sent must leave no name behind.
        self._send(*batch.requests)
        self.held.take(caller.name, batch.nbytes)
        self.live.add(submission, batch.named)
        return submission

    def _send(self, *messages: Message) -> None:
        """Send to the tokenizer process. If no frame can hold a message, send none and raise ``ApiError`` 413."""
        try:
            self._tokenizer.send(*messages)
        except FrameTooLarge as e:
            raise ApiError(413, explain(e)) from None

    async def adopt(
        self,
        ticket: Ticket,
        plans: Sequence[PromptPlan],
        *,
        streaming: bool,
        caller: Caller = ANYBODY,
        follows: bool = False,
        keeps_sent: bool = True,
    ) -> Submission:
        """Take over the answer that ``ticket`` names, which goes on here; wait some seconds for its arrival.

        ``plans``: exactly one. The other arguments are those of ``submit``. Raises ``ApiError``: 400 for several plans,
        404 without such an answer, 503 after ``close``.
        """
        self._check_open()
        if len(plans) != 1 or plans[0].n != 1:
            raise bad_request(None, "a ticket is for one answer")
        submission = await self.moved.take(ticket, plans[0], streaming=streaming, keeps_sent=keeps_sent)
        choice, names = submission.choices[0], []
        if not self.live.is_named(plans[0].rid, caller):
            names = [plans[0].rid]
            self.live.add_names(caller.name, {names[0]: [choice]})
        submission.owner, submission.names, submission.follows = caller.name, names, follows
        return submission

    def resume(
        self,
        state: SessionState,
        owner: str,
        *,
        streaming: bool,
        caller: Caller = ANYBODY,
        follows: bool = False,
        keeps_sent: bool = True,
    ) -> Submission:
        """Send the saved request ``state`` to the engine, which continues it. Return the answer's submission.

        ``owner``: name of the key that saved it. The other arguments are those of ``submit``. Raises ``ApiError``, as
        for a name that is in use, and after ``close``.
        """
        self._check_open()
        request, arrival = state.running.request, time.monotonic()
        if self.live.is_named(request.rid, caller):
            raise bad_request("rid", f'"{request.rid}" is in use by a running request; choose another')
        wire_rid = self.live.wire_rid(request.rid)
        kind = Kind.STREAM if streaming else Kind.WHOLE
        choice = Choice(0, 0, request.rid, wire_rid, arrival, kind=kind, keeps_sent=keeps_sent)
        choice.replay = bool(state.running.output)
        key = _own_key(request.extra_key, owner) if self._cache_by_key else request.extra_key
        nbytes = len(state.token_ids)
        known = {"owner": caller.name, "names": [choice.rid], "nbytes": nbytes}
        submission = make_submission(
            self.logprobs, [request.logprobs], [choice], streaming=streaming, follows=follows, **known
        )
        self.held.check(caller.name, nbytes)
        # The old time limit was that of another client's request.
        fields = {"stream": streaming, "extra_key": key, "key_name": owner, "timeout_s": 0.0}
        self._send(ResumeReq(_with_request(state, rid=wire_rid, arrival=arrival, **fields)))
        self.held.take(caller.name, nbytes)
        self.live.add(submission, {choice.rid: [choice]})
        return submission

    def release(self, token_ids: bytes, extra_key: str, shared: int = 0) -> None:
        """Tell the scheduler that stored KV of a session's tokens (int32), but the first ``shared``, is not needed."""
        self._tokenizer.send(ReleaseReq(token_ids, extra_key, shared))

    def end(self, submission: Submission) -> None:
        """Forget a submission, and abort its running requests.

        Its prompts' bytes count until the engine has ended these.
        """
        self.logprobs.drop(submission)
        self.live.remove_names(submission)
        why = CLIENT_GONE if submission.is_abandoned else ERROR
        for choice in submission.choices:
            if self.moved.leave(choice.wire_rid):
                self.live.pop(choice.wire_rid)  # the engine has ended it already
            elif self.live.get(choice.wire_rid) is not None:
                self.metrics.dropped(choice, why)
        self._abort(submission.choices, "the client is gone")
        self.held.give_back(submission.owner, submission.nbytes, self.live.abandon(submission))

    def abort(self, rid: str, caller: Caller = ANYBODY) -> AbortCount:
        """Ask the engine to end all running choices that ``caller`` calls ``rid``, and count them; never wait."""
        return self._abort(self.live.named(rid, caller), ABORTED)

    def abort_all(self, caller: Caller = ANYBODY) -> AbortCount:
        """Ask the engine to end all running requests of ``caller``, or of all if it is the admin; count them."""
        if not caller.is_admin:
            return self._abort(self.live.owned(caller), ABORTED)
        running = AbortCount(len(self.live), self.live.count_legs())
        self.moved.abort_all(ABORTED)
        self._tokenizer.send(AbortReq(rid=""))
        return running

    def _abort(self, choices: Iterable[Choice], reason: str) -> AbortCount:
        running = self.live.still_running(choices)
        self.moved.abort(running, reason)
        self._tokenizer.send(*(AbortReq(choice.wire_rid, reason) for choice in running))
        return AbortCount(len(running), sum(choice.kind is Kind.LEG for choice in running))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ApiError(503, self._closed)

    # --- answers ---

    async def run(self, receiver: AsyncReceiver[Any]) -> NoReturn:
        """Receive what the engine sends, and never return. A frame that is not declared is logged and dropped."""
        while True:
            try:
                messages = await receiver.recv()
            except UndeclaredMessage as e:
                log.error("%s", e)
                continue
            self.dispatch(messages)

    def dispatch(self, messages: Iterable[ToHttp]) -> None:
        """Deliver each of ``messages`` to the request or question that waits for it. Drop it if none does."""
        for message in messages:
            if isinstance(message, TextBatch):
                self._on_text(message)
            elif isinstance(message, ReqError):
                live = self._ended(message.rid)
                if live is not None:
                    self.metrics.on_error(live.choice, message)
                    live.owner.fail(_as_api_error(message, live))
            elif isinstance(message, SchedulerMetrics):
                self.scheduler_metrics = message
            elif isinstance(message, ReqArrived):
                self._on_arrived(message)
            elif isinstance(message, ReqMoved):
                self._on_moved(message)
            elif isinstance(message, Drained):
                # All earlier answers have been written to their clients' connections, but some go on elsewhere.
                self.moved.when_quiet(functools.partial(self._report, message))
            else:
                self.questions.on_answer(message)

    def drain(self, to: list[tuple[str, int]]) -> None:
        """Ask the supervisor to drain the instance. Those at the bootstrap addresses ``to`` continue what runs."""
        self._report(StopAsked(to))

    def _report(self, message: Drained | StopAsked) -> None:
        self._supervisor.send(message)

    def _ended(self, rid: str) -> LiveRequest | None:
        """Forget the request of wire id ``rid``, which the engine has ended. Return it, None if its client has gone."""
        self.held.ended(rid)
        return self.live.pop(rid)

    def _on_text(self, batch: TextBatch) -> None:
        now = time.monotonic()
        for item in batch.items:
            live = self.live.get(item.rid)
            if item.finish is not None:
                self._ended(item.rid)
            if live is None:
                continue
            if live.choice.replay:
                # These tokens were counted where they were generated. The gap to the next one is no latency.
                live.choice.replay = False
                live.choice.first_token_at = live.choice.last_token_at = now
            elif not self.moved.is_away(item.rid):  # the instance where it goes on counts it
                self.metrics.on_text(live.choice, item, now)
            live.owner.update(live.choice, item, now)

    def _on_arrived(self, message: ReqArrived) -> None:
        self.live.add_arrived(self.moved.park(message, self.end))

    def _on_moved(self, message: ReqMoved) -> None:
        live = self.live.get(message.rid)
        if live is None:
            self._ended(message.rid)  # its client has gone: the answer stays unread there
            return
        self.metrics.dropped(live.choice, MOVED)
        if live.owner.follows:
            self._ended(message.rid)
            live.owner.fail(AnswerMoved(message.epoch, message.host, message.port, message.key))
        else:
            self.moved.relay(message, live.choice, live.owner, self._on_text)

    def close(self, reason: str, code: str | None = None) -> None:
        """Fail all requests and questions, waiting or to come, with a 503. ``code`` is for waiting requests."""
        self._closed = reason
        for owner in self.live.owners():
            owner.fail(ApiError(503, reason, code=code))
        self.questions.close(reason)


def _as_api_error(error: ReqError, live: LiveRequest) -> ApiError:
    api_error = ApiError.from_engine(error)
    if live.owner.choices[-1].prompt_index:
        api_error.message = f"prompt {live.choice.prompt_index} of the batch: {api_error.message}"
    return api_error


def _check_batch(plans: Sequence[PromptPlan], most: int | None) -> None:
    """Raise ``ApiError`` 413 if ``plans`` ask for more than ``most`` answers together. None: no limit."""
    answers = sum(plan.n for plan in plans)
    if most is not None and answers > most:
        text = f"the batch asks for {answers} answers, and {most} may be queued or running at a time"
        raise ApiError(413, f"{text}; split it", code=BATCH_TOO_LARGE)


def _with_request(state: SessionState, **fields: Any) -> SessionState:
    """Return a copy of ``state`` with these ``fields`` of its request replaced."""
    request = msgspec.structs.replace(state.running.request, **fields)
    return msgspec.structs.replace(state, running=msgspec.structs.replace(state.running, request=request))


def _own_key(key: str, owner: str) -> str:
    """Return the cache namespace of a restored request, so that only requests of the same API key find its KV.

    ``key``: the namespace that it was saved with. ``owner``: the name of its API key. The owner's name is put before
    ``key`` unless it is there already. A server that shares prefixes between keys saves ``key`` without the owner's
    name.
    """
    return key if key.startswith(f"{owner}\0") else f"{owner}\0{key}"
