"""Checksums of hand-overs from device to device: the pool's own kernel, by the engines of both sides."""

from __future__ import annotations

import queue
import sys

import msgspec
import numpy as np
import pytest
import torch
from support.fake_nixl import install
from support.handovers import named
from support.machine import limit
from support.recording_device import RecordingDevice
from support.triton_device import DEVICE, INTERPRETED

from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import LayerRange
from pdserve.mem_cache.kv_pages.staging import Part
from pdserve.mem_cache.kv_pages.word_sum import host_checksum
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import AdmitPeer, ConnectPeer, PeerAdmitted, PeerConnected, SendPages, VerifyPages
from pdserve.model_runner.device.base import Device
from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import KVPool, make_pool
from pdserve.model_runner.kv.staging import PoolPages, direct_groups

LIMIT = limit(60.0)
PAGES = np.array([4, 1, 6, 2], dtype=np.int32)
LAYOUT = make_layout(KVShape(3, 2, 16), 8, torch.bfloat16)
PAGE_BYTES = LAYOUT.groups[0].page_bytes


def random_pool(device: Device, seed: int) -> KVPool:
    pool = make_pool(LAYOUT, 8, device.torch)
    data = np.random.default_rng(seed).integers(0, 256, (8, PAGE_BYTES), dtype=np.uint8)
    pool.data.view(8, -1).view(torch.uint8).copy_(torch.from_numpy(data))
    return pool


@pytest.mark.parametrize("layers", [LayerRange(0, 3), LayerRange(1, 2)], ids=str)
def test_a_pool_sums_up_its_pages_as_the_host_does(layers: LayerRange) -> None:
    """On a GPU on a stream of its own, beside what the main one has queued."""
    device = RecordingDevice() if INTERPRETED else open_device(str(DEVICE))
    pool = random_pool(device, 1)
    pages = PoolPages(pool, device)
    assert pages.has_sums
    parts = pool.data.view(8, 3, -1).view(torch.uint8).cpu().numpy()[PAGES, layers.begin : layers.end]
    assert pages.word_sums([Part(PAGES[:1], 0, 1), Part(PAGES, *layers)], 3)[1] == host_checksum(
        np.ascontiguousarray(parts).reshape(-1)
    )
    pool.data.view(8, -1).view(torch.int16)[6, PAGE_BYTES // 4] ^= 4
    assert pages.word_sums([Part(PAGES, *layers)], 3)[0] != host_checksum(np.ascontiguousarray(parts).reshape(-1))


@pytest.mark.skipif(not INTERPRETED, reason="the library that plays NIXL's part writes to the host's memory")
def test_pages_that_land_on_a_device_are_held_against_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    pools, engines, events = [], [], [queue.Queue(), queue.Queue()]
    for number, epoch in enumerate("PD"):
        device = RecordingDevice()
        pools.append(random_pool(device, number))
        groups = direct_groups(LAYOUT, [pools[-1]], device)
        engine = TransferEngine("nixl", groups, epoch, "127.0.0.1", events[number].put, layout=LAYOUT)
        engines.append(engine.start())
    try:

        def ask(number, command):
            engines[number].submit(command)
            return events[number].get(timeout=LIMIT)

        def verified(slices) -> bool:
            return ask(1, VerifyPages(named(1), [pack_i32(PAGES[::-1])], slices)).ok

        assert ask(1, AdmitPeer("P", 1)) == PeerAdmitted("P", 1)
        assert ask(0, ConnectPeer("D", 1, engines[1].metadata)) == PeerConnected("D", 1)
        ended = ask(0, SendPages(named(1), [pack_i32(PAGES)], [pack_i32(PAGES[::-1])], True))
        assert ended.error is None
        assert {piece.algorithm for piece in ended.slices} == {"words"}
        sent, landed = (pool.data.view(8, -1).view(torch.int16) for pool in pools)
        assert torch.equal(landed[PAGES[::-1].copy()], sent[PAGES])
        assert verified(ended.slices)
        landed[6, 11] ^= 1
        assert not verified(ended.slices)
        landed[6, 11] ^= 1
        assert verified(ended.slices)
        wrong = msgspec.structs.replace(ended.slices[0], checksum=ended.slices[0].checksum ^ 1)
        assert not verified([wrong, *ended.slices[1:]])
    finally:
        for engine in engines:
            engine.close()
        sys.modules.pop("pdserve.disaggregation.transfer.backends.nixl", None)
