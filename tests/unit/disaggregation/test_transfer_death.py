"""Peers that die or freeze in the middle of a transfer: real processes, real signals."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys

import numpy as np
import pytest
from support import fake_cuda_driver
from support.import_path import with_inherited
from support.machine import limit
from support.processes import freeze
from support.staged_pools import pool_group

from pdserve.disaggregation.transfer.backends.load import make_backend
from pdserve.disaggregation.transfer.backends.tcp import TcpBackend
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.base import HandoverId, pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    PeerAdmitted,
    PeerConnected,
    PeerLinkDown,
    SendEnded,
    SendPages,
)

PAGE = 64 << 10
PAGES = 513
LIMIT = limit(20.0)
PAGE_LIST = pack_i32(range(1, PAGES))
MAPPED = ["shm", "cuda_ipc"]

CHILD = """
import queue, sys
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.messages.base import HandoverId, pack_i32
from pdserve.messages.worker import ConnectPeer, GrantPages, PeerConnected, SendPages
from support.staged_pools import pool_group

backend, peer, page, pages = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
region = allocate_region(page * pages, shared=backend == "shm")
region.buffer[:] = b"c" * region.nbytes
events = queue.Queue()
engine = TransferEngine(backend, [pool_group(backend, region, page)], "child", "127.0.0.1", events.put).start()
engine.submit(GrantPages(HandoverId("child", 1, 1), peer, [pack_i32(range(1, pages))]))
print(engine.metadata.hex(), flush=True)
metadata = bytes.fromhex(sys.stdin.readline())
writing = False
if metadata:  # write into the peer's pool for ever
    engine.submit(ConnectPeer(peer, 1, metadata))
    assert events.get() == PeerConnected(peer, 1)
while metadata:
    engine.submit(SendPages(HandoverId(peer, 1, 1), [pack_i32(range(1, pages))], [pack_i32(range(1, pages))], True))
    ended = events.get()
    if not writing:
        print("writing", flush=True)
    writing = True
sys.stdin.readline()
"""


@pytest.fixture(params=["tcp", "shm", "cuda_ipc"])
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Install a CUDA driver without a GPU, here and in children."""
    fake_cuda_driver.install(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", with_inherited(fake_cuda_driver.IMPORT_PATH))


class Parent:
    """Our engine, and a child process with another."""

    def __init__(self, kind, backend=None):
        self.region = allocate_region(PAGE * PAGES, shared=kind == "shm")
        self.pool = np.frombuffer(self.region.buffer, dtype=np.uint8)
        self.pool[:] = ord("p")
        self.events = queue.Queue()
        backend = backend or make_backend(kind, "parent", "127.0.0.1")
        self.engine = TransferEngine(
            backend, [pool_group(kind, self.region, PAGE)], "parent", "127.0.0.1", self.events.put
        ).start()
        self.engine.submit(GrantPages(HandoverId("parent", 1, 1), "child", [pack_i32(range(1, PAGES))]))
        command = [sys.executable, "-c", CHILD, kind, "parent", str(PAGE), str(PAGES)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.child_metadata = bytes.fromhex(self.child.stdout.readline())

    def let_child_write(self):
        self.engine.submit(AdmitPeer("child", 1))
        assert self.next() == PeerAdmitted("child", 1)
        self.tell(self.engine.metadata.hex())
        assert self.child.stdout.readline() == "writing\n"

    def connect_child(self):
        self.tell("")
        self.engine.submit(ConnectPeer("child", 1, self.child_metadata))
        assert self.next() == PeerConnected("child", 1)

    def freeze_child(self):
        freeze(self.child.pid)

    def tell(self, line):
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def next(self, timeout=LIMIT):
        return self.events.get(timeout=timeout)

    def send(self, room, *, last=True):
        self.engine.submit(SendPages(HandoverId("child", room, 1), [PAGE_LIST], [PAGE_LIST], last))


@pytest.fixture
def start():
    parents = []

    def make(*args):
        parents.append(Parent(*args))
        return parents[-1]

    yield make
    for parent in parents:
        parent.child.kill()
        parent.child.wait()
        parent.child.stdin.close()
        parent.child.stdout.close()
        parent.engine.close()


def test_a_killed_writer_is_reported_once_after_its_last_write(start, kind):
    parent = start(kind)
    parent.let_child_write()
    os.kill(parent.child.pid, signal.SIGKILL)
    assert parent.next(timeout=limit(2)) == PeerLinkDown("child", 1)
    parent.pool[:] = ord("x")  # its pages are ours again
    parent.child.wait()
    parent.engine.submit(DisconnectPeer("nobody", 1))
    assert parent.next() == PeerLinkDown("nobody", 1)  # and nothing came in between
    assert (parent.pool == ord("x")).all()


def test_a_killed_receiver_ends_its_rooms_at_once(start, kind):
    parent = start(kind)
    parent.connect_child()
    parent.send(1, last=False)
    os.kill(parent.child.pid, signal.SIGKILL)
    # In this order: when the failure of the room is reported, the peer must be known to be down.
    assert parent.next(timeout=limit(2)) == PeerLinkDown("child", 1)
    ended = parent.next(timeout=limit(2))
    assert isinstance(ended, SendEnded)
    assert ended.error
    parent.send(2)
    assert "not connected" in parent.next().error
    assert parent.events.empty()


@pytest.mark.parametrize("kind", MAPPED, indirect=True)
def test_a_frozen_writer_that_maps_the_pool_keeps_its_pages_until_it_dies(start, kind):
    parent = start(kind)
    parent.let_child_write()
    parent.freeze_child()
    parent.engine.submit(DisconnectPeer("child", 1))
    with pytest.raises(queue.Empty):
        parent.next(timeout=0.3)
    os.kill(parent.child.pid, signal.SIGKILL)
    assert parent.next() == PeerLinkDown("child", 1)


@pytest.mark.parametrize("kind", MAPPED, indirect=True)
def test_a_frozen_writer_that_maps_the_pool_and_goes_on_lets_go(start, kind):
    parent = start(kind)
    parent.let_child_write()
    parent.freeze_child()
    parent.engine.submit(DisconnectPeer("child", 1))
    os.kill(parent.child.pid, signal.SIGCONT)
    assert parent.next() == PeerLinkDown("child", 1)
    parent.pool[:] = ord("x")
    parent.engine.submit(DisconnectPeer("nobody", 1))
    assert parent.next() == PeerLinkDown("nobody", 1)
    assert (parent.pool == ord("x")).all()


def test_a_frozen_tcp_writer_is_cut_off_at_once(start):
    parent = start("tcp")
    parent.let_child_write()
    parent.freeze_child()
    parent.engine.submit(DisconnectPeer("child", 1))
    assert parent.next(timeout=limit(2)) == PeerLinkDown("child", 1)
    parent.pool[:] = ord("x")
    os.kill(parent.child.pid, signal.SIGCONT)
    parent.engine.submit(DisconnectPeer("nobody", 1))
    assert parent.next() == PeerLinkDown("nobody", 1)
    assert (parent.pool == ord("x")).all()


def test_a_frozen_tcp_receiver_ends_its_rooms_after_the_stall_limit(start):
    parent = start("tcp", TcpBackend("parent", "127.0.0.1", stall_seconds=0.5))
    parent.connect_child()
    parent.freeze_child()
    parent.send(1)
    assert parent.next(timeout=limit(5)) == PeerLinkDown("child", 1)
    assert "does not answer" in parent.next().error
    assert parent.events.empty()
