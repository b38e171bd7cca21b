"""The process of a tensor-parallel rank that is not the first: computes its part of every step, and answers nobody.

The lead of another host than the first gets steps from rank 0, and passes them on; any other rank gets them from the
lead of its host. Rank 0 (``model_runner/process.py``) alone knows the scheduler.
"""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

import msgspec

from ...disaggregation.errors import TransferError
from ...messages.channel import Receiver
from ...messages.routes import ToFollower
from ...messages.worker import FollowerCommand, ForwardStep
from ...model_files.errors import ModelError
from ...runtime.child import start_child
from ...runtime.cpu_list import PlacementError
from ..start_model import RankChannels, Started, freeze, open_followers, own_place, start_model

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Entry point of the process."""
    ctx = start_child(sys.argv)
    place = own_place(ctx)
    # The first socket starts ZMQ's I/O thread, which must not inherit the compute threads' cores.
    if place.local:
        commands: Receiver[FollowerCommand] = Receiver(ctx.zmq_ctx, ctx.address(ctx.name), ToFollower)
        channels = RankChannels(commands=commands)
    else:
        channels = RankChannels(open_followers(ctx))
    try:
        started = start_model(ctx, channels)
    except (ModelError, PlacementError, TransferError) as e:
        sys.exit(f"rank {place.rank}: {e}")
    freeze()
    ctx.report_ready(started.seconds)
    _serve(started)


def _serve(started: Started) -> NoReturn:
    from .host_ranks import Follower, Lead

    ranks, steps = started.ranks, started.steps
    if isinstance(ranks, Follower):
        while True:
            steps.run(ranks.next_step())
    assert isinstance(ranks, Lead)
    decode = msgspec.msgpack.Decoder(list[ForwardStep]).decode
    while True:
        for step in decode(ranks.next_frame()):
            steps.run(step)


if __name__ == "__main__":
    main()
