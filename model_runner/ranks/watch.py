"""Watch of the other hosts' ranks, also while nothing is computed: a rank's death is the instance's.

Rank 0 and the lead of each other host send each other a word every few seconds. A thread of their own waits for the
other's word. A process that ends closes its connections, which ends the wait at once. A host that falls silent is
noticed after ``WATCH_SECONDS``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from .world import WATCH_SECONDS, World

log = logging.getLogger(__name__)

WORD_SECONDS = WATCH_SECONDS / 6


def start_watch(world: World) -> None:
    """Start watching: rank 0 watches every other lead, and each of those watches rank 0."""
    place = world.place
    others = range(1, place.nodes) if place.rank == 0 else range(1)
    for node in others:
        for work in (_tell, _listen):
            threading.Thread(target=work, args=(world, node), name=f"watch-node-{node}", daemon=True).start()


def end_process(what: str, error: BaseException) -> NoReturn:
    """End this process, and with it the instance here."""
    log.critical("%s; ending the process (%s)", what, error)
    logging.shutdown()
    os._exit(1)  # sys.exit would end this thread only


def end_after_watch(what: str, error: BaseException) -> NoReturn:
    """End this process because what it waited for did not come.

    It first waits a second for the watch to report a lost host.
    """
    time.sleep(1)
    end_process(what, error)


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


def gone(node: int, rank: int) -> str:
    """Return the error message for a host with ranks that no longer answer."""
    return f"--node-rank {node} of the instance is gone: rank {rank} has ended, or was silent for {WATCH_SECONDS:.0f} s"
