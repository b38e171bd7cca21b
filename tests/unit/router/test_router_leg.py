"""One leg: which pieces of an answer go on to the client, and what its failures are called."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from support.jumping_loop import run_jumping

from pdserve.router import leg as leg_module
from pdserve.router.byte_budget import ByteBudget
from pdserve.router.errors import (
    AnswerTooLongError,
    InstanceAnsweredError,
    InstanceCrashedError,
    InstanceGoneError,
    InstanceRemovedError,
    InstanceSilentError,
    InstanceUnreachableError,
    RouterError,
    SlowClientError,
)
from pdserve.router.fleet import Fleet
from pdserve.router.held_events import SMALL_BYTES, HeldEvents
from pdserve.router.instance import HealthState
from pdserve.router.leg import Leg, LegLimits
from pdserve.router.options import RouterOptions
from pdserve.runtime.web.client.client import HttpClient
from pdserve.runtime.web.client.connection import Connection
from pdserve.runtime.web.client.errors import BadAnswer, CannotConnect, ClientError, ConnectionGone
from pdserve.runtime.web.client.response import ClientResponse
from pdserve.runtime.web.sse import OPENAI_STREAM

A, B = b'data: {"text": "a"}\n\n', b'data: {"text": "b"}\n\n'
CRLF = b": ping\r\n\r\n"


def held_events(limit: int = 1 << 30) -> HeldEvents:
    """Return the events of an answer, which may hold ``limit`` bytes of long ones."""
    return HeldEvents(ByteBudget(limit), "", OPENAI_STREAM.event_ends)


class Scripted(ClientResponse):
    """An answer with a body that comes in ``pieces``, one a read; an exception is raised."""

    def __init__(self, pieces: list[bytes | Exception], status: int = 200) -> None:
        super().__init__(Connection(), lambda: None, None)
        self.status = status
        self.pieces = iter(pieces)
        self.closed = False

    async def read(self) -> bytes:
        piece = next(self.pieces, b"")
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None:
        self.closed = True


class Client(HttpClient):
    def __init__(self, outcome: ClientResponse | Exception | None) -> None:
        super().__init__([], 1.0)
        self.outcome = outcome

    async def send(self, *args: object, silence: float | None = None, **kwargs: object) -> ClientResponse:
        assert silence == 7.0
        if self.outcome is None:
            await asyncio.Event().wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


def give_up(since: float, *, leaves: bool = False, body: list[bytes | Exception] | None = None) -> Exception:
    """Return the error of a leg that waits for its answer, or for more of it, as its instance hangs."""

    class Mute(Scripted):
        async def read(self) -> bytes:
            return await asyncio.Event().wait() or b""

    async def run() -> Exception:
        fleet = Fleet(RouterOptions(worker=["http://127.0.0.1:1"]))
        [instance] = fleet.instances

        async def ask() -> None:
            async with Leg(
                Client(None if body is None else Mute(body)), fleet, instance, LegLimits(60.0, 7.0, 60.0), held_events()
            ) as leg:
                await leg.open("/generate", b"{}", [], streams=True)
                await leg.next_events()

        task = asyncio.create_task(ask())
        await asyncio.sleep(0)
        [leg] = instance.legs
        leg.give_up(since, "no answer")
        if leaves:
            task.cancel()
        for _ in range(100):  # turns of the loop, not seconds: it needs a few
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
        assert instance.legs == set()
        assert instance.in_flight == 0
        return result

    return asyncio.run(run())


@pytest.mark.parametrize("body", [None, []])
def test_a_leg_of_an_instance_that_hangs_can_be_tried_elsewhere(body):
    error = give_up(time.monotonic() + 1, body=body)
    assert isinstance(error, InstanceGoneError)
    assert "hangs: no answer" in str(error)
    assert error.url == "http://127.0.0.1:1"


def test_a_leg_that_has_been_told_something_since_goes_on():
    assert isinstance(give_up(time.monotonic() - 1), asyncio.CancelledError)


def test_a_client_that_leaves_as_its_instance_hangs_has_left():
    assert isinstance(give_up(time.monotonic() + 1, leaves=True), asyncio.CancelledError)


def test_nothing_is_sent_to_an_instance_that_was_removed_since_it_was_chosen() -> None:
    async def run() -> None:
        fleet = Fleet(RouterOptions(worker=["http://127.0.0.1:1"]))
        [instance] = fleet.instances
        client = Client(ConnectionRefusedError("asked"))
        async with Leg(client, fleet, instance, LegLimits(5.0, 7.0, 60.0), held_events()) as leg:
            fleet.remove(instance)
            await leg.open("/generate", b"{}", [], streams=False)

    with pytest.raises(InstanceRemovedError, match="was removed from this router") as error:
        asyncio.run(run())
    assert error.value.url == "http://127.0.0.1:1"


class Opened:
    """What came of one leg: its ``events``, the ``error`` that ended it, and what the fleet heard."""

    def __init__(
        self,
        outcome: ClientResponse | Exception | None,
        first_byte: float = 5.0,
        read: Callable[[Leg], Awaitable[bytes]] = Leg.next_events,
        held: HeldEvents | None = None,
    ) -> None:
        self._read = read
        self.held = held or held_events()
        self.heard: list[float] = []
        """``heard_at`` of the instance when the answer had begun, and after each read."""
        self.fleet = Fleet(RouterOptions(worker=["http://127.0.0.1:1"]))
        [self.instance] = self.fleet.instances
        self.fleet.set_state(self.instance, HealthState.HEALTHY, "")
        self.events: list[bytes] = []
        self.error: RouterError | None = None
        asyncio.run(self._run(Client(outcome), LegLimits(first_byte, 7.0, 60.0)))
        assert (self.instance.in_flight, self.instance.requests) == (0, 1)
        if isinstance(outcome, Scripted):
            assert outcome.closed

    async def _run(self, client: Client, limits: LegLimits) -> None:
        try:
            async with Leg(client, self.fleet, self.instance, limits, self.held) as leg:
                assert self.instance.in_flight == 1
                await leg.open("/generate", b"{}", [], streams=True)
                self.heard.append(self.instance.heard_at)
                while events := await self._read(leg):
                    self.events.append(events)
                    self.heard.append(self.instance.heard_at)
        except RouterError as e:
            self.error = e


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        ([A, B], [A, B]),
        ([A + B], [A + B]),
        ([A + B[:5], B[5:]], [A, B]),
        ([A[:-1], A[-1:]], [A]),
        ([A[:-1], A[-1:] + B[:3], B[3:] + A], [A, B + A]),
        ([CRLF, CRLF[:-1], CRLF[-1:] + A[:4], A[4:]], [CRLF, CRLF, A]),
        ([CRLF[:-2], CRLF[-2:]], [CRLF]),
        ([A, b"data: x"], [A, b"data: x\n\n"]),
        ([bytes([byte]) for byte in A + CRLF + B], [A, CRLF, B]),
        ([], []),
    ],
)
def test_events_go_on_whole(pieces: list[bytes | Exception], events: list[bytes]) -> None:
    leg = Opened(Scripted(pieces))
    assert (leg.events, leg.error) == (events, None)
    assert leg.instance.state is HealthState.HEALTHY


LONG = b"data: " + b"x" * (3 * SMALL_BYTES) + b"\n\n"


async def read_in_parts(leg: Leg) -> bytes:
    """Read as the router does from an event that is cut."""
    return await leg.rest_of_event() or await leg.next_events()


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        ([A, LONG[:70000], LONG[70000:80000], LONG[80000:], B], [A, LONG[:70000], LONG[70000:80000], LONG[80000:], B]),
        ([LONG[:70000], LONG[70000:] + A + B[:3], B[3:]], [LONG[:70000], LONG[70000:], A, B]),
        ([LONG[:-1], LONG[-1:] + B[:3], B[3:]], [LONG[:-1], LONG[-1:], B]),
        ([LONG[:-1], b"\r", LONG[-1:] + A], [LONG[:-1], b"\r", LONG[-1:], A]),
        ([LONG[:-2], LONG[-2:-1], LONG[-1:]], [LONG[:-2], LONG[-2:-1], LONG[-1:]]),
        ([LONG[:-2], LONG[-2:] + LONG[:-2], LONG[-2:]], [LONG[:-2], LONG[-2:], LONG[:-2], LONG[-2:]]),
        ([LONG[:70000]], [LONG[:70000], b"\n\n"]),
        ([A + LONG[:70000], LONG[70000:]], [A, LONG]),  # all of it came before it could be passed on
        ([LONG], [LONG]),
    ],
)
def test_an_event_that_the_router_may_not_hold_goes_on_in_parts(
    pieces: list[bytes | Exception], events: list[bytes]
) -> None:
    budget = ByteBudget(0)
    leg = Opened(Scripted(pieces), read=read_in_parts, held=HeldEvents(budget, "", OPENAI_STREAM.event_ends))
    assert (leg.events, leg.error, budget.held) == (events, None, 0)


def test_an_event_counts_from_its_arrival_until_the_client_has_it() -> None:
    budget, counts = ByteBudget(len(LONG)), list[int]()

    async def read(leg: Leg) -> bytes:
        counts.append(budget.held)
        events = await read_in_parts(leg)
        counts.append(budget.held)
        return events

    held = HeldEvents(budget, "", OPENAI_STREAM.event_ends)
    leg = Opened(Scripted([A, LONG[:70000], LONG[70000:], A]), read=read, held=held)
    assert (leg.events, leg.error) == ([A, LONG, A], None)
    assert counts == [0, 0, 0, len(LONG), len(LONG), 0, 0, 0]


def test_an_api_key_may_hold_as_much_of_long_events_as_it_leaves_free() -> None:
    budget = ByteBudget(len(LONG))
    pieces: list[bytes | Exception] = [A, LONG[:70000], LONG[70000:140000], LONG[140000:], A]
    leg = Opened(Scripted(pieces), read=read_in_parts, held=HeldEvents(budget, "key", OPENAI_STREAM.event_ends))
    assert (leg.events, leg.error) == ([A, LONG[:140000], LONG[140000:], A], None)
    assert (budget.held, budget.of("key")) == (0, 0)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_half_of_a_long_event_counts_no_more_where_the_answer_breaks_off(limit: int) -> None:
    budget = ByteBudget(limit)
    held = HeldEvents(budget, "", OPENAI_STREAM.event_ends)
    leg = Opened(Scripted([A, LONG[:70000], ConnectionGone(False)]), read=read_in_parts, held=held)
    assert leg.events == [A, *([] if limit else [LONG[:70000]])]
    assert isinstance(leg.error, InstanceCrashedError)
    assert budget.held == 0


def test_an_event_that_goes_on_in_parts_has_a_limit_too() -> None:
    leg = Opened(Scripted([A, *[b"x" * (32 << 20)] * 3]), read=read_in_parts, held=held_events(0))
    assert [len(event) for event in leg.events] == [len(A), 32 << 20, 32 << 20]
    assert isinstance(leg.error, AnswerTooLongError)


def test_half_an_event_is_dropped_where_the_answer_breaks_off() -> None:
    leg = Opened(Scripted([A, B[:-1], ConnectionGone(False)]))
    assert leg.events == [A]
    assert isinstance(leg.error, InstanceGoneError)


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (CannotConnect("refused"), "can't be reached"),
        (ConnectionGone(True, OSError("reset")), "closed the connection before it answered"),
        (BadAnswer("not HTTP"), "does not answer as an HTTP server does"),
    ],
)
def test_a_failure_to_answer_is_reported_and_takes_the_instance_out(cause: ClientError, says: str) -> None:
    leg = Opened(cause)
    expected = InstanceUnreachableError if isinstance(cause, CannotConnect) else InstanceCrashedError
    assert type(leg.error) is expected
    assert leg.error.message == f"worker http://127.0.0.1:1 {says}"
    assert leg.instance.state is HealthState.UNKNOWN
    assert str(cause) in leg.instance.reason
    assert leg.instance.check_now.is_set()


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (None, "did not begin to answer within 0.01 s"),
        (Scripted([A, TimeoutError()]), "went silent in the middle of its answer within 7 s"),
    ],
)
def test_silence_is_reported_and_says_nothing_against_the_instance(outcome: ClientResponse | None, says: str) -> None:
    leg = Opened(outcome, first_byte=0.01 if outcome is None else 5.0)
    assert isinstance(leg.error, InstanceSilentError)
    assert leg.error.message == f"worker http://127.0.0.1:1 {says}"
    assert (leg.instance.state, leg.instance.failures) == (HealthState.HEALTHY, 0)


@pytest.mark.parametrize(
    ("pieces", "events", "seconds"),
    [
        # Every look at the clock is three seconds later than the one before.
        ([CRLF, A], [], 5),
        ([A, CRLF, CRLF, CRLF, A], [A, CRLF, CRLF], 7),
        ([A, CRLF, CRLF, B, CRLF, CRLF, A], [A, CRLF, CRLF, B, CRLF, CRLF, A], None),
    ],
)
def test_comments_keep_a_connection_alive_and_no_request(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes | Exception], events: list[bytes], seconds: int | None
) -> None:
    clock = itertools.count(0.0, 3.0)
    monkeypatch.setattr(leg_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    leg = Opened(Scripted(pieces))
    assert leg.events == events
    if seconds is None:
        assert leg.error is None
        return
    assert isinstance(leg.error, InstanceSilentError)
    assert leg.error.message.endswith(f"said nothing but that it is alive within {seconds} s")


def test_an_answer_that_is_no_success_is_an_error_with_its_headers() -> None:
    answer = Scripted([b'{"error": {"message"', b': "full"}}'], 429)
    answer.headers = [
        (b"content-type", b"text/x"),
        (b"retry-after", b"9"),
        (b"server", b"x"),
        (b"connection", b"close"),
    ]
    leg = Opened(answer)
    assert isinstance(leg.error, InstanceAnsweredError)
    assert (leg.error.status, leg.error.message, leg.error.headers) == (429, "full", [(b"retry-after", b"9")])
    assert leg.instance.state is HealthState.HEALTHY


class Slow(HttpClient):
    """Its answers begin after an hour."""

    def __init__(self) -> None:
        super().__init__([], 1.0)

    async def send(self, *args: object, **kwargs: object) -> ClientResponse:
        assert kwargs["at_most_once"]
        await asyncio.sleep(3600)
        return Scripted([b"{}"])


@pytest.mark.parametrize(
    ("streams", "alive", "ends_after"), [(False, True, 3600), (False, False, 600), (True, True, 5)]
)
def test_a_whole_answer_may_take_as_long_as_its_instance_is_alive(
    monkeypatch: pytest.MonkeyPatch, streams: bool, alive: bool, ends_after: int
) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(leg_module, "time", SimpleNamespace(monotonic=loop.time))
        fleet = Fleet(RouterOptions(worker=["http://127.0.0.1:1"]))
        [instance] = fleet.instances
        fleet.set_state(instance, HealthState.HEALTHY, "")

        async def check() -> None:
            while True:
                instance.alive_at = loop.time()
                await asyncio.sleep(1)

        checks = asyncio.create_task(check()) if alive else None
        begun_at, error = loop.time(), None
        try:
            async with Leg(Slow(), fleet, instance, LegLimits(5.0, 7.0, 600.0), held_events()) as leg:
                await leg.open("/generate", b"{}", [], streams=streams)
        except InstanceSilentError as e:
            error = e
        assert loop.time() - begun_at == pytest.approx(ends_after, abs=1)
        assert (error is None) == (ends_after == 3600)
        assert error is None or error.message.endswith(f"within {ends_after} s")
        assert (instance.state, instance.failures) == (HealthState.HEALTHY, 0)
        if checks is not None:
            checks.cancel()

    run_jumping(body())


def test_an_event_that_never_ends_is_not_collected_and_no_instance_is_blamed_for_it() -> None:
    leg = Opened(Scripted([A, *[b"x" * (32 << 20)] * 3]))
    assert leg.events == [A]
    assert isinstance(leg.error, AnswerTooLongError)
    assert (leg.instance.state, leg.instance.failures) == (HealthState.HEALTHY, 0)


async def read_long(leg: Leg) -> bytes:
    """Read a part of an answer that does not stream and is too long to hold."""
    part, _ = await leg.read_begin(0)
    return part


class Unread(Scripted):
    """An answer that was not read for ``seconds``, after which the router has not caught up."""

    def __init__(self, seconds: float, pieces: list[bytes | Exception]) -> None:
        super().__init__(pieces)
        self._longest_pause = seconds


@pytest.mark.parametrize(
    ("seconds", "end", "is_of_client"),
    [
        (leg_module.LONG_PAUSE_SECONDS, ConnectionGone(False, OSError("reset")), True),
        (0.5 * leg_module.LONG_PAUSE_SECONDS, ConnectionGone(False, OSError("reset")), False),
        (leg_module.LONG_PAUSE_SECONDS, BadAnswer("not HTTP"), False),
    ],
)
@pytest.mark.parametrize("by", [Leg.next_events, read_long])
def test_an_answer_that_ends_after_a_client_did_not_read_says_nothing_against_the_instance(
    by: Callable[[Leg], Awaitable[bytes]], seconds: float, end: ClientError, is_of_client: bool
) -> None:
    leg = Opened(Unread(seconds, [A, end]), read=by)
    assert leg.events == [A]
    assert type(leg.error) is (SlowClientError if is_of_client else InstanceCrashedError)
    assert leg.instance.state is (HealthState.HEALTHY if is_of_client else HealthState.UNKNOWN)
    assert leg.instance.failures == (0 if is_of_client else 1)
    assert leg.instance.check_now.is_set()
    if is_of_client:
        assert (leg.error.retryable, leg.error.blames_no_instance) == (False, True)


@pytest.mark.parametrize(
    ("by", "pieces"),
    [
        (Leg.next_events, []),
        (Leg.next_events, [A[:-1]]),
        (Leg.next_events, [CRLF]),
        (Leg.read, [A]),  # as of a prefill's answer, which no client gets
        (lambda leg: leg.read_all(), []),
    ],
)
def test_no_client_is_slow_before_anything_was_passed_on(
    by: Callable[[Leg], Awaitable[bytes]], pieces: list[bytes | Exception]
) -> None:
    lost = ConnectionGone(False, OSError("reset"))
    leg = Opened(Unread(leg_module.LONG_PAUSE_SECONDS, [*pieces, lost]), read=by)
    assert type(leg.error) is InstanceCrashedError
    assert leg.error.retryable
    assert leg.instance.failures == 1


@pytest.mark.parametrize("by", [Leg.next_events, Leg.read])
def test_a_leg_is_given_up_although_it_read_what_had_waited(by: Callable[[Leg], Awaitable[bytes]]) -> None:
    async def run(seconds: float) -> BaseException | None:
        fleet = Fleet(RouterOptions(worker=["http://127.0.0.1:1"]))
        [instance] = fleet.instances

        async def ask() -> None:
            async with Leg(
                Client(Unread(seconds, [A])), fleet, instance, LegLimits(60.0, 7.0, 60.0), held_events()
            ) as leg:
                await leg.open("/generate", b"{}", [], streams=True)
                hung_since = time.monotonic()
                await by(leg)
                leg.give_up(hung_since, "no answer")
                await asyncio.sleep(0)

        [result] = await asyncio.gather(asyncio.create_task(ask()), return_exceptions=True)
        return result

    assert isinstance(asyncio.run(run(leg_module.LONG_PAUSE_SECONDS)), InstanceCrashedError)
    assert asyncio.run(run(0.0)) is None


def test_keep_alives_that_waited_for_a_slow_client_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr(leg_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    leg = Opened(Unread(leg_module.LONG_PAUSE_SECONDS, [A, CRLF, CRLF]))
    assert leg.events == [A, CRLF, CRLF]
    assert leg.error is None


@pytest.mark.parametrize("by", [Leg.next_events, Leg.read])
def test_what_waited_for_a_slow_client_is_no_sign_of_life(by: Callable[[Leg], Awaitable[bytes]]) -> None:
    # The answer's head is one. It comes before anything that a client may be slow to read.
    begun = Opened(Unread(leg_module.LONG_PAUSE_SECONDS, []), read=by).heard
    assert len(set(begun)) == 1
    slow = Opened(Unread(leg_module.LONG_PAUSE_SECONDS, [A, B]), read=by).heard
    assert len(slow) == 3
    assert len(set(slow)) == 1
    assert len(set(Opened(Scripted([A, B]), read=by).heard)) == 3


def test_an_error_has_a_limit_and_no_instance_is_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leg_module, "MAX_WHOLE_BYTES", 10)

    async def read(pieces: list[bytes | Exception]) -> tuple[bytes, HealthState]:
        fleet = Fleet(RouterOptions(worker=["http://127.0.0.1:1"]))
        [instance] = fleet.instances
        fleet.set_state(instance, HealthState.HEALTHY, "")
        scripted = Scripted(pieces)
        try:
            async with Leg(Client(scripted), fleet, instance, LegLimits(5.0, 7.0, 60.0), held_events()) as leg:
                await leg.open("/generate", b"{}", [], streams=False)
                return await leg.read_all(), instance.state
        finally:
            assert scripted.closed
            assert instance.state is HealthState.HEALTHY

    assert asyncio.run(read([b"12345", b"67890"]))[0] == b"1234567890"
    with pytest.raises(AnswerTooLongError) as refused:
        asyncio.run(read([b"12345", b"67890", b"1"]))
    assert (refused.value.status, refused.value.retryable, refused.value.blames_no_instance) == (502, False, True)
    assert "more than 10 bytes" in refused.value.message
