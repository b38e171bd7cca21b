"""What every process that computes does before its first step: threads placed, the model loaded.

Torch is imported only for what needs it: GPUs, and torch engines on a CPU. OpenMP settles on its cores when it is
loaded, so that must come after ``confine``.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from ..messages.channel import Receiver, Sender
from ..messages.routes import ToFollower, ToLead
from ..messages.worker import FollowerCommand, MachineUse, RankLoaded
from ..runtime.child import ChildContext
from ..runtime.gc_control import uncollected
from ..runtime.machine.gpus import may_use_gpu
from ..runtime.machine.memory import host_memory
from ..runtime.machine.topology import read_machine
from ..runtime.ranks import RankPlace, places, worker_name
from .device.gpu_placement import beside_gpu, prefer_node, stay_near
from .device.placement import (
    ThreadPlacement,
    bind_calling_thread,
    confine,
    floating,
    machine_use,
    start_torch_threads,
    yield_cores,
)
from .options import WorkerOptions
from .ranks.rank_placement import plan_rank_placement
from .torch_import import note_torch, use_one_torch_thread
from .weights_cache.build_process import BuilderProcess
from .weights_cache.cache import CachedWeights, PrivateWeights, WeightsSource, weights_folder

if TYPE_CHECKING:
    from .engines.loaded import LoadedModel
    from .ranks.host_ranks import HostRanks
    from .steps.step_runner import StepRunner

log = logging.getLogger(__name__)

S = TypeVar("S", bound="StepRunner")


class LeadChannels(NamedTuple):
    """A lead's to ``followers``, the other ranks of its host, and theirs to it; None where there are none."""

    followers: Sequence[Sender]
    loaded: Receiver[RankLoaded] | None


class FollowerChannels(NamedTuple):
    """From and to the lead."""

    commands: Receiver[FollowerCommand]
    lead: Sender


RankChannels = LeadChannels | FollowerChannels


class Started(NamedTuple):
    """``ranks``: None where there is one rank only. ``seconds``: what was spent where.

    ``settle``: moves the calling thread to where it stays, when nothing is left to compile.
    """

    model: LoadedModel
    steps: StepRunner
    placement: ThreadPlacement
    machine: MachineUse
    ranks: HostRanks | None
    seconds: dict[str, float]
    settle: Callable[[], None]


def open_channels(ctx: ChildContext[WorkerOptions]) -> RankChannels:
    """Open this rank's channels: a lead's to the other ranks of its host, or another rank's to its lead.

    Call this before any thread is placed: the first socket starts ZMQ's I/O thread, which must not inherit the compute
    threads' cores.
    """
    place = own_place(ctx)
    if place.local:
        commands: Receiver[FollowerCommand] = Receiver(ctx.zmq_ctx, ctx.address(ctx.name), ToFollower)
        return FollowerChannels(commands, Sender(ctx.zmq_ctx, ctx.address("lead")))
    followers = [Sender(ctx.zmq_ctx, ctx.address(worker_name(rank))) for rank in place.followers]
    return LeadChannels(followers, Receiver(ctx.zmq_ctx, ctx.address("lead"), ToLead) if followers else None)


def own_place(ctx: ChildContext[WorkerOptions]) -> RankPlace:
    """Return this process's rank, and its position among the ranks of its host and of all hosts."""
    return places(ctx.options)[ctx.name]


def start_model(ctx: ChildContext[WorkerOptions], channels: RankChannels) -> Started:
    """Place the compute threads on cores, load the model or this rank's part, and make its step runner.

    ``channels``: to the other ranks of this host. Raises ``ModelError``, ``ThreadPlacementError`` or ``RegionError``.
    """
    options, place = ctx.options, own_place(ctx)
    begin = time.monotonic()
    cores = read_machine()
    placement = plan_rank_placement(options.threads, options.cpus, cores, place)
    yield_cores(options.compute_nice or 0)
    if may_use_gpu(options.device):
        placement = _place_beside_gpu(placement, options)
    else:
        confine(placement)
    with uncollected():
        from .cpu_engine.build import choose_level
        from .engines.load import load_model
        from .engines.load_setup import Threads
    machine = machine_use(placement, host_memory())
    if place.size > 1:
        machine = msgspec.structs.replace(machine, reason=f"rank {place.rank} of {place.size}: {machine.reason}")
    log.info("%s", machine.reason)
    imported = time.monotonic()
    ranks = None if place.size == 1 else _make_ranks(ctx, begin, place, placement, channels)
    threads = Threads(
        placement.spin_us,
        placement.cpus,
        lambda: floating(placement),
        placement.node,
        count=placement.threads,
        adapts=options.adaptive_threads,
        start_torch=lambda: start_torch_threads(placement),
    )
    model = load_model(options, threads, ranks, _weights_source(options, placement))
    node = None if options.cpus is not None else model.device.numa_node()
    prefer_node(node, cores)
    if model.engine.attention_backend == "cpu":
        bind_calling_thread(placement)
        use_one_torch_thread()
        machine = msgspec.structs.replace(machine, kernel_level=choose_level().name)
    steps = _make_steps(model, options, ranks)
    seconds = {"imports": imported - begin, **model.load_seconds}
    return Started(model, steps, placement, machine, ranks, seconds, lambda: stay_near(node, cores))


def _place_beside_gpu(placement: ThreadPlacement, options: WorkerOptions) -> ThreadPlacement:
    """Confine this process to its cores, and return its placement.

    If torch sees a GPU, the placement has fewer threads, which are bound to no core of their own. Imports torch, which
    alone tells whether it can use the GPU.
    """
    note_torch("a GPU")
    with uncollected():
        import torch

    if torch.cuda.is_available():
        placement = beside_gpu(placement, named=options.cpus is not None)
    confine(placement)
    return placement


def freeze() -> None:
    """Collect garbage, then exempt all objects that exist now from collection, as they live as long as the process.

    A full collection over torch's and the model's objects would take tens of milliseconds, in mid-stream. Without them,
    pauses stay in microseconds.
    """
    gc.collect()
    gc.freeze()


def _make_ranks(
    ctx: ChildContext[WorkerOptions], begin: float, place: RankPlace, placement: ThreadPlacement, channels: RankChannels
) -> HostRanks:
    from .ranks.host_ranks import FollowerRank, LeadRank, Meeting

    options = ctx.options
    address = options.dist_init_addr if place.nodes > 1 else None
    meeting = Meeting(address, ctx.run_dir, begin + options.startup_timeout, lambda: floating(placement))
    if isinstance(channels, FollowerChannels):
        return FollowerRank(place, meeting, *channels)
    return LeadRank(place, meeting, *channels)


def _weights_source(options: WorkerOptions, placement: ThreadPlacement) -> WeightsSource:
    builder = BuilderProcess(placement.threads, options.startup_timeout, lambda: floating(placement))
    folder = weights_folder(options.weights_cache)
    return PrivateWeights(builder) if folder is None else CachedWeights(folder, builder, options.startup_timeout)


def _make_steps(model: LoadedModel, options: WorkerOptions, ranks: HostRanks | None) -> StepRunner:
    from .steps.step_runner import StepRunner

    def with_names(kind: type[S]) -> type[S]:
        if not options.enable_nvtx:
            return kind
        note_torch("--enable-nvtx")
        from .steps.step_ranges import with_ranges

        return with_ranges(kind)

    max_reqs = options.max_running_requests
    if ranks is None:
        return with_names(StepRunner)(model, max_reqs)
    from .ranks.host_ranks import LeadRank
    from .ranks.leading_steps import FollowingSteps, LeadingSteps

    if isinstance(ranks, LeadRank):
        return with_names(LeadingSteps)(model, max_reqs, ranks)
    return with_names(FollowingSteps)(model, max_reqs)
