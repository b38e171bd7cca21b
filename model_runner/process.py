"""The model worker process: owns the device, runs the scheduler's steps, moves KV pages.

Life: channels open → model loads (``start_model.py``) → warm-up → steps timed → ``WorkerReady`` → steps and their
results, in the order they come, until the process is ended. With nothing to do it commits KV memory ahead, trims its
heap and then sleeps in its channel. A step's result is sent as soon as it is known (``step_queue.py``). Transfers run
in the engine's own thread, which reports through a channel end of its own. Messages about KV that others send come by
another channel, and wait for no step.

With several tensor-parallel ranks this is the first. The others run ``rank_process.py``. This rank sends them each
step; it alone talks to the scheduler.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ..mem_cache.kv_pages.region import RegionError
from ..messages.channel import Receiver, Sender, UndeclaredMessage
from ..messages.grammar import ForgetGrammar, PrepareGrammar
from ..messages.kv_debug import HashPages
from ..messages.memory import MemoryCommand, MemoryUse, TrimPool, Unreleasable
from ..messages.profiling import StartProfile, StopProfile
from ..messages.routes import ToWorker
from ..messages.tiers import TierCommand
from ..messages.worker import (
    ForwardStep,
    MachineUse,
    MeasuredStep,
    SendPages,
    StepResult,
    WorkerCommand,
    WorkerReady,
)
from ..model_files.errors import ModelError
from ..runtime.child import ChildContext, start_child
from ..runtime.cpu_list import ThreadPlacementError
from ..runtime.malloc import trim
from .device.compile_watch import CompileWatch
from .device.placement import ThreadPlacement, floating
from .grammar.preparation import GrammarPreparation
from .idle_work import IdleWork
from .kv.prefault import PoolPrefault, highest_slot
from .options import WorkerOptions
from .page_mover import NoPageMover, PageMover
from .start_model import RankChannels, freeze, open_channels, start_model
from .tiers.no_tiers import NoWorkerTiers

if TYPE_CHECKING:
    from .engines.loaded import LoadedModel
    from .kv.pool_hasher import NoPoolHasher, PoolHasher
    from .memory_saver import WorkerMemorySaver
    from .profiler import Profiler
    from .steps.step_queue import StepQueue
    from .tiers.worker_tiers import WorkerTiers

log = logging.getLogger(__name__)
OPTIONS = WorkerOptions
SWITCH_SECONDS = 0.0005
"""Python's thread switch interval beside a GPU.

Each look at the command channel releases the interpreter. At the default of 5 ms, a busy transfer thread may keep it
for longer than a decode step takes.
"""


class Worker(NamedTuple):
    """A loaded worker."""

    model: LoadedModel
    steps: StepQueue
    mover: PageMover
    tiers: WorkerTiers | NoWorkerTiers
    hasher: PoolHasher | NoPoolHasher
    prefault: PoolPrefault
    idle: IdleWork
    occupation: WorkerMemorySaver
    machine: MachineUse
    load_seconds: dict[str, float]
    measured: list[MeasuredStep]
    memory: MemoryUse
    unreleasable: list[Unreleasable]
    compiles: CompileWatch
    grammars: GrammarPreparation
    profiler: Profiler


def main() -> NoReturn:
    """Run the worker process of an instance without hand-overs, which moves no pages, until it is ended."""
    run(start_child(sys.argv, OPTIONS), lambda model: NoPageMover())


def run(ctx: ChildContext[WorkerOptions], start_mover: Callable[[LoadedModel], PageMover]) -> NoReturn:
    """Run the worker process: load the model, report readiness, then serve the scheduler's messages until it is ended.

    ``start_mover`` starts the engine that moves pages to and from other instances. Exits with a message if loading
    fails.
    """
    # The first socket starts ZMQ's I/O thread, which must not inherit the compute threads' cores.
    receiver: Receiver[WorkerCommand] = Receiver(ctx.zmq_ctx, ctx.address("worker"), ToWorker)
    events = Sender(ctx.zmq_ctx, ctx.address("worker_events"))
    channels = open_channels(ctx)
    try:
        worker = load(ctx, channels, start_mover)
    except (ModelError, ThreadPlacementError, RegionError) as e:
        sys.exit(f"model worker: {e}")
    worker.compiles.begin(worker.model.device.kind)
    events.send(_ready_message(worker))
    ctx.report_ready(worker.load_seconds)
    while True:
        serve_frame(receiver, events, worker)


def load(
    ctx: ChildContext[WorkerOptions], channels: RankChannels, start_mover: Callable[[LoadedModel], PageMover]
) -> Worker:
    """Load and warm up the model, capture graphs, time some steps, and return all parts of the worker.

    ``channels``: to the other tensor-parallel ranks. Raises ``ModelError``, ``ThreadPlacementError`` or
    ``RegionError``.
    """
    options = ctx.options
    started = start_model(ctx, channels)
    from .engines.memory_table import describe_weights, memory_use, table
    from .kv.pool_hasher import NoPoolHasher, PoolHasher
    from .memory_saver import WorkerMemorySaver, unreleasable
    from .profiler import Profiler, RankProfiler, profile_folder
    from .ranks.host_ranks import LeadRank
    from .ranks.other_ranks import NoOtherRanks
    from .steps.measure_steps import measure_steps
    from .steps.step_queue import StepQueue
    from .steps.warm_up import warm_up
    from .weights_cache.step_times import file_of, known_or_measured

    model, steps = started.model, started.steps
    with floating(started.placement):
        mover = start_mover(model)
    tiers = _start_tiers(ctx, model, started.placement)
    loaded = time.monotonic()
    is_beside = model.device.beside
    if is_beside:
        sys.setswitchinterval(SWITCH_SECONDS)
    warm_up(steps, options.max_running_requests, model.context_length, options.page_size, every_variant=is_beside)
    steps.capture_graphs()
    started.settle()
    freeze()
    # Behind the freeze, as the steps of requests will be.
    measured = known_or_measured(
        file_of(options, started.machine, model.fingerprint, model.context_length),
        lambda: measure_steps(
            steps, options.max_running_requests, model.context_length, options.page_size, rehearse=is_beside
        ),
    )
    seconds = {**started.seconds, "warm_up": time.monotonic() - loaded}
    prefault = PoolPrefault.of(model.pools.region, model.pools.layout)
    queue = StepQueue(steps, mover, ahead=1 if is_beside else 0)
    use = memory_use(model, tiers.num_pages * model.pools.layout.page_bytes)
    for line in table(use, model.pools.layout, model.context_length, describe_weights(model)):
        log.info("%s", line)
    others = started.ranks if isinstance(started.ranks, LeadRank) else NoOtherRanks()
    occupation = WorkerMemorySaver(model, steps, prefault, others)
    rank = RankProfiler(profile_folder(options, ctx.run_dir), 0, model.device.kind, steps)
    trim()
    return Worker(
        *(
            model,
            queue,
            mover,
            tiers,
            PoolHasher(model.pools, model.device) if options.kv_debug else NoPoolHasher(),
            prefault,
            IdleWork.of(prefault),
            occupation,
        ),
        *(started.machine, seconds, measured, use, unreleasable(model, options), CompileWatch()),
        grammars=GrammarPreparation(model.matchers, lambda: Sender(ctx.zmq_ctx, ctx.address("worker_events"))),
        profiler=Profiler(rank, queue, others),
    )


def serve_frame(receiver: Receiver[WorkerCommand], events: Sender, worker: Worker) -> None:
    """Wait for the scheduler's next frame and carry out its messages in order; send events and results.

    If the oldest open step ends first, send its result instead. If nothing comes in time, do what an idle
    worker does (``idle_work.py``). Malformed frames are only logged.
    """
    steps = worker.steps
    try:
        commands = _next_commands(receiver, worker)
    except UndeclaredMessage as e:
        log.error("%s", e)
        return
    if not commands and len(steps):
        events.send(_result(worker))
    elif commands:
        worker.idle.used()
    else:
        worker.idle.advance()
    for command in commands:
        if isinstance(command, ForwardStep):
            steps.launch(command)
            if steps.is_full:
                events.send(_result(worker))
            worker.prefault.used(highest_slot(command))
        elif isinstance(command, MemoryCommand):
            events.send(worker.occupation.obey(command))
        elif isinstance(command, TrimPool):
            events.send(worker.occupation.trim(command))
        elif isinstance(command, TierCommand):
            copied = worker.tiers.obey(command)
            if copied is not None:
                events.send(copied)
        elif isinstance(command, PrepareGrammar | ForgetGrammar):
            worker.grammars.obey(command)
        elif isinstance(command, HashPages):
            events.send(worker.hasher.obey(command))
        elif isinstance(command, StartProfile | StopProfile):
            events.send(worker.profiler.obey(command))
        elif isinstance(command, SendPages):
            steps.send(command)
        else:
            worker.mover.submit(command)


def _next_commands(receiver: Receiver[WorkerCommand], worker: Worker) -> list[WorkerCommand]:
    """Wait for the next frame, and return its messages; [] if a step ended first, or if nothing came in time."""
    steps = worker.steps
    if not len(steps):
        return receiver.recv(worker.idle.wait_ms)
    # Looks by turns, as waiting for an event does in the driver. Each look into the channel lets other threads run.
    while not (commands := receiver.recv(0)) and not steps.has_result:
        pass
    return commands


def _result(worker: Worker) -> StepResult:
    result = worker.steps.collect()
    result.compiled_kernels = worker.compiles.take()
    if result.bad_entries:
        log.error("step %d: entries %s gave logits that are not finite", result.step_id, result.bad_entries)
    return result


def _start_tiers(
    ctx: ChildContext[WorkerOptions], model: LoadedModel, placement: ThreadPlacement
) -> WorkerTiers | NoWorkerTiers:
    if not ctx.options.enable_hierarchical_cache:
        return NoWorkerTiers()
    from .tiers.worker_tiers import WorkerTiers

    kind, address = model.device.kind, ctx.address("worker_events")
    # Made here, used by the store's thread alone.
    with floating(placement):
        return WorkerTiers(ctx.options, model.pools, kind, lambda: Sender(ctx.zmq_ctx, address).send)


def _ready_message(worker: Worker) -> WorkerReady:
    model = worker.model
    return WorkerReady(
        host_pages=worker.tiers.num_pages,
        fingerprint=model.fingerprint,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        max_total_tokens=model.pools.max_total_tokens,
        max_window_tokens=model.pools.max_window_tokens,
        limit_tokens=model.pools.limit_tokens,
        layout=model.pools.layout,
        device=model.device.place,
        attention_backend=model.engine.attention_backend,
        weights_dtype=model.dtype,
        backend_metadata=worker.mover.metadata,
        load_seconds=worker.load_seconds,
        measured=worker.measured,
        step_weight_bytes=model.engine.step_weight_bytes,
        machine=worker.machine,
        memory=worker.memory,
        unreleasable=worker.unreleasable,
    )


if __name__ == "__main__":
    main()
