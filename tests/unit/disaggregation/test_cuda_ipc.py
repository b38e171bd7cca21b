"""KV from one process's pool to another's that maps it: leave, the end of links, and what is refused. The driver is
one for memory of the host, and CUDA's is held against libraries that note what they are called with.
"""

from __future__ import annotations

import ctypes
import os
import queue
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support import fake_cuda_driver
from support.handovers import named
from support.machine import limit
from support.processes import freeze, wait_until
from support.staged_pools import direct_group, slabs_of, staged_group
from support.transfer_child import Child

from pdserve.disaggregation.errors import BackendUnavailable, LinkLost
from pdserve.disaggregation.transfer.backends.cuda_driver import CudaDriver, load_driver
from pdserve.disaggregation.transfer.backends.handshake import WIRE_VERSION, Greeting, Offer, frame
from pdserve.disaggregation.transfer.backends.ipc_driver import DeviceCopy
from pdserve.disaggregation.transfer.backends.load import find_backend, make_backend
from pdserve.disaggregation.transfer.backends.write_requests import WRITER_MESSAGE, LeaseMessage
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.region import RegionError, allocate_region
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import (
    AdmitPeer,
    ConnectPeer,
    DisconnectPeer,
    GrantPages,
    PeerAdmitted,
    PeerConnected,
    PeerFailed,
    PeerLinkDown,
    RevokePages,
    SendEnded,
    SendPages,
    VerifyPages,
)

LIMIT = limit(10.0)
PAGE, PAGES = 4096, 9
QUIET = 0.1
STUB = Path(fake_cuda_driver.__file__).with_name("libcuda_stub.c")


@pytest.fixture(autouse=True)
def drivers(monkeypatch):
    return fake_cuda_driver.install(monkeypatch)


class Node:
    """An engine over a pool on a device."""

    def __init__(self, epoch: str, drivers: list, ordinal: int = 0, **limits) -> None:
        region = allocate_region(PAGE * PAGES, shared=False)
        self.pool = np.frombuffer(region.buffer, np.uint8).reshape(PAGES, PAGE)
        self.pool[:] = ord(epoch)
        self.epoch = epoch
        self.backend = find_backend("cuda_ipc")(epoch, "127.0.0.1", **limits)
        self.events: queue.Queue = queue.Queue()
        group = direct_group(self.pool, ordinal=ordinal)
        self.engine = TransferEngine(self.backend, [group], epoch, "127.0.0.1", self.events.put).start()
        self.metadata = self.engine.metadata
        self.driver = drivers[-1]

    def next(self):
        return self.events.get(timeout=LIMIT)

    def submit(self, *commands):
        for command in commands:
            self.engine.submit(command)

    def is_quiet(self) -> bool:
        try:
            self.events.get(timeout=QUIET)
        except queue.Empty:
            return True
        return False


@pytest.fixture
def start(drivers):
    nodes = []

    def make(*args, **kwargs):
        nodes.append(Node(*args, drivers, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.engine.close()
    assert all(driver.is_closed for driver in drivers)
    assert not any(driver.opened for driver in drivers if not driver.holds)


def send(src, dst, room=1):
    return SendPages(named(room), [pack_i32(src)], [pack_i32(dst)], True)


def grant(pages, peer="P", room=1):
    return GrantPages(named(room), peer, [pack_i32(pages)])


def link(writer, owner, number: int = 1) -> None:
    owner.submit(AdmitPeer(writer.epoch, number))
    assert owner.next() == PeerAdmitted(writer.epoch, number)
    writer.submit(ConnectPeer(owner.epoch, number, owner.metadata))
    assert writer.next() == PeerConnected(owner.epoch, number)


def only_link(node):
    [found] = list(node.backend._links)
    return found


def test_granted_pages_land_and_no_others(start):
    writer, owner = start("P"), start("D", ordinal=1)
    link(writer, owner)
    owner.submit(grant([4, 5, 8]))
    writer.pool[[1, 2, 6]] = np.random.default_rng(0).integers(0, 256, (3, PAGE))
    writer.submit(send([1, 2, 6], [4, 5, 8]))
    ended = writer.next()
    assert (ended.error, ended.nbytes) == (None, 3 * PAGE)
    assert np.array_equal(owner.pool[[4, 5, 8]], writer.pool[[1, 2, 6]])
    assert (np.delete(owner.pool, [4, 5, 8], axis=0) == ord("D")).all()
    owner.submit(RevokePages(named(1), are_checked=True), VerifyPages(named(1), [pack_i32([4, 5, 8])], ended.slices))
    assert owner.next().ok


def test_two_processes_and_both_directions(start):
    child = Child("cuda_ipc", "P", page=PAGE, pages=PAGES)
    try:
        owner = start("D")
        child.pool[:] = 7
        link(child, owner)
        link(owner, child, 2)
        owner.submit(grant([3, 4]))
        child.submit(send([1, 2], [3, 4]))
        assert child.next().error is None
        assert (owner.pool[[3, 4]] == 7).all()
        child.submit(GrantPages(named(2, epoch="P"), "D", [pack_i32([8])]))
        owner.submit(SendPages(named(2, epoch="P"), [pack_i32([1])], [pack_i32([8])], True))
        assert owner.next().error is None
        assert (child.pool[8] == ord("D")).all()
        freeze(child.process.pid)
        owner.submit(DisconnectPeer("P", 2))
        assert owner.is_quiet()  # it has what it needs to write
        child.process.kill()
        assert owner.next() == PeerLinkDown("P", 2)
    finally:
        child.close()


def test_pages_wait_for_their_grant_and_end_the_link_where_it_does_not_come(start):
    writer, owner = start("P"), start("D", stall_seconds=0.3)
    link(writer, owner)
    writer.submit(send([1], [1]))
    wait_until(lambda: only_link(owner).write_requests._ungranted, LIMIT, "its pages wait")
    owner.submit(grant([1]))
    assert writer.next().error is None
    writer.submit(send([1], [2], room=2))
    assert writer.next() == PeerLinkDown("D", 1)
    assert writer.next().error
    assert owner.next() == PeerLinkDown("P", 1)
    assert (owner.pool[2] == ord("D")).all()


@pytest.mark.parametrize("how", ["it parts", "its pages are taken back"])
def test_a_link_is_down_when_the_writers_copies_are_done_and_not_before(start, how):
    writer, owner = start("P"), start("D")
    link(writer, owner)
    writer.driver.holds = True
    owner.submit(grant([1, 2]))
    writer.submit(send([1, 2], [1, 2]))
    wait_until(lambda: writer.driver._queued, LIMIT, "the copies are queued")
    owner.submit(DisconnectPeer("P", 1) if how == "it parts" else RevokePages(named(1)))
    assert owner.is_quiet()
    owner.submit(grant([3], room=2))  # nothing of that link any more
    writer.driver.holds = False
    assert owner.next() == PeerLinkDown("P", 1)
    assert (owner.pool[[1, 2]] == ord("P")).all()  # before that word: behind it nothing is written
    assert {type(writer.next()), type(writer.next())} == {PeerLinkDown, SendEnded}
    link(writer, owner, 2)


@pytest.mark.parametrize("what", ["holds", "breaks"])
def test_a_writer_that_can_not_know_its_end_has_let_go_when_its_process_has(start, monkeypatch, what):
    writer, owner = start("P"), start("D")
    links = sys.modules["pdserve.disaggregation.transfer.backends.ipc_links"]
    monkeypatch.setattr(links, "SETTLE_SECONDS", 0.05)
    link(writer, owner)
    setattr(writer.driver, what, True)
    owner.submit(grant([1]))
    writer.submit(send([1], [1]))
    if what == "holds":
        wait_until(lambda: writer.driver._queued, LIMIT, "the copies are queued")
        writer.submit(DisconnectPeer("D", 1))
    assert {type(writer.next()), type(writer.next())} == {PeerLinkDown, SendEnded}
    assert writer.driver.opened  # mapped as before
    assert owner.is_quiet()
    writer.driver.opened.clear()


STRANGER = """
import socket, sys
place, greeting, said = sys.argv[1], bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + place)
sock.sendall(greeting)
length = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
sock.recv(length, socket.MSG_WAITALL)
sock.sendall(said)
sock.close()
print("gone", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("maps", [True, False])
def test_the_end_of_a_connection_is_the_end_of_a_writer_that_maps_nothing_only(start, maps):
    owner = start("D")
    said = WRITER_MESSAGE.pack(LeaseMessage.MAPS, *[0] * 7).hex() if maps else ""
    offer = msgspec.msgpack.decode(owner.metadata, type=Offer)
    greeting = frame(Greeting(WIRE_VERSION, "Q", "D", offer.secret)).hex()
    command = [sys.executable, "-c", STRANGER, offer.place, greeting, said]
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with stranger:
        assert stranger.stdout.readline() == "gone\n"
        if maps:
            assert owner.is_quiet()
            stranger.stdin.close()
        assert owner.next() == PeerLinkDown("Q", 0)
        stranger.stdin.close()


class Writer:
    """Writer that says what it likes, with an eventfd that is signalled when it lets go."""

    def __init__(self, owner):
        offer = msgspec.msgpack.decode(owner.metadata, type=Offer)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(f"\0{offer.place}")
        self.sock.sendall(frame(Greeting(WIRE_VERSION, "Q", "D", offer.secret)))
        _, [self.let_go_fd], _, _ = socket.recv_fds(self.sock, 1 << 16, 1)

    def say(self, kind, number=0, group=0, layers=(0, 1), pages=()):
        word = WRITER_MESSAGE.pack(kind, number, 1, 1, group, *layers, len(pages))
        self.sock.sendall(word + np.array(pages, "<i4").tobytes())

    def close(self):
        self.sock.close()
        os.close(self.let_go_fd)


WORDS = {
    "not first that it maps": [{"kind": LeaseMessage.REQUEST, "pages": [1]}],
    "that it maps, twice": [{"kind": LeaseMessage.MAPS}, {"kind": LeaseMessage.MAPS}],
    "written without leave": [{"kind": LeaseMessage.MAPS}, {"kind": LeaseMessage.WRITTEN}],
    "no group": [{"kind": LeaseMessage.MAPS}, {"kind": LeaseMessage.REQUEST, "group": 3, "pages": [1]}],
}


@pytest.mark.parametrize("what", WORDS)
def test_what_no_writer_says_ends_its_link_when_it_lets_go(start, what):
    owner = start("D")
    writer = Writer(owner)
    try:
        for word in WORDS[what]:
            writer.say(**word)
        assert owner.is_quiet()
        os.eventfd_write(writer.let_go_fd, 1)
        assert owner.next() == PeerLinkDown("Q", 0)
    finally:
        writer.close()


@pytest.mark.parametrize("said", [LeaseMessage.MAPS, LeaseMessage.REQUEST])
def test_a_writer_that_is_let_in_and_parted_with_may_still_say_that_it_maps(start, said):
    owner = start("D")
    writer = Writer(owner)
    try:
        link = only_link(owner)
        owner.submit(DisconnectPeer("Q", 1))
        assert writer.sock.recv(1) == b""
        watched = owner.backend._reactor._selector.get_map()
        assert link.stream.sock.fileno() in watched
        writer.say(said)
        wait_until(lambda: link.stream.sock.fileno() not in watched, LIMIT, "it is not read any more")
        writer.sock.close()
        assert owner.is_quiet()
        os.eventfd_write(writer.let_go_fd, 1)
        assert owner.next() == PeerLinkDown("Q", 1)
    finally:
        writer.close()


def test_gpus_that_do_not_reach_each_other_fail_the_connect(start):
    writer, owner = start("P"), start("D", ordinal=3)
    writer.driver.part_from(b"GPU3")
    owner.submit(AdmitPeer("P", 1))
    assert owner.next() == PeerAdmitted("P", 1)
    writer.submit(ConnectPeer("D", 1, owner.metadata))
    failed = writer.next()
    assert isinstance(failed, PeerFailed)
    assert "GPU3 can't be reached" in failed.error
    assert owner.next() == PeerLinkDown("P", 1)


def test_another_host_is_told_what_to_use(start):
    writer, owner = start("P"), start("D")
    elsewhere = msgspec.structs.replace(msgspec.msgpack.decode(owner.metadata, type=Offer), host_id="another")
    writer.submit(ConnectPeer("D", 1, msgspec.msgpack.encode(elsewhere)))
    assert "--disaggregation-transfer-backend nixl" in writer.next().error


def test_pools_of_the_host_are_refused(drivers):
    for group in (staged_group(np.zeros((4, 64), np.uint8), 1, slabs_of(1, 64)),):
        backend = make_backend("cuda_ipc", "D", "127.0.0.1")
        with pytest.raises(RegionError, match="between the memories of GPUs"):
            backend.register([group])
        backend.close()
    backend = make_backend("cuda_ipc", "D", "127.0.0.1")
    odd = np.zeros(PAGE * 4 + 1, np.uint8)[1:].reshape(4, PAGE)
    with pytest.raises(RegionError, match="no other process"):
        backend.register([direct_group(odd)])
    backend.close()


def test_without_a_gpu_the_backend_says_so(monkeypatch):
    for name in ("cuda_driver", "cuda_ipc"):
        monkeypatch.delitem(sys.modules, f"{fake_cuda_driver.BACKENDS}.{name}")
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: no such file")))
    with pytest.raises(BackendUnavailable, match=r"libcuda\.so\.1.*NVIDIA GPU"):
        find_backend("cuda_ipc")


class Library:
    """``libcuda``, as its callers see it. ``calls``: names and arguments; ``codes``: what they return, else 0."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.codes: dict[str, int] = {}
        self.depth = 0

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, _Call(self, name))

    def named(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]


class _Call:
    argtypes: tuple = ()

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments):
        assert len(arguments) == len(self.argtypes), self._name
        library, name = self._library, self._name
        library.depth += {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
        plain = tuple(a for a in arguments if isinstance(a, int))
        library.calls.append((name, library.depth, *plain))
        filled = {
            "cuDeviceGet": lambda: 10 + arguments[1],
            "cuDeviceGetCount": lambda: 3,
            "cuDeviceCanAccessPeer": lambda: int(arguments[2] == 11),
            "cuMemGetAddressRange_v2": lambda: 1 << 20,
            "cuIpcOpenMemHandle_v2": lambda: 1 << 30,
            "cuCtxPopCurrent_v2": lambda: 0,
        }
        if name == "cuDeviceGetUuid_v2":
            arguments[0]._obj.bytes[:] = [arguments[1]] * 16
        elif name == "cuIpcGetMemHandle":
            arguments[0]._obj.reserved[:] = range(64)
        elif name == "cuGetErrorString":
            arguments[1]._obj.value = b"told so"
        elif name in filled:
            arguments[0]._obj.value = filled[name]()
        if name == "cuMemGetAddressRange_v2":
            arguments[1]._obj.value = 1 << 16
        return library.codes.get(name, 0)


@pytest.fixture
def library():
    return Library()


def test_the_driver_gives_handles_of_allocations_and_copies_on_a_stream_of_its_own(library):
    driver = CudaDriver(library, 2)
    assert driver.device == bytes([12] * 16)
    export = driver.export((1 << 20) + 512, 4096)
    assert export == (bytes(range(64)), 512)
    assert library.named("cuIpcGetMemHandle")[-1][2:] == (1 << 20,)
    with pytest.raises(RegionError, match="not one allocation"):
        driver.export((1 << 20) + 512, 1 << 16)
    address = driver.open(export.handle)
    assert address == 1 << 30
    ticket = driver.copy([DeviceCopy(address + 1, 7, 100), DeviceCopy(address + 200, 9, 50)])
    assert library.named("cuMemcpyAsync") == [
        ("cuMemcpyAsync", 1, address + 1, 7, 100),
        ("cuMemcpyAsync", 1, address + 200, 9, 50),
    ]
    library.codes["cuEventQuery"] = 600
    assert not driver.is_done(ticket)
    library.codes["cuEventQuery"] = 0
    assert driver.is_done(ticket)
    assert len(library.named("cuEventDestroy_v2")) == len(library.named("cuEventCreate")) == 1
    driver.shut(address)
    assert library.named("cuIpcCloseMemHandle")[-1][2:] == (address,)
    driver.close()
    assert library.depth == 0
    # What needs the context has it.
    needs = {name for name in dir(library) if name.startswith(("cuMem", "cuIpc", "cuEvent", "cuStream"))}
    assert all(call[1] == 1 for call in library.named(*needs))


def test_what_the_driver_says_of_an_error_is_passed_on_and_the_context_put_back(library):
    driver = CudaDriver(library, 0)
    for name, call, error in (
        ("cuIpcGetMemHandle", lambda: driver.export(1 << 20, 8), RegionError),
        ("cuIpcOpenMemHandle_v2", lambda: driver.open(bytes(64)), LinkLost),
        ("cuMemcpyAsync", lambda: driver.copy([DeviceCopy(1, 2, 3)]), LinkLost),
        ("cuEventQuery", lambda: driver.is_done(0), LinkLost),
        ("cuIpcCloseMemHandle", lambda: driver.shut(1), LinkLost),
    ):
        library.codes = {name: 201}
        with pytest.raises(error, match=rf"{name}: told so \(201\)"):
            call()
        assert library.depth == 0
    with pytest.raises(LinkLost, match="3 bytes"):
        driver.open(b"abc")
    library.codes = {"cuInit": 100}
    with pytest.raises(RegionError, match="can't use GPU 1: cuInit: told so"):
        CudaDriver(library, 1)


def test_which_gpus_reach_each_other(library):
    driver = CudaDriver(library, 0)
    assert driver.why_not(driver.device) == ""
    assert driver.why_not(bytes([11] * 16)) == ""
    assert "no NVLink" in driver.why_not(bytes([12] * 16))
    assert "none of the 3 that this instance sees" in driver.why_not(bytes(16))
    library.codes["cuDeviceCanAccessPeer"] = 100
    assert "can't be said" in driver.why_not(bytes([11] * 16))


def test_the_real_driver_is_asked_for_by_its_name(monkeypatch, library):
    asked = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: asked.append(name) or library)
    assert load_driver()(1).device == bytes([11] * 16)
    assert asked == ["libcuda.so.1"]


def test_a_library_in_c_gets_what_it_is_called_with(tmp_path):
    """A handle goes by value, addresses have 64 bits."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    built = tmp_path / "libcuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, STUB], check=True)
    stub = ctypes.CDLL(str(built))
    stub.stub_memory.restype = ctypes.c_uint64
    driver, memory = CudaDriver(stub, 0), stub.stub_memory()
    export = driver.export(memory + 4096, 8192)
    assert export.offset == 4096
    with pytest.raises(RegionError, match="not one allocation"):
        driver.export(memory + 4096, 1 << 16)
    assert driver.why_not(bytes([11] * 16)) == ""
    there = driver.open(export.handle)
    assert there == memory
    mine = ctypes.create_string_buffer(b"pages of KV", 16)
    ticket = driver.copy([DeviceCopy(there + 4096, ctypes.addressof(mine), 16)])
    assert [driver.is_done(ticket), driver.is_done(ticket)] == [False, True]
    assert ctypes.string_at(memory + 4096, 11) == b"pages of KV"
    assert stub.stub_events() == 0
    driver.shut(there)
    with pytest.raises(LinkLost, match=r"cuIpcCloseMemHandle: told so \(1\)"):
        driver.shut(there + 8)
    driver.close()
