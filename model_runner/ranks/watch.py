"""Watch of the other hosts' ranks, also while nothing is computed: a rank's death is the instance's.

Rank 0 and the lead of each other host send each other a word every few seconds. A thread of their own waits for the
other's word. A process that ends closes its connections, which ends the wait at once. A host that falls silent is
noticed after ``WATCH_SECONDS``.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from .process_end import WATCH_SECONDS, end_process, gone
from .world import World

WORD_SECONDS = WATCH_SECONDS / 6


def start_watch(world: World) -> None:
    """Start the threads that watch other hosts: rank 0 watches every other lead, and each of those watches rank 0.

    A host that is lost ends this process.
    """
    place = world.place
    others = range(1, place.nodes) if place.rank == 0 else range(1)
    for node in others:
        for work in (_tell, _listen):
            threading.Thread(target=work, args=(world, node), name=f"watch-node-{node}", daemon=True).start()


def _tell(world: World, node: int) -> None:
    word, other = torch.zeros(1, dtype=torch.uint8), node * world.place.local_size
    while True:
        try:
            dist.send(word, other, group=world.watch)
        except RuntimeError:
            # The listening thread reports the failure.
            return
        time.sleep(WORD_SECONDS)


def _listen(world: World, node: int) -> None:
    word, other = torch.zeros(1, dtype=torch.uint8), node * world.place.local_size
    try:
        while True:
            dist.recv(word, other, group=world.watch)
    except RuntimeError as e:
        end_process(gone(node, other), e)
