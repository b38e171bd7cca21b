"""Requests that claim memory, as tests of the queue of claims make them."""

from __future__ import annotations

import zlib

import msgspec

from pdserve.scheduler.req import Req, ReqState, Route
from support.sim import SimInstance, make_generate, make_options
from support.sim_pair import SimPair


def submit(pair: SimPair, rid: str, prompt, room: int = 0, *, legs=("prefill", "decode"), outputs: int = 4, **fields):
    """Submit a hand-over, or with ``room`` 0 a request that the decode computes itself, later than the last one."""
    pair.now += 0.001
    for leg in legs if room else ("decode",):
        side = getattr(pair, leg)
        message = make_generate(rid, prompt, max_new_tokens=outputs, **({"room": room} if room else {}))
        message = msgspec.structs.replace(message, arrival=pair.now, **fields)
        side.scheduler.arrivals.admit(message, pair.now)


def hold_back_prefill(pair: SimPair) -> None:
    """Let everything happen except the planning of the prefill, which begins nothing."""
    for _ in range(30):
        pair.advance()
        pair.decode.plan()
        while pair.decode.work():
            pass
        for side in (pair.decode, pair.prefill):
            while side.to_transfer.messages:
                side.transfer()
        while pair.to_prefill:
            pair.deliver_to_prefill()
        while pair.to_decode:
            pair.deliver_to_decode()


def states(pair: SimPair) -> dict[str, str]:
    return {r.req.rid: r.state.name for r in pair.decode.receivers.rooms.values()}


def prompt_of(number: int, length: int = 30) -> list[int]:
    return [(number * 31 + i * 7) % 97 for i in range(length)]


def both_ways(**changes) -> SimInstance:
    """Make an instance that takes hand-overs in both directions."""
    return SimInstance(make_options(**{"handover": "on", "schedule_policy": "fcfs"} | changes))


def make_req(sim: SimInstance, rid: str, length: int, leg: str, outputs: int = 4) -> Req:
    """Make a request that an instance has taken in."""
    route = Route.OUTGOING if leg == "prefill" else Route.INCOMING
    message = make_generate(rid, prompt_of(zlib.crc32(rid.encode()) % 50, length), max_new_tokens=outputs)
    return Req.create(message, route, ReqState.BOOTSTRAPPING, outputs, 1)
