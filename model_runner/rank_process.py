"""The process of a tensor-parallel rank that is not the first: computes its part of every step, and sends no answers.

The lead of another host than the first gets steps from rank 0, and passes them on; any other rank gets them from the
lead of its host. Rank 0 (``model_runner/process.py``) alone talks to the scheduler.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import sys
from typing import NoReturn

import msgspec

from ..mem_cache.kv_pages.region import RegionError
from ..messages.memory import TrimPool
from ..messages.profiling import StartProfile, StopProfile
from ..messages.worker import CaptureGraphs, ForwardStep
from ..model_files.errors import ModelError
from ..runtime.child import ChildContext, start_child
from ..runtime.cpu_list import ThreadPlacementError
from .idle_work import IdleWork
from .kv.prefault import PoolPrefault, highest_slot
from .options import WorkerOptions
from .start_model import Started, freeze, open_channels, own_place, start_model

OPTIONS = WorkerOptions


def main() -> NoReturn:
    """Run the process of a rank other than rank 0: load its part, then compute steps until it is ended."""
    ctx = start_child(sys.argv, OPTIONS)
    channels = open_channels(ctx)
    try:
        started = start_model(ctx, channels)
    except (ModelError, ThreadPlacementError, RegionError) as e:
        sys.exit(f"rank {own_place(ctx).rank}: {e}")
    freeze()
    ctx.report_ready(started.seconds)
    _serve(ctx, started)


def _serve(ctx: ChildContext[WorkerOptions], started: Started) -> NoReturn:
    from .memory_saver import WorkerMemorySaver
    from .profiler import RankProfiler, profile_folder
    from .ranks.host_ranks import FollowerRank, LeadRank
    from .ranks.leading_steps import FollowingSteps
    from .ranks.other_ranks import NoOtherRanks

    ranks, steps, model = started.ranks, started.steps, started.model
    if isinstance(ranks, FollowerRank):
        assert isinstance(steps, FollowingSteps)
        # Of memory that the lead has committed, this process still lacks the page tables.
        prefault = PoolPrefault.of(model.pools.region, model.pools.layout)
        occupation = WorkerMemorySaver(model, steps, prefault, NoOtherRanks())
        profiler = RankProfiler(profile_folder(ctx.options, ctx.run_dir), ranks.place.rank, model.device.kind, steps)
        idle = IdleWork.of(prefault)
        while True:
            step = ranks.next_step(idle.wait_ms)
            if step is None:
                idle.advance()
                continue
            idle.used()
            if isinstance(step, ForwardStep):
                profiler.steps.follow(step)
                prefault.used(highest_slot(step))
                continue
            steps.settle()
            if isinstance(step, CaptureGraphs):
                steps.capture_with_lead()
            elif isinstance(step, TrimPool):
                ranks.answer(model.weight_bytes, occupation.trim(step).error)
            elif isinstance(step, StartProfile | StopProfile):
                ranks.answer(model.weight_bytes, profiler.obey(step))
            else:
                ranks.answer(model.weight_bytes, occupation.obey(step).error)
    assert isinstance(ranks, LeadRank)
    decode = msgspec.msgpack.Decoder(list[ForwardStep]).decode
    while True:
        for step in decode(ranks.next_frame()):
            steps.follow(step)


if __name__ == "__main__":
    main()
