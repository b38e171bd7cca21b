"""``python -P -m tools.step_overhead``: what everything but the model costs, for each step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pdserve.benchmark.command import exit_code, wide_console
from pdserve.benchmark.errors import BenchError, BenchOptionsError
from pdserve.runtime.web.ports import free_ports
from pdserve.server.options import ServerOptions

from ..servers.process_cpu import cpu_seconds
from ..servers.raw_streams import RawStreams, StreamCost, request_bytes
from .fake_instance import FakeInstance, fake_instance
from .fake_worker import TOKEN_IDS, StepRecord

PROMPT_TOKENS = 16
WARM_UP_TOKENS = 32
PROCESSES = ("tokenizer", "scheduler", "detokenizer", "http", "worker", "supervisor")
MICRO, MILLI = 1e6, 1e3
PATHS = {"generate": "/generate", "completions": "/v1/completions"}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """What to measure.

    Parameters
    ----------
    batch
        How many requests decode at once. Several values: one measurement for each pair of batch and step-ms.
    step_ms
        CPU time that a step takes in the fake worker, in milliseconds.
    seconds
        How long requests are sent; those under way then still finish.
    tokens
        Output tokens of a request.
    stream_interval
        The server's --stream-interval.
    transport
        How the batch comes: separate sends each prompt as a request of its own, batched all of them as one.
    endpoint
        generate repeats the whole answer in each event, completions sends what is new.
    """

    batch: list[int] = field(default_factory=lambda: [8, 256])
    step_ms: list[float] = field(default_factory=lambda: [0.0, 5.0])
    seconds: float = 5.0
    tokens: int = 400
    stream_interval: int = 1
    transport: Literal["separate", "batched"] = "separate"
    endpoint: Literal["generate", "completions"] = "generate"

    def check(self) -> None:
        """Raise ``BenchOptionsError`` if a number is too small."""
        if not self.batch or min(*self.batch, self.tokens - 1, self.stream_interval) < 1:
            raise BenchOptionsError("--batch and --stream-interval must be 1 or more, --tokens 2 or more")
        if not self.step_ms or min(*self.step_ms, self.seconds) < 0:
            raise BenchOptionsError("--step-ms and --seconds must be 0 or more")


class Spread(NamedTuple):
    """Mean and percentiles of some times, in seconds."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(values: Floats) -> Spread:
        """Return the mean, the median and the 99th percentile of ``values``, which must not be empty."""
        return Spread(float(values.mean()), *(float(np.percentile(values, q)) for q in (50, 99)))


class Overhead(NamedTuple):
    """One measurement; times in seconds.

    ``steps`` are those that count: they decode the whole batch and nothing else, as does the next one. ``cpu``: by
    process, for each step of a whole batch (``sampled`` tokens / ``batch`` of them), prompts and requests included.
    """

    batch: int
    step_ms: float
    steps: int
    period: Spread
    added: Spread
    cpu: dict[str, float]
    client: StreamCost
    sampled: int

    @property
    def full_steps(self) -> float:
        """Number of steps of the whole batch that would have given all tokens."""
        return self.sampled / self.batch


def summarize(
    record: StepRecord, batch: int, step_ms: float, cpu: dict[str, float], client: StreamCost
) -> Overhead | None:
    """Return the figures of one measurement; None if no two consecutive steps decoded the whole batch.

    ``cpu``: CPU seconds of each process over the whole measurement. ``client``: what the load generator took.
    """
    starts, busy = np.frombuffer(record.starts), np.frombuffer(record.busy)
    whole = busy > 0
    counts = np.flatnonzero(whole[:-1] & whole[1:])
    if not len(counts):
        return None
    period = np.diff(starts)[counts]
    full_steps = record.sampled / batch
    costs = {**cpu, "worker": cpu["worker"] - float(busy.sum()), "client": client.cpu_seconds}
    return Overhead(
        batch=batch,
        step_ms=step_ms,
        steps=len(counts),
        period=Spread.of(period),
        added=Spread.of(period - busy[counts]),
        cpu={name: seconds / full_steps for name, seconds in costs.items()},
        client=client,
        sampled=record.sampled,
    )


def make_requests(options: OverheadOptions, batch: int, tokens: int, seed: int) -> Iterator[bytes]:
    """Yield, without end, HTTP requests for ``tokens`` output tokens, with random prompts, so that none is cached.

    A request has one prompt, or ``batch`` prompts if the transport is "batched".
    """
    rng = np.random.default_rng(seed)
    shape = (batch, PROMPT_TOKENS) if options.transport == "batched" else (PROMPT_TOKENS,)
    path = PATHS[options.endpoint]
    while True:
        prompt = rng.integers(*TOKEN_IDS, size=shape).tolist()
        body: dict[str, object]
        if options.endpoint == "generate":
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        else:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        yield request_bytes(path, body)


def measure(options: OverheadOptions, instance: FakeInstance, batch: int, step_ms: float) -> Overhead:
    """Keep ``batch`` requests running on the instance for the options' ``seconds``, and return what a step costs.

    ``step_ms``: CPU time that the fake worker takes for a step. Raises ``BenchError``.
    """
    at_once = 1 if options.transport == "batched" else batch
    instance.occupy(batch, 0.0)
    RawStreams(instance.port, make_requests(options, batch, WARM_UP_TOKENS, 0), at_once).run(0.0)
    instance.occupy(batch, step_ms / MILLI)
    before = {name: cpu_seconds(instance.pids[name]) for name in PROCESSES}
    client = RawStreams(instance.port, make_requests(options, batch, options.tokens, 1), at_once).run(options.seconds)
    cpu = {name: cpu_seconds(instance.pids[name]) - before[name] for name in PROCESSES}
    overhead = summarize(instance.record(), batch, step_ms, cpu, client)
    if overhead is None:
        raise BenchError(f"no two steps in a row decoded {batch} requests; try more --tokens")
    return overhead


def run(options: OverheadOptions, console: Console) -> None:
    """Measure every pair of batch and step time on one instance, and print the tables; raises ``BenchError``."""
    [port] = free_ports(1)
    server = ServerOptions(
        port=port,
        max_running_requests=max(options.batch),
        stream_interval=options.stream_interval,
        log_level="warning",
    )
    with fake_instance(server) as instance:
        overheads = [measure(options, instance, b, ms) for b in options.batch for ms in options.step_ms]
    how = f"{options.endpoint}, {options.transport}, stream interval {options.stream_interval}"
    console.print(time_table(overheads, how))
    console.print(cpu_table(overheads))


def time_table(overheads: list[Overhead], how: str) -> Table:
    """Return a table of the wall time per step. ``how``: the options, for its title."""
    table = Table(title=f"wall time a step ({how})", title_justify="left")
    for name in ("batch", "step ms", "steps", "period ms", "added ms", "P50", "P99", "reads a step"):
        table.add_column(name, justify="right")
    for o in overheads:
        table.add_row(
            str(o.batch),
            f"{o.step_ms:g}",
            f"{o.steps:,}",
            f"{o.period.mean * MILLI:.3f}",
            *(f"{value * MILLI:.3f}" for value in o.added),
            f"{o.client.reads / o.full_steps:,.1f}",
        )
    return table


def cpu_table(overheads: list[Overhead]) -> Table:
    """Return a table of each process's CPU time per step, in µs."""
    table = Table(title="CPU time a step of the whole batch, µs (worker: less the step itself)", title_justify="left")
    for name in ("batch", "step ms", *PROCESSES, "client"):
        table.add_column(name, justify="right")
    for o in overheads:
        cells = (f"{o.cpu[name] * MICRO:,.0f}" for name in (*PROCESSES, "client"))
        table.add_row(str(o.batch), f"{o.step_ms:g}", *cells)
    return table


app = App(
    name="python -P -m tools.step_overhead",
    help=(
        "Measure what everything but the model costs.\n\n"
        "A real instance is started with a fake worker process: a step takes --step-ms of one thread's CPU time "
        "and gives ids that mean nothing. Clients stream answers from it, --batch at a time, and discard them. "
        "It prints for each batch and step time:\n\n"
        "period: from one step's start in the worker to the next one's, over steps that decode the batch and nothing "
        "else (others are slowed down, so that requests gather). added: period less the step's CPU time (mean, P50, "
        "P99): what it waits for messages, for the scheduler, and for cores that others use. reads: of the clients' "
        "sockets; fewer than the batch if tokens share an event, by --stream-interval or because HTTP lags. "
        "CPU: what each process took for a step, from /proc, with "
        "the requests' own cost divided among their steps."
    ),
    version_flags=[],
    default_parameter=Parameter(negative=(), consume_multiple=True),
)
DEFAULTS = OverheadOptions()


@app.default
def step_overhead(*, options: Annotated[OverheadOptions, Parameter(name="*")] = DEFAULTS) -> int:
    """Measure what a step costs besides the model, and print tables. Return the exit code."""

    def measure() -> None:
        options.check()
        run(options, wide_console())

    return exit_code("step_overhead", measure)


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
