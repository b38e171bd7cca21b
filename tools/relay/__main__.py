"""``python -P -m tools.relay``: what a router costs for each streamed token, and what it delays."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pdserve.benchmark.command import exit_code, wide_console
from pdserve.benchmark.errors import BenchError, BenchOptionsError, ServerError
from pdserve.runtime.rlimits import allow_many_connections

from ..servers.process_cpu import cpu_seconds_now
from .client import RelayClient, Seen
from .routers import OURS, running
from .token_source import TokenSource, token_source

SETTLE_SECONDS = 0.5
MICRO, MILLI = 1e6, 1e3
DIRECT = "direct"
FIRST_RATE, STEP, LADDER = 8_000.0, 1.2, 20
"""Events per second at the start, factor of each step, and maximum number of steps."""
TRIES = 3
"""Number of tries of a step that fails, because a neighbour may have taken the core."""
BUSY = 0.95
"""Share of a core above which it counts as full, and share of events below which some count as missing."""


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """What to measure.

    Parameters
    ----------
    streams
        How many answers are streamed at once. Several values: one measurement for each.
    interval_ms
        Time between two tokens of a stream, in milliseconds.
    seconds
        Length of each measurement.
    command
        Another router to measure in the same run, as often as you like: NAME=COMMAND, in which {port} is where it must
        listen and {worker} the instance's URL.
    ladder_seconds
        Length of each step on the way to the most events a second, with the most streams; 0 leaves that out.
    """

    streams: list[int] = field(default_factory=lambda: [1, 64, 512])
    interval_ms: float = 20.0
    seconds: float = 5.0
    command: list[str] = field(default_factory=list)
    ladder_seconds: float = 2.0

    def check(self) -> None:
        """Raise ``BenchOptionsError`` if an option has a value that can't work."""
        if not self.streams or min(self.streams) < 1 or min(self.interval_ms, self.seconds) <= 0:
            raise BenchOptionsError("--streams must be 1 or more, --interval-ms and --seconds above 0")
        for command in self.command:
            name, equals, words = command.partition("=")
            if not (name and equals and words.strip()):
                raise BenchOptionsError(f"--command {command}: write it like NAME=PROGRAM --port {{port}} {{worker}}")

    def routers(self) -> dict[str, list[str]]:
        """Return the words of each router's command, by the router's name.

        pdserve's own router has no words: it is started differently.
        """
        return {OURS: [], **{name: shlex.split(words) for name, _, words in (c.partition("=") for c in self.command)}}


class Relayed(NamedTuple):
    """One measurement. ``cpu``: seconds of the router an event, beyond what it takes when idle. ``ttft`` and
    ``direct_ttft``: of requests through the router and past it, in turns beside the streams."""

    router: str
    streams: int
    cpu: float
    seen: Seen
    ttft: list[float]
    direct_ttft: list[float]


class Most(NamedTuple):
    """The maximum rate of events that a router relayed, each before the next one of its stream."""

    router: str
    rate: float
    share: float
    """Share of its core, which neighbours may use, too."""
    limited: bool
    """Whether the load generator could not send more."""
    request_cpu: float
    """CPU seconds for a request with one token."""


class Bench:
    """Measures one router, or, without a ``pid``, the source itself."""

    def __init__(self, name: str, port: int, pid: int | None, source: TokenSource) -> None:
        self._name = name
        self._port = port
        self._pid = pid
        self._source = source

    def _cpu(self) -> float:
        return cpu_seconds_now(self._pid) if self._pid else 0.0

    def _generator_cpu(self) -> float:
        return time.process_time() + cpu_seconds_now(self._source.pid)

    def idle(self, seconds: float) -> float:
        """Return the CPU seconds per second that the router takes without any request, measured over ``seconds``."""
        begin, start = self._cpu(), time.perf_counter()
        time.sleep(seconds)
        return (self._cpu() - begin) / (time.perf_counter() - start)

    def relay(self, streams: int, seconds: float, idle: float) -> Relayed:
        """Stream ``streams`` answers for ``seconds`` to measure CPU time per event and delays, then as long for TTFT.

        ``idle``: CPU seconds per second to subtract, as ``idle()`` returns. Raises ``ServerError``.
        """
        with contextlib.closing(RelayClient(self._port)) as client, client.streaming(streams):
            client.watch(SETTLE_SECONDS)
            begin = self._cpu()
            seen = client.watch(seconds)
            cpu = (self._cpu() - begin - idle * seen.seconds) / len(seen.delays)
            probes = client.watch(seconds, (self._port, self._source.port)).probes
        if not all(probes.values()):
            raise ServerError(f"no first token within {seconds:g} s")
        return Relayed(self._name, streams, cpu, seen, probes[self._port], probes[self._source.port])

    def request(self, seconds: float, idle: float) -> float:
        """Return the router's CPU seconds for a request of one token on a new connection, measured over ``seconds``.

        ``idle``: CPU seconds per second to subtract.
        """
        with contextlib.closing(RelayClient(self._port)) as client:
            begin = self._cpu()
            seen = client.watch(seconds, [self._port])
            return (self._cpu() - begin - idle * seen.seconds) / len(seen.probes[self._port])

    def climb(self, streams: int, seconds: float, request_cpu: float) -> Most:
        """Raise the rate of events step by step, and return the highest one that the router keeps up with.

        Each step takes ``seconds``, with up to ``TRIES`` tries. ``request_cpu`` is only passed on in the result.
        """
        best = Most(self._name, 0.0, 0.0, True, request_cpu)
        with contextlib.closing(RelayClient(self._port)) as client, client.streaming(streams):
            for step in range(LADDER):
                interval = streams / (FIRST_RATE * STEP**step)
                self._source.pace(interval)
                for _ in range(TRIES):
                    client.watch(SETTLE_SECONDS)
                    begin, ours = self._cpu(), self._generator_cpu()
                    seen = client.watch(seconds)
                    share = (self._cpu() - begin) / seen.seconds
                    ours = (self._generator_cpu() - ours) / seen.seconds
                    if keeps_up(seen, streams, interval):
                        break
                else:
                    return best._replace(limited=share < BUSY < ours)
                best = best._replace(rate=len(seen.delays) / seen.seconds, share=share)
        return best


def keeps_up(seen: Seen, streams: int, interval: float) -> bool:
    """Return whether nearly all expected events came, with a P99 delay of at most ``interval``, in seconds.

    ``interval``: time between two events of a stream.
    """
    came = len(seen.delays) / seen.seconds
    return came * interval >= BUSY * streams and bool(np.percentile(seen.delays, 99) <= interval)


def run(options: RelayOptions, console: Console) -> None:
    """Measure every router between one token source and a client, and print the tables.

    Raises ``BenchError``, for a router that failed only after all others are measured.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("the router needs a core of its own: two are needed")
    os.sched_setaffinity(0, set(cores[1:]))
    measured, most, failed = list[Relayed](), list[Most](), list[BenchError]()
    pace = options.interval_ms / MILLI
    with token_source() as source:
        direct = Bench(DIRECT, source.port, None, source)
        source.pace(pace)
        measured += [direct.relay(streams, options.seconds, 0.0) for streams in options.streams]
        for name, command in options.routers().items():
            source.pace(pace)
            try:
                with running(name, command, f"http://127.0.0.1:{source.port}", cores[0]) as (port, pid):
                    bench = Bench(name, port, pid, source)
                    idle = bench.idle(options.seconds)
                    for streams in options.streams:
                        measured.append(bench.relay(streams, options.seconds, idle))
                    if options.ladder_seconds > 0:
                        request_cpu = bench.request(options.seconds, idle)
                        most.append(bench.climb(max(options.streams), options.ladder_seconds, request_cpu))
            except BenchError as e:
                # What was measured of it, and of the others, is worth printing.
                failed.append(BenchError(f"{name}: {e}"))
    console.print(relay_table(measured, options.interval_ms))
    if most:
        console.print(most_table(most, max(options.streams)))
    if failed:
        raise failed[0]


def relay_table(measured: list[Relayed], interval_ms: float) -> Table:
    """Return a table of CPU time per event, delays and TTFT for each router and number of streams."""
    table = Table(title=f"one token an event, every {interval_ms:g} ms of a stream", title_justify="left")
    columns = (
        "streams",
        "events/s",
        "CPU µs an event",
        "delay ms P50",
        "P99",
        "TTFT ms P50",
        "P99",
        "added P50",
        "P99",
    )
    table.add_column("router")
    for name in columns:
        table.add_column(name, justify="right")
    for m in measured:
        cpu, added = "", ["", ""]
        delay, ttft, direct = (MILLI * np.percentile(v, (50, 99)) for v in (m.seen.delays, m.ttft, m.direct_ttft))
        if m.router != DIRECT:
            cpu, added = f"{m.cpu * MICRO:.1f}", [f"{value:.2f}" for value in ttft - direct]
        rate = f"{len(m.seen.delays) / m.seen.seconds:,.0f}"
        table.add_row(m.router, str(m.streams), rate, cpu, *(f"{value:.2f}" for value in (*delay, *ttft)), *added)
    return table


def most_table(most: list[Most], streams: int) -> Table:
    """Return a table of each router's maximum rate of events, and its CPU time per request."""
    table = Table(title=f"one core, {streams} streams: most events a second", title_justify="left")
    table.add_column("router")
    for name in ("events/s", "of the core", "events a CPU second", "CPU µs a request"):
        table.add_column(name, justify="right")
    for m in most:
        rate = ("≥ " if m.limited else "") + f"{m.rate:,.0f}"
        per_cpu = f"{m.rate / m.share:,.0f}" if m.share else ""
        table.add_row(m.router, rate, f"{m.share:.0%}", per_cpu, f"{m.request_cpu * MICRO:,.0f}")
    return table


app = App(
    name="python -P -m tools.relay",
    help=(
        "Measure what a router costs.\n\n"
        "A source that costs next to nothing stands for an instance: it gives all streams a token at the same moment, "
        "each as an event of its own. `pdserve router`, and any other that you name, stands before it on a core of its "
        "own; raw sockets read. It prints for each number of streams: the router's CPU time an event, beyond what "
        "it takes when idle; how long after its sending an event arrives; the time to first token of requests for one "
        "token, sent beside the streams over new connections, and how much longer that is than of requests sent past "
        "the router in turn with them. Then the most events a second, each out before its stream's next one comes, "
        "and the share of the core that took; and the CPU time of such a request."
    ),
    version_flags=[],
    default_parameter=Parameter(negative=(), consume_multiple=True),
)
DEFAULTS = RelayOptions()


@app.default
def relay(*, options: Annotated[RelayOptions, Parameter(name="*")] = DEFAULTS) -> int:
    """Measure the routers' cost and delay per token, and print tables. Return the exit code."""

    def measure() -> None:
        options.check()
        allow_many_connections()
        run(options, wide_console())

    return exit_code("relay", measure)


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
