"""One profile of the model workers at a time: ``POST /start_profile`` and ``/stop_profile``.

::

    IDLE ─start─▶ STARTING ─the worker records─▶ RECORDING ─steps, time or stop─▶ WRITING ─files are there─▶ IDLE
      ▲               │ it can't                                                                              │
      └───────────────┴───────────────────────────────────────────────────────────────────────────────────────┘

A profile ends by itself after its steps, or after ``MAX_SECONDS``, so one that was forgotten costs no more than that.
``/stop_profile`` after its end reports again what it wrote.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from ...messages.profiling import (
    ProfileResult,
    ProfileStarted,
    ProfileWritten,
    StartProfile,
    StartProfileReq,
    StopProfile,
    StopProfileReq,
)
from ...messages.question import RefusedAnswer
from ..feature import Feature
from ..handlers import answers, receives
from ..outbox import Outbox

log = logging.getLogger(__name__)

MAX_SECONDS = 60.0
"""Maximum duration of a profile, in seconds."""


class ProfileState(StrEnum):
    """The states of the diagram in the module's docstring."""

    IDLE = "idle"
    STARTING = "starting"
    RECORDING = "recording"
    WRITING = "writing"


class Profiling(Feature):
    """The profile that runs, and the result of the last one. Called from the scheduler's loop."""

    def __init__(self, outbox: Outbox, newest_step: Callable[[], int]) -> None:
        """Start without a profile; ``newest_step`` returns the number of steps that were sent to the worker."""
        self._outbox = outbox
        self._newest_step = newest_step
        self.state = ProfileState.IDLE
        self._order: StartProfileReq | None = None
        """The order that the profile in progress obeys; None while idle."""
        self._waiting: list[StopProfileReq] = []
        """Questions that are answered when the files are there."""
        self._result: ProfileResult | None = None
        """The profile in progress, or the last one; None before the first."""
        self._error = ""
        """Why files of the last profile are missing; "" if none are."""
        self._first_step = 0
        self._began = 0.0
        self._until = math.inf

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the profile ends by itself; infinity while none is recorded."""
        return max(0.0, self._until - now)

    def tick(self, now: float) -> None:
        """End the recording if it has all its steps, or has taken ``MAX_SECONDS``."""
        if self.state is not ProfileState.RECORDING or self._order is None:
            return
        if self._steps >= self._order.num_steps:
            self._end("num_steps", now)
        elif now >= self._until:
            self._end("time limit", now)

    def status(self, now: float) -> dict[str, Any]:
        """Return ``profile``: the state, and folder, cause of the end and error of the current or last profile.

        Before the first profile it has only the state.
        """
        last = self._result
        if last is None:
            return {"profile": {"state": self.state}}
        shown = {"state": self.state, "folder": last.folder, "ended_by": last.ended_by, "error": self._error}
        return {"profile": shown}

    @property
    def _steps(self) -> int:
        """The steps that were sent since ``StartProfile``."""
        return self._newest_step() - self._first_step

    @answers(StartProfileReq)
    def start(self, order: StartProfileReq, now: float) -> ProfileResult | RefusedAnswer | None:
        """Order the worker to start a profile, and return None: the answer is sent when the worker records.

        Refuse with 409 while another profile is under way.
        """
        if self.state is not ProfileState.IDLE:
            text = f'a profile is {self.state} ("{self._running}"); end it with POST /stop_profile, or wait for its end'
            return RefusedAnswer(409, text)
        self.state, self._order, self._first_step = ProfileState.STARTING, order, self._newest_step()
        self._outbox.to_worker(StartProfile(order.name, order.activities, order.with_stack, order.record_shapes))
        return None

    @receives(ProfileStarted)
    def on_started(self, event: ProfileStarted, now: float) -> None:
        """Answer the order that started the profile: with its result so far if the worker records, otherwise with its
        error.
        """
        order = self._order
        assert order is not None
        if event.error:
            log.warning("no profile: %s", event.error)
            self.state, self._order = ProfileState.IDLE, None
            self._outbox.reply(order, RefusedAnswer(event.status, event.error))
            self._answer_all(RefusedAnswer(409, f"no profile runs: {event.error}"))
            return
        log.info("a profile of up to %d steps is recorded into %s", order.num_steps, event.folder)
        self.state, self._began, self._until = ProfileState.RECORDING, now, now + MAX_SECONDS
        self._result = ProfileResult(event.folder, event.files, event.activities, order.num_steps, MAX_SECONDS)
        self._error = ""
        self._outbox.reply(order, self._result)
        if self._waiting:
            self._end("request", now)

    @answers(StopProfileReq)
    def stop(self, question: StopProfileReq, now: float) -> ProfileResult | RefusedAnswer | None:
        """End the profile, and return None: the answer is sent when its files are written.

        If none is under way, return the last one's result, or a refusal if there was none or its files are missing.
        """
        if self.state is ProfileState.IDLE:
            return self._ended()
        self._waiting.append(question)
        if self.state is ProfileState.RECORDING:
            self._end("request", now)
        return None

    def _end(self, why: str, now: float) -> None:
        assert self._result is not None
        self._result = msgspec.structs.replace(
            self._result, steps=self._steps, seconds=round(now - self._began, 3), ended_by=why
        )
        self.state, self._until = ProfileState.WRITING, math.inf
        self._outbox.to_worker(StopProfile())

    @receives(ProfileWritten)
    def on_written(self, event: ProfileWritten, now: float) -> None:
        """Note the profile's files, and answer the requests to stop it, which waited for them."""
        assert self._result is not None
        self._result = msgspec.structs.replace(self._result, files=event.files, nbytes=event.nbytes)
        self._error = event.error
        self.state, self._order = ProfileState.IDLE, None
        text = f"{len(event.files)} files, {event.nbytes} bytes, ended by {self._result.ended_by}"
        log.info("profile of %d steps in %s: %s", self._result.steps, self._result.folder, event.error or text)
        self._answer_all(self._ended())

    def _ended(self) -> ProfileResult | RefusedAnswer:
        """Return the result of the last profile: a refusal with 409 if there was none, 503 if files are missing."""
        if self._result is None:
            return RefusedAnswer(409, "no profile has run; POST /start_profile starts one")
        return RefusedAnswer(503, self._error) if self._error else msgspec.structs.replace(self._result)

    def _answer_all(self, answer: ProfileResult | RefusedAnswer) -> None:
        for question in self._waiting:
            self._outbox.reply(question, msgspec.structs.replace(answer))
        self._waiting = []

    @property
    def _running(self) -> str:
        return "" if self._order is None else self._order.name
