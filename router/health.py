"""Background health checks: one task per instance, GET /health every interval, four times as often while it is down.

A refused connection costs microseconds, so frequent checks of a dead instance are cheap. A restarted one is used again
within a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from http import HTTPStatus

import msgspec

from ..messages.decode import UndeclaredMessage, decode
from ..runtime.web.client.client import HttpClient
from ..runtime.web.client.errors import ClientError
from .errors import parse_error
from .fleet import Fleet
from .instance import HealthReport, HealthState, Instance, ReportedIdentity
from .options import RouterOptions

DOWN_FACTOR = 4
HANGS = "hangs"
"""Error code of an instance's ``/health`` if its processes do not answer each other."""
MAX_REPORT_BYTES = 64 << 10
SILENCES = 3
"""Consecutive checks without an answer after which an instance is taken out, if it answers no request either.

A single one may only mean that it is busy. Taking out the last instance of its kind turns all clients away. A refused
connection or a 503 counts at once.
"""


def seconds_to_notice(options: RouterOptions) -> float:
    """Return how long an instance may be silent before its health checks take it out, in seconds."""
    return SILENCES * (options.health_check_interval + options.health_check_timeout)


class HealthMonitor:
    """Checker that keeps the states of a fleet's instances true.

    Instances may come and go. ``watch`` begins the checks of one, and ``unwatch`` ends them.
    """

    def __init__(self, fleet: Fleet, client: HttpClient, options: RouterOptions) -> None:
        self._fleet = fleet
        self._client = client
        self._interval = options.health_check_interval
        self._timeout = options.health_check_timeout
        self._hang_timeout = options.hang_timeout
        self._group: asyncio.TaskGroup | None = None
        self._checks: dict[Instance, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Check every instance at intervals, and record its state in the fleet. Ends only when it is cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for instance in self._fleet.instances:
                self.watch(instance)
            await asyncio.Event().wait()  # a fleet may be empty, and get instances later

    def watch(self, instance: Instance) -> None:
        """Begin to check ``instance``, which is in the fleet. Before ``run`` it does nothing: that begins with all."""
        if self._group is not None:
            self._checks[instance] = self._group.create_task(self._watch(instance))

    def unwatch(self, instance: Instance) -> None:
        """Stop to check ``instance``. A check that is under way is not completed."""
        if (checks := self._checks.pop(instance, None)) is not None:
            checks.cancel()

    async def _watch(self, instance: Instance) -> None:
        silences = 0
        hung_since: float | None = None
        while True:
            # Cleared before the check: a failure reported during it asks for another.
            instance.check_now.clear()
            is_again = instance.asked_again
            asked_at = time.monotonic()
            try:
                problem, hangs = await self._check(instance)
                silences = 0
            except TimeoutError:
                if instance.heard_at > asked_at:
                    silences = 0
                    continue
                silences += 1
                if silences < SILENCES and instance.state is HealthState.HEALTHY:
                    continue
                problem = f"no answer to /health within {self._timeout:g} s, {silences} times"
                hangs = True
                instance.answers_questions = False
            hung_since = (hung_since or asked_at) if hangs else None
            if hung_since and time.monotonic() - hung_since >= self._hang_timeout:
                for leg in list(instance.legs):
                    leg.give_up(hung_since, problem or "")
            state = HealthState.UNHEALTHY if problem else HealthState.HEALTHY
            self._fleet.set_state(instance, state, problem or "answers /health")
            if is_again:
                self._fleet.answered_again(instance)
            delay = self._interval / DOWN_FACTOR if problem else self._interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await instance.check_now.wait()

    async def _check(self, instance: Instance) -> tuple[str | None, bool]:
        """Ask the instance's ``/health`` once, and take in what it reports.

        Return what is wrong with the instance (None: nothing), and whether it hangs, so that its requests won't end.
        Raises ``TimeoutError`` if it does not answer in time.
        """
        answers = instance.answers
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._client.fetch("GET", instance.url, "/health")
        except ClientError as exc:
            instance.answers_questions = False
            return f"can't be reached ({exc})", False
        error = {} if answer.status == HTTPStatus.OK else parse_error(answer.body) or {}
        hangs = error.get("code") == HANGS
        instance.answers_questions = not hangs and answer.status in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE)
        if not hangs:
            instance.alive_at = time.monotonic()  # also while it drains: it still finishes its requests
        if answer.status == HTTPStatus.OK:
            role = instance.role
            problem = instance.learn(_read_report(answer.body), answers)
            if instance.role is not role:
                self._fleet.wake()
            if same := self._fleet.same_as(instance):
                problem = f"the same instance as {same.url}"
            return problem, False
        reason = f": {error['message']}" if error else ""
        return f"/health says {answer.status}{reason}", hangs


def _read_report(body: bytes) -> HealthReport:
    """Parse the body of an instance's ``/health``.

    If only the pace in it is invalid or missing, the report has none. The report is empty if the rest is invalid, too.
    """
    try:
        return decode(_REPORT, body, MAX_REPORT_BYTES)
    except UndeclaredMessage:
        pass
    try:
        return HealthReport(**msgspec.structs.asdict(decode(_IDENTITY, body, MAX_REPORT_BYTES)))
    except UndeclaredMessage:
        return HealthReport()


_REPORT = msgspec.json.Decoder(HealthReport)
_IDENTITY = msgspec.json.Decoder(ReportedIdentity)
