"""``python -m pdserve.benchmark.relay``: what a router costs for each streamed token, and what it delays."""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import orjson
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from ..runtime.open_files import allow_many_connections
from ..runtime.web.ports import free_ports
from .errors import BenchError, BenchOptionsError, ServerError
from .process_cpu import cpu_seconds_now
from .relay_client import RelayClient, Seen, ask
from .token_source import TokenSource, token_source

EXIT_FAILED, EXIT_USAGE = 1, 2
READY_SECONDS = 60.0
STOP_SECONDS = 10.0
SETTLE_SECONDS = 0.5
MICRO, MILLI = 1e6, 1e3
PIPE_COLUMNS = 150
OURS = "pdserve"
DIRECT = "direct"
FIRST_RATE, STEP, LADDER = 8_000.0, 1.2, 20
"""Events a second to begin with, by how much more there are at each step, and the most steps."""
BUSY = 0.95
"""Share of a core from which on it is taken for full."""


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
        """Raise ``BenchOptionsError`` when these options can't work."""
        if not self.streams or min(self.streams) < 1 or min(self.interval_ms, self.seconds) <= 0:
            raise BenchOptionsError("--streams must be 1 or more, --interval-ms and --seconds above 0")
        for command in self.command:
            name, equals, words = command.partition("=")
            if not (name and equals and words.strip()):
                raise BenchOptionsError(f"--command {command}: write it like NAME=PROGRAM --port {{port}} {{worker}}")

    def routers(self) -> dict[str, list[str]]:
        """The command of each router by its name; ours is started otherwise."""
        return {OURS: [], **{name: shlex.split(words) for name, _, words in (c.partition("=") for c in self.command)}}


class Relayed(NamedTuple):
    """One measurement. ``cpu``: seconds of the router an event, beyond what it takes when idle; ``request_cpu``: a
    request with one token."""

    router: str
    streams: int
    cpu: float
    request_cpu: float
    seen: Seen
    probes: list[float]


class Top(NamedTuple):
    """The most events a second that one core relayed with each out before its stream's next one; ``limited``: the load
    generator had no more to give."""

    router: str
    rate: float
    cpu: float
    limited: bool


@contextlib.contextmanager
def running(name: str, command: Sequence[str], worker: str, core: int) -> Iterator[tuple[int, int]]:
    """A router on ``core`` in front of ``worker``. Yields its port and pid once it serves; raises ``ServerError``."""
    [port] = free_ports(1)
    words = [word.replace("{port}", str(port)).replace("{worker}", worker) for word in command]
    options = None
    if name == OURS:
        words = [sys.executable, "-m", "pdserve.server.tethered", str(os.getpid())]
        options = orjson.dumps(["router", "--worker", worker, f"--port={port}", "--log-level=warning"])
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # inherited
    try:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    finally:
        os.sched_setaffinity(0, mine)
    assert process.stdin is not None
    process.stdin.write(options or b"")
    process.stdin.close()
    try:
        wait_serving(name, process, port)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_serving(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    """Return when a request through the router is answered; raises ``ServerError``."""
    head, _, body = ask(1).partition(b"\r\n\r\n")
    path = head.split(b" ")[1].decode()
    deadline = time.monotonic() + READY_SECONDS
    last = "nothing"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"{name} ended with status {process.returncode} while starting")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == http.client.OK and b"data: " in content:
                return
            last = f"{answer.status}: {content[:200].decode(errors='replace')}"
        time.sleep(0.1)
    raise ServerError(f"{name} does not serve after {READY_SECONDS:.0f} s; it said {last}")


def measure(name: str, port: int, pid: int | None, streams: int, seconds: float) -> Relayed:
    """Stream through ``port``, first alone for the CPU time, then with probes for the time to first token."""

    def used(until: float) -> float:
        return cpu_seconds_now(pid) - until if pid else 0.0

    client = RelayClient(port)
    with contextlib.closing(client):
        begin, start = used(0.0), time.perf_counter()
        time.sleep(seconds / 2)
        idle = used(begin) / (time.perf_counter() - start)
        with client.streaming(streams):
            client.watch(SETTLE_SECONDS)
            begin = used(0.0)
            seen = client.watch(seconds)
            cpu = (used(begin) - idle * seen.seconds) / len(seen.delays)
            begin = used(0.0)
            probed = client.watch(seconds, probe=True)
            rest = used(begin) - idle * probed.seconds - cpu * len(probed.delays)
    if not probed.probes:
        raise ServerError(f"{name}: no first token within {seconds:g} s")
    return Relayed(name, streams, cpu, rest / len(probed.probes), seen, probed.probes)


def climb(name: str, port: int, pid: int, source: TokenSource, streams: int, seconds: float) -> Top:
    """Ask for more and more events a second, until the router is no longer done with one when the next one comes."""
    best = Top(name, 0.0, 0.0, True)
    client = RelayClient(port)
    with contextlib.closing(client), client.streaming(streams):
        for step in range(LADDER):
            interval = streams / (FIRST_RATE * STEP**step)
            source.pace(interval)
            client.watch(SETTLE_SECONDS)
            begin, ours = cpu_seconds_now(pid), time.process_time() + cpu_seconds_now(source.pid)
            seen = client.watch(seconds)
            rate = len(seen.delays) / seen.seconds
            cpu = (cpu_seconds_now(pid) - begin) / len(seen.delays)
            ours = (time.process_time() + cpu_seconds_now(source.pid) - ours) / seen.seconds
            if rate * interval < BUSY * streams or np.percentile(seen.delays, 99) > interval:
                limited = cpu * rate < BUSY and ours > BUSY
                return best._replace(limited=limited)
            best = Top(name, rate, cpu, True)
    return best


def run(options: RelayOptions, console: Console) -> None:
    """Measure every router in front of one source; raises ``BenchError``."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("the router needs a core of its own: two are needed")
    os.sched_setaffinity(0, set(cores[1:]))
    measured, tops = list[Relayed](), list[Top]()
    with token_source() as source:
        worker = f"http://127.0.0.1:{source.port}"
        pace = options.interval_ms / MILLI
        source.pace(pace)
        for streams in options.streams:
            measured.append(measure(DIRECT, source.port, None, streams, options.seconds))
        for name, command in options.routers().items():
            with running(name, command, worker, cores[0]) as (port, pid):
                for streams in options.streams:
                    measured.append(measure(name, port, pid, streams, options.seconds))
                if options.ladder_seconds > 0:
                    tops.append(climb(name, port, pid, source, max(options.streams), options.ladder_seconds))
                    source.pace(pace)
    console.print(relay_table(measured, options.interval_ms))
    if tops:
        console.print(top_table(tops, max(options.streams)))


def relay_table(measured: list[Relayed], interval_ms: float) -> Table:
    """Cost and delay, each beside the same without a router."""
    table = Table(title=f"one token an event, every {interval_ms:g} ms of a stream; added: beyond {DIRECT}")
    table.title_justify = "left"
    columns = ("events/s", "CPU µs an event", "CPU µs a request", "TTFT ms P50", "P99", "added P50", "P99")
    for name in ("router", "streams", *columns, "delay ms P50", "P99"):
        table.add_column(name, justify="left" if name == "router" else "right")
    direct = {m.streams: np.percentile(m.probes, (50, 99)) for m in measured if m.router == DIRECT}
    for m in measured:
        ttft = np.percentile(m.probes, (50, 99))
        with_router = m.router != DIRECT
        added = [f"{(a - b) * MILLI:.2f}" if with_router else "" for a, b in zip(ttft, direct[m.streams], strict=True)]
        cpu = [f"{m.cpu * MICRO:.1f}", f"{m.request_cpu * MICRO:,.0f}"] if with_router else ["", ""]
        delays = (f"{value * MILLI:.2f}" for value in np.percentile(m.seen.delays, (50, 99)))
        rate = f"{len(m.seen.delays) / m.seen.seconds:,.0f}"
        table.add_row(m.router, str(m.streams), rate, *cpu, *(f"{t * MILLI:.2f}" for t in ttft), *added, *delays)
    return table


def top_table(tops: list[Top], streams: int) -> Table:
    """The most."""
    table = Table(
        title=f"one core, {streams} streams: most events a second, each out before the stream's next one comes"
    )
    table.title_justify = "left"
    for name in ("router", "events/s", "CPU µs an event"):
        table.add_column(name, justify="left" if name == "router" else "right")
    for top in tops:
        table.add_row(top.router, ("≥ " if top.limited else "") + f"{top.rate:,.0f}", f"{top.cpu * MICRO:.1f}")
    return table


app = App(
    name="python -m pdserve.benchmark.relay",
    help=(
        "Measure what a router costs.\n\n"
        "A source that costs next to nothing stands for an instance: it gives all streams a token at the same moment, "
        "each as an event of its own. `pdserve router`, and any other that you name, stands before it on a core of its "
        "own; raw sockets read. Printed are, for each number of streams: the router's CPU time an event, beyond what "
        "it takes when idle, and for a request of one token; the time to first token of such requests, sent one at a "
        "time over new connections beside the streams, and how much longer that is than without a router; and how "
        "long after its sending an event arrives. Then the most events a second that one core relays."
    ),
    version_flags=[],
    default_parameter=Parameter(negative=(), consume_multiple=True),
)
DEFAULTS = RelayOptions()


@app.default
def relay(*, options: Annotated[RelayOptions, Parameter(name="*")] = DEFAULTS) -> int:
    """Measure and print."""
    try:
        options.check()
        allow_many_connections()
        # A pipe has no width; 80 columns would cut the tables.
        run(options, Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS))
    except BenchOptionsError as e:
        print(f"relay: {e}", file=sys.stderr)
        return EXIT_USAGE
    except BenchError as e:
        print(f"relay: {e}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
