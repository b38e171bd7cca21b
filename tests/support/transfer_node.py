"""A transfer engine over a pool of random bytes, in this process."""

from __future__ import annotations

import queue

import numpy as np

from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    GrantPages,
    SendPages,
)
from support.handovers import named
from support.machine import limit
from support.slices import summed_up
from support.staged_pools import pool_group

PAGE = 1024
PAGES = 400
LIMIT = limit(10.0)


class Node:
    """An engine over a pool of random bytes. Nodes of ``others`` grant the pages that it sends to them."""

    def __init__(self, backend, epoch, others, *, page=PAGE, pages=PAGES, layout=None):
        self.others = others
        self.region = allocate_region(page * pages, shared=backend == "shm")
        self.pool = np.frombuffer(self.region.buffer, dtype=np.uint8).reshape(pages, page)
        self.pool[:] = np.random.default_rng(len(epoch)).integers(0, 256, self.pool.shape)
        self.events = queue.Queue()
        groups = [pool_group(backend, self.region, page, 1 if layout is None else layout.groups[0].num_layers)]
        made = TransferEngine(backend, groups, epoch, "127.0.0.1", self.events.put, layout=layout)
        self.engine = made.start()
        self.epoch = epoch
        self.layers = 1 if layout is None else layout.groups[0].num_layers
        self.algorithm = "words" if backend == "cuda_ipc" else "xxh3"

    def submit(self, *commands):
        for command in commands:
            if isinstance(command, SendPages) and command.handover.epoch in self.others:
                owner = self.others[command.handover.epoch]
                owner.engine.submit(GrantPages(command.handover, self.epoch, command.dst_pages))
            self.engine.submit(command)

    def next(self):
        return self.events.get(timeout=LIMIT)


def send(room, src, dst, *, last=True, peer="D"):
    return SendPages(named(room, epoch=peer), [pack_i32(src)], [pack_i32(dst)], last)


def summed(node, pages, *bounds):
    """Return the checksums that ``node`` reports of pages that it has written: its GPU's, if it has one."""
    return summed_up(node.pool, pages, *bounds, num_layers=node.layers, algorithm=node.algorithm)
