"""Transfer engines, and pairs of them that are linked."""

from __future__ import annotations

import pytest
from support import fake_cuda_driver
from support.transfer_node import Node

from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    PeerAdmitted,
    PeerConnected,
)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Install a CUDA driver without a GPU."""
    fake_cuda_driver.install(monkeypatch)


@pytest.fixture
def make_node():
    nodes = {}

    def make(backend, epoch, **kwargs):
        nodes[epoch] = Node(backend, epoch, nodes, **kwargs)
        return nodes[epoch]

    yield make
    for node in nodes.values():
        node.engine.close()


@pytest.fixture(params=["tcp", "shm", "cuda_ipc"])
def kind(request):
    return request.param


@pytest.fixture
def pair(make_node, kind):
    writer, receiver = make_node(kind, "P"), make_node(kind, "D")
    receiver.submit(AdmitPeer("P", 1))
    assert receiver.next() == PeerAdmitted("P", 1)
    writer.submit(ConnectPeer("D", 1, receiver.engine.metadata))
    assert writer.next() == PeerConnected("D", 1)
    return writer, receiver
