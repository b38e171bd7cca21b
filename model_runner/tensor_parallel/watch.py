"""Notices that another host's ranks are gone, also while nothing is computed: a rank's death is the instance's.

Rank 0 and the lead of each other host exchange a word every few seconds, in a thread of their own. A process that ends
closes its connections, which ends the wait at once; a host that falls silent, after ``WATCH_SECONDS``.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import torch
import torch.distributed as dist

from .world import WATCH_SECONDS, World

log = logging.getLogger(__name__)

WORD_SECONDS = WATCH_SECONDS / 6


def start_watch(world: World) -> None:
    """Watch whom this lead has to: rank 0 every other, and they rank 0."""
    place = world.place
    others = range(1, place.nodes) if place.rank == 0 else range(1)
    for node in others:
        threading.Thread(target=_watch, args=(world, node), name=f"watch-node-{node}", daemon=True).start()


def end_process(what: str, error: BaseException | None = None) -> None:
    """End this process, and with it the instance here."""
    log.critical("%s; ending the process%s", what, "" if error is None else f" ({error})")
    logging.shutdown()
    os._exit(1)  # sys.exit would end this thread only


def _watch(world: World, node: int) -> None:
    place, word = world.place, torch.zeros(1, dtype=torch.uint8)
    other = node * place.local_size
    try:
        while True:
            if place.rank:
                dist.send(word, other, group=world.watch)
            dist.recv(word, other, group=world.watch)
            if place.rank:
                time.sleep(WORD_SECONDS)
            else:
                dist.send(word, other, group=world.watch)
    except RuntimeError as e:
        end_process(gone(node, other), e)


def gone(node: int, rank: int) -> str:
    """What is said of a host whose ranks no longer answer."""
    return f"--node-rank {node} of the instance is gone: the connection with rank {rank} ended"
