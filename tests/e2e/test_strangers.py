"""Strangers at every port of a running pair: they change nothing, and cost no more than is stated here.

The campaign of 100,000 frames is marked slow (``make test-slow``); the same in short runs with every change.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import threading
import time
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from support.control_wire import ControlSocket
from support.machine import limit
from support.processes import Pair, pd_pair, wait_until
from support.strangers import Stranger, Target, find_target

from pdserve.disaggregation.handover.unclaimed_rooms import PEER_ROOMS
from pdserve.disaggregation.transfer.backends.tcp import TcpBackend
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.mem_cache.kv_pages.region import allocate_region
from pdserve.messages.base import HandoverId, Message
from pdserve.messages.channel import Codec, encode
from pdserve.messages.handover import (
    Abort,
    Heartbeat,
    Hello,
    Invite,
    RoomQueued,
    TransferRequest,
    Welcome,
)
from pdserve.messages.peer import PeerMessage

PROMPTS = [[50 + i, 900, 77 * i + 5, 4000, *range(100 + i, 140 + 3 * i)] for i in range(4)]
FRAMES_A_ROUND = 250
GROWTH_BYTES = 48 << 20
"""Bytes that a process may grow by after any number of frames."""
LOG_BYTES_A_SECOND = 6_000
"""Growth of one instance's log: about ten lines in ten seconds from each place that refuses."""
LOG_BYTES = 100_000
"""Bytes that the log may have besides."""


def answers(pair: Pair) -> list[list[int]]:
    """Return the pair's greedy answers."""
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return [pair.router.generate(input_ids=p, sampling_params=params)["output_ids"] for p in PROMPTS]


def processes(pair: Pair) -> dict[str, tuple[int, int]]:
    """Return pid and resident bytes of every process of the pair."""
    servers = {"prefill": pair.prefill, "decode": pair.decode, "router": pair.router}
    return {
        f"{name} {child}": (process.pid, process.memory_info().rss)
        for name, server in servers.items()
        for child, process in server.family().items()
    }


def assert_unharmed(pair: Pair, before: dict[str, tuple[int, int]], expected: list[list[int]]) -> None:
    """Check that processes are the same and have not grown, and that cached and fresh pages give the same answers."""
    after = processes(pair)
    assert {name: pid for name, (pid, _) in after.items()} == {name: pid for name, (pid, _) in before.items()}
    grown = {name: after[name][1] - rss for name, (_, rss) in before.items()}
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert answers(pair) == expected
    pair.assert_all_returned()
    for server in (pair.prefill, pair.decode):
        assert server.post("/flush_cache", {}).status_code == 200
    assert answers(pair) == expected
    pair.assert_all_returned()
    for server in (pair.prefill, pair.decode, pair.router):
        assert "Traceback" not in server.log(), server.log()[-5000:]


def run_campaign(pair: Pair, frames: int, seed: int) -> None:
    """Send ``frames`` hostile frames, with honest requests in between."""
    expected = answers(pair)
    assert answers(pair) == expected  # from cached pages
    target = find_target(pair)
    stranger = Stranger(target, seed)
    stranger.send(FRAMES_A_ROUND)  # what is loaded or allocated by the first of a kind is no growth
    before = processes(pair)
    logs = {server.log_path: server.log_path.stat().st_size for server in (pair.prefill, pair.decode, pair.router)}
    began = time.monotonic()
    for _ in range(frames // FRAMES_A_ROUND):
        stranger.send(FRAMES_A_ROUND)
        assert answers(pair) == expected
    stranger.close()
    seconds = time.monotonic() - began
    assert_unharmed(pair, before, expected)
    refused = pair.prefill.info()["disaggregation"]["refused"]
    assert refused > 0.2 * stranger.sent["control_frame"]
    written = {path.name: path.stat().st_size - size for path, size in logs.items()}
    assert max(written.values()) < LOG_BYTES + LOG_BYTES_A_SECOND * seconds, written
    assert "more like these" in pair.prefill.log() or frames < 10_000
    rss = {n: f"{(r - before[n][1]) >> 10:+d} KiB" for n, (_, r) in processes(pair).items()}
    print(f"{stranger.sent} in {seconds:.0f} s, refused at the control port: {refused}, logs: {written}, memory: {rss}")


@pytest.fixture
def pair(small_pair):
    """One pair for all tests of this file: none of them may harm it."""
    # On a busy machine a lease may have run out while the test before held all ports.
    small_pair.router.wait_healthy()
    return small_pair


@pytest.mark.timeout(300)
def test_strangers_at_every_port_change_nothing(pair):
    run_campaign(pair, 1_000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_campaign_of_strangers(pair):
    run_campaign(pair, int(os.environ.get("PDSERVE_STRANGER_FRAMES", "100000")), seed=2)


def test_thousands_of_connections_to_the_control_port_change_nothing(pair):
    expected = answers(pair)
    stranger = Stranger(find_target(pair), 4)
    stranger.crowd(300)
    before = processes(pair)
    for _ in range(5):
        stranger.crowd(500)
        assert answers(pair) == expected
    stranger.close()
    assert_unharmed(pair, before, expected)


def test_forged_and_replayed_routes_are_refused_and_the_pair_goes_on(pair):
    expected = answers(pair)
    target = find_target(pair)
    url = f"http://127.0.0.1:{target.bootstrap}/registration"
    forged = msgspec.structs.replace(target.registration, epoch="mine", control_port=1)
    with httpx.Client(trust_env=False, timeout=limit(10)) as client:
        for registration in (forged, target.registration):
            assert client.put(url, content=msgspec.json.encode(registration)).status_code == 401
            assert client.delete(url, params={"epoch": target.registration.epoch}).status_code == 401
        assert client.get(url).json()["epoch"] == target.registration.epoch
    assert answers(pair) == expected
    assert pair.prefill.is_healthy()


def test_the_secret_is_in_no_command_line_and_no_environment(pair):
    for process in pair.prefill.family().values():
        seen = " ".join(process.cmdline())
        with contextlib.suppress(psutil.AccessDenied):  # but for root: no other process reads it
            seen += " ".join(process.environ().values())
        assert "secret" not in seen.lower()


def test_every_process_makes_private_files_and_dumps_no_core(pair):
    for process in (*pair.prefill.family().values(), *pair.router.family().values()):
        status, limits = (Path(f"/proc/{process.pid}/{name}").read_text() for name in ("status", "limits"))
        assert re.search(r"^Umask:\s+0077$", status, flags=re.MULTILINE), process
        assert re.search(r"^Max core file size +[01] +[01] ", limits, flags=re.MULTILINE), process


def test_a_stranger_that_became_a_peer_gets_no_room_of_others_and_leaves_nothing_behind(pair):
    """With a data port of its own, so that the prefill connects to it and welcomes it."""
    expected = answers(pair)
    target = find_target(pair)
    before = processes(pair)
    with contextlib.ExitStack() as stack:
        stranger = Insider(target, stack)
        stranger.become_peer()
        states = {peer["epoch"]: peer["writing"] for peer in pair.prefill.info()["disaggregation"]["peers"]}
        assert states == {target.decode_epoch: "ready", stranger.epoch: "ready"}
        rng = random.Random(3)
        most = 0
        for _ in range(50):
            messages = [stranger.about(rng, rng.getrandbits(63)) for _ in range(200)]
            stranger.socket.send(encode([*messages, Heartbeat(target.registration.epoch)]))
            most = max(most, pair.prefill.info()["disaggregation"]["sent"]["rooms"])
        assert 0 < most <= PEER_ROOMS
        assert answers(pair) == expected
    # It falls silent: whatever it opened goes with it.
    wait_until(lambda: len(pair.prefill.info()["disaggregation"]["peers"]) == 1, 10, "it is gone")
    wait_until(lambda: pair.prefill.info()["disaggregation"]["sent"]["rooms"] == 0, 10, "its rooms are gone")
    assert_unharmed(pair, before, expected)


class Insider:
    """A stranger that plays a decode instance."""

    epoch = "an insider"

    def __init__(self, target: Target, stack: contextlib.ExitStack) -> None:
        self.target = target
        layout = target.registration.layout
        region = allocate_region(8 * layout.page_bytes, shared=False)
        stack.callback(region.close)
        self.backend = TcpBackend(self.epoch, "127.0.0.1")
        self.metadata = self.backend.register([PageGroup(region, layout.page_bytes, layout.groups[0].num_layers)])
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        stack.callback(self._close)
        self.socket = ControlSocket(target.control)
        stack.callback(self.socket.close)

    def become_peer(self) -> None:
        """Say hello until welcomed."""
        registration = self.target.registration
        hello = Hello(
            registration.epoch,
            self.epoch,
            1,
            registration.version,
            registration.fingerprint,
            registration.layout,
            "tcp",
            self.metadata,
        )
        self.socket.send(encode([hello, Invite(registration.epoch, self.metadata)]))
        welcomed = Codec(PeerMessage, 1 << 20)
        wait_until(
            lambda: self.socket.poll(100) and any(isinstance(m, Welcome) for m in welcomed.decode(self.socket.recv())),
            10,
            "the prefill takes the stranger for a decode",
        )

    def about(self, rng: random.Random, room: int) -> Message:
        """Make a message about a room that this peer has no part in."""
        epoch = self.target.registration.epoch
        handover = HandoverId(self.epoch, room, 1)
        kind = rng.randrange(4)
        if kind == 0:
            return Abort(epoch, handover, "mine")
        if kind == 1:
            return TransferRequest(
                epoch, handover, rng.randrange(1 << 31), 1, 0, [rng.randbytes(4 * rng.randrange(50))]
            )
        return RoomQueued(epoch, handover)

    def _serve(self) -> None:
        while not self._over:
            self.backend.progress(0.1)

    def _close(self) -> None:
        self._over = True
        self._thread.join()
        self.backend.close()


class Trap:
    """A listener that no process should ever connect to."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.socket = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.socket.settimeout(0)
        self.named = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.socket.getsockname()[1],
            "bootstrap_room": 4711,
        }

    def assert_unseen(self) -> None:
        """Assert that no connection has come."""
        with pytest.raises(BlockingIOError):
            self.socket.accept()


def test_a_bootstrap_host_from_a_client_is_not_followed_through_the_router(pair):
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        trap = Trap(stack)
        expected = answers(pair)
        body = {"input_ids": PROMPTS[0], "sampling_params": params, **trap.named}
        assert pair.router.generate(**body)["output_ids"] == expected[0]
        batch = {name: [value] * 2 for name, value in trap.named.items()}
        both = pair.router.post("/generate", {"input_ids": PROMPTS[:2], "sampling_params": params, **batch})
        assert [answer["output_ids"] for answer in both.json()] == expected[:2]
        body = {"model": "m", "prompt": "Hello", "max_tokens": 2, **trap.named}
        assert pair.router.post("/v1/completions", body).status_code in (200, 404)
        trap.assert_unseen()


@pytest.mark.slow
def test_nor_where_a_decode_computes_the_prompt(tmp_path, tiny_args):
    never = ("--disaggregation-threshold", "never")
    with pd_pair(tmp_path, "tcp", *tiny_args, *never) as pair, contextlib.ExitStack() as stack:
        trap = Trap(stack)
        params = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        body = {"input_ids": PROMPTS[0], "sampling_params": params, **trap.named}
        answer = pair.router.post("/generate", body)
        assert answer.status_code == 200, answer.text
        trap.assert_unseen()
        pair.assert_all_returned()
        assert pair.prefill.info()["counters"]["prompt_tokens"] == 0
