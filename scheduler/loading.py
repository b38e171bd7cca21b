"""What the scheduler process answers before the model worker has loaded the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

from ..messages.control import Drain
from ..messages.error_codes import STARTING
from ..messages.outputs import ReqError
from ..messages.question import Question, RefusedAnswer
from ..messages.requests import AbortReq, ForkedReq, GenerateReq, StopReq
from ..messages.routes import ToScheduler
from ..messages.sessions import ReleaseReq, ResumeReq
from ..messages.worker import WorkerReady
from .handlers import Handlers, receives
from .outbox import Outbox
from .refusals import BUSY

LOADING = "the model is still loading"
SOON = f"{LOADING}; try again in a few seconds"
QUESTIONS = [kind for kind in get_args(ToScheduler) if issubclass(kind, Question)]


class LoadingInstance:
    """An instance without a model: it refuses requests and questions. ``start`` is called with the worker's report."""

    def __init__(self, outbox: Outbox, start: Callable[[WorkerReady, float], None]) -> None:
        self._outbox = outbox
        self._start = start
        self.handlers = Handlers(outbox, self)

    @receives(WorkerReady)
    def on_ready(self, worker: WorkerReady, now: float) -> None:
        """Start the instance: the worker has loaded the model."""
        self._start(worker, now)

    @receives(*QUESTIONS)
    def refuse_question(self, question: Question[RefusedAnswer], now: float) -> RefusedAnswer:
        """Refuse any question with 503: the model is loading."""
        return RefusedAnswer(503, LOADING)

    @receives(GenerateReq, ForkedReq)
    def refuse_request(self, message: GenerateReq | ForkedReq, now: float) -> None:
        """Refuse a request, and each further answer to its prompt, with 503: the model is loading."""
        for request in message.requests() if isinstance(message, ForkedReq) else [message]:
            self._outbox.answer(ReqError(request.rid, 503, SOON, BUSY, code=STARTING))

    @receives(ResumeReq)
    def refuse_session(self, message: ResumeReq, now: float) -> None:
        """Refuse to continue a saved session, with 503: the model is loading."""
        self._outbox.answer(ReqError(message.state.running.request.rid, 503, SOON, BUSY))

    @receives(AbortReq, StopReq, ReleaseReq, Drain)
    def ignore(self, message: AbortReq | StopReq | ReleaseReq | Drain, now: float) -> None:
        """Ignore a message about requests: there are none."""

    def begin(self, now: float) -> None:
        """Do nothing: there is no request."""

    def tick(self, now: float) -> None:
        """Do nothing: no request waits for a step."""

    def after_send(self, ended: list[str], now: float) -> None:
        """Do nothing: no request was answered."""

    def seconds_left(self, now: float) -> float:
        """Return infinity: only a message changes anything."""
        return math.inf
