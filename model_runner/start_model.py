"""What every process that computes does before its first step: threads placed, torch imported, the model loaded.

Imports torch as it runs and not before, since OpenMP settles on its cores when it is loaded.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..messages.channel import Receiver, Sender
from ..messages.worker import FollowerCommand, MachineUse
from ..runtime.child import ChildContext
from ..runtime.collector import uncollected
from ..runtime.machine.memory import host_memory
from ..runtime.machine.topology import read_machine
from ..runtime.ranks import RankPlace, places, worker_name
from .placement import Placement, bind_compute_threads, confine, floating, machine_use, yield_cores
from .tensor_parallel.rank_placement import plan_rank_placement

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .step_runner import StepRunner
    from .tensor_parallel.host_ranks import HostRanks

log = logging.getLogger(__name__)


class RankChannels(NamedTuple):
    """Opened before any thread is placed. ``followers``: a lead's; ``commands``: of a rank that is none."""

    followers: Sequence[Sender] = ()
    commands: Receiver[FollowerCommand] | None = None


class Started(NamedTuple):
    """``ranks``: None where there is one rank only. ``seconds``: what was spent where."""

    model: ModelRunner
    steps: StepRunner
    placement: Placement
    machine: MachineUse
    ranks: HostRanks | None
    seconds: dict[str, float]


def open_followers(ctx: ChildContext) -> list[Sender]:
    """The channels of the other ranks of this lead's host."""
    return [Sender(ctx.zmq_ctx, ctx.address(worker_name(rank))) for rank in own_place(ctx).followers]


def own_place(ctx: ChildContext) -> RankPlace:
    """Which rank this process is."""
    return places(ctx.options)[ctx.name]


def start_model(ctx: ChildContext, channels: RankChannels) -> Started:
    """Place the threads, load the model or this rank's part; raises ``ModelError`` or ``PlacementError``."""
    options, place = ctx.options, own_place(ctx)
    begin = time.monotonic()
    placement = plan_rank_placement(options.threads, options.cpus, read_machine(), place)
    machine = machine_use(placement, host_memory())
    if place.size > 1:
        machine = msgspec.structs.replace(machine, reason=f"rank {place.rank} of {place.size}: {machine.reason}")
    log.info("%s", machine.reason)
    confine(placement)
    yield_cores(options.compute_nice or 0)
    with uncollected():
        import torch

        from .kernels.build import choose_level
        from .model_runner import ModelRunner

    bind_compute_threads(placement)
    imported = time.monotonic()
    ranks = None if place.size == 1 else _make_ranks(ctx, place, placement, channels)
    model = ModelRunner(options, placement.spin_us, placement.cpus, ranks)
    if model.attention_backend == "cpu":
        # The kernels have threads of their own. Torch's would spin on the same cores after each of the few small
        # operations that are left to it.
        torch.set_num_threads(1)
        machine = msgspec.structs.replace(machine, kernel_level=choose_level().name)
    steps = _make_steps(model, options.max_running_requests, place, ranks)
    seconds = {"imports": imported - begin, **model.load_seconds}
    return Started(model, steps, placement, machine, ranks, seconds)


def freeze() -> None:
    """What lives now lives as long as the process. Frozen, it is never walked again, which keeps the collector's pauses
    to microseconds: a full collection over torch's and the model's objects takes tens of milliseconds, in mid-stream.
    """
    gc.collect()
    gc.freeze()


def _make_ranks(ctx: ChildContext, place: RankPlace, placement: Placement, channels: RankChannels) -> HostRanks:
    from .tensor_parallel.host_ranks import Follower, Lead, Meeting

    options = ctx.options
    meeting = Meeting(options.dist_init_addr, ctx.run_dir, options.startup_timeout, lambda: floating(placement))
    if channels.commands is not None:
        return Follower(place, meeting, channels.commands)
    return Lead(place, meeting, channels.followers)


def _make_steps(model: ModelRunner, max_reqs: int, place: RankPlace, ranks: Any) -> StepRunner:
    from .step_runner import StepRunner

    if ranks is None or place.local:
        return StepRunner(model, max_reqs)
    from .tensor_parallel.leading_steps import LeadingSteps

    return LeadingSteps(model, max_reqs, ranks)
