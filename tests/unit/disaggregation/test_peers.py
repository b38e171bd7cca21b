"""Two instances that find each other: either may dial, both may, and KV goes either way."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import get_args

import msgspec
import pytest
from support.dialled import Dialled
from support.handovers import named
from support.layouts import uniform_layout
from support.processes import wait_until
from support.side import LIMIT, Side, make_worker

from pdserve.disaggregation.bootstrap.finder import REACH_SECONDS
from pdserve.disaggregation.bootstrap.registration import Reached
from pdserve.disaggregation.handover.control.port import ControlPort, read_messages
from pdserve.disaggregation.handover.kv_directions import WORKER_SECONDS
from pdserve.disaggregation.handover.local_instance import LocalInstance
from pdserve.disaggregation.handover.peer import PeerState, Reading, Writing
from pdserve.messages.handover import (
    Abort,
    AbortAck,
    Declined,
    FirstToken,
    Forecast,
    ForecastRequest,
    Hello,
    Invite,
    Progress,
    Refused,
    RoomQueued,
    ToReceiver,
    ToSender,
    TransferDone,
    TransferFailed,
    TransferRequest,
    Welcome,
    Withdraw,
    Withdrawn,
)
from pdserve.messages.outputs import Timing
from pdserve.messages.worker import AdmitPeer, ConnectPeer, DisconnectPeer, PeerAdmitted, PeerFailed, PeerLinkDown


@pytest.fixture
def sides():
    """Yield two sides. "a" has the smaller epoch."""
    both = Side("a"), Side("b")
    yield both
    for side in both:
        side.close()


def until(sides, condition) -> None:
    """Turns of both until then, with workers that do what they are told."""

    def turned():
        for side in sides:
            side.turn()
            side.work()
        return condition()

    wait_until(turned, LIMIT, "it has come to pass")


def states(side):
    return [(p.state, p.reading, p.writing) for p in side.peers.table.by_connection.values()]


OPEN, READ, WRITTEN, CLOSED = PeerState.OPEN, Reading.READY, Writing.READY, (Reading.CLOSED, Writing.CLOSED)


def test_kv_flows_to_whom_it_is_wanted_by_and_no_other_way(sides):
    a, b = sides
    peer = a.ask_for(b)
    until(sides, lambda: peer.readable)
    assert states(a) == [(OPEN, READ, Writing.CLOSED)]
    assert states(b) == [(OPEN, Reading.CLOSED, WRITTEN)]


def test_one_connection_serves_both_directions(sides):
    a, b = sides
    there = a.ask_for(b)
    until(sides, lambda: there.readable)
    back = b.ask_for(a)
    assert back.same_as is next(iter(b.peers.table.by_connection.values()))
    until(sides, lambda: back.same_as.readable)
    assert states(a) == states(b) == [(OPEN, READ, WRITTEN)]
    assert [len(side.port._peers) for side in sides] == [1, 1]
    assert b.ask_for(a) is back.same_as
    for side, other in ((a, b), (b, a)):
        peer = next(iter(side.peers.table.by_connection.values()))
        peer.send(RoomQueued(other.epoch, named(1, epoch=side.epoch)))
        peer.send(AbortAck(other.epoch, named(2, epoch=other.epoch)))
    until(sides, lambda: len(a.heard) == len(b.heard) == 2)


@pytest.mark.parametrize("first", [0, 1])
def test_who_dial_each_other_at_once_share_one_connection(sides, first):
    """Either of the two may be read first."""
    a, b = sides
    peers = a.ask_for(b), b.ask_for(a)
    for side in sides:
        side.peers.flush()
    for _ in range(3):
        sides[first].turn()
        sides[first].work()
    until(sides, lambda: all(peer.readable for peer in peers))
    assert states(a) == states(b) == [(OPEN, READ, WRITTEN)]
    until(sides, lambda: [len(side.port._peers) for side in sides] == [1, 1])
    assert a.gone == b.gone == []
    assert peers[0].connection in a.port._peers


def test_an_instance_does_not_dial_itself(sides):
    a, _ = sides
    peer = a.ask_for(a)
    assert (peer.gone, peer.status) == (True, 400)
    assert "own" in peer.reason


def test_an_instance_with_two_names_is_one_peer(sides):
    a, b = sides
    first, second = a.ask_for(b, "p"), a.ask_for(b, "q")
    assert second.same_as is first is a.peers.peer_at("q", 1, a.now)
    until(sides, lambda: first.readable)
    assert sum(isinstance(m, AdmitPeer) for m in a.commands) == 0
    a.peers.on_event(PeerLinkDown("b", first.number), a.now)
    assert a.gone == [("b", "its worker closed the data link or died")]
    assert a.peers.peer_at("q", 1, a.now) is not first
    assert a.asked[-1] == ("q", 1)


def test_another_instance_at_the_control_port_is_not_taken_for_the_one_that_was_found(sides):
    a, b = sides
    peer = a.peers.peer_at("p", 1, a.now)
    a.peers.on_found("p", 1, Reached(b.registration(epoch="c"), "127.0.0.1"), a.now)
    until(sides, lambda: peer.gone)
    assert "earlier start" in peer.reason  # b was called c
    assert peer.status == 409


def test_a_bootstrap_server_that_names_another_pool_of_a_connected_peer_fails_its_own_requests_only(sides):
    a, b = sides
    peer = a.ask_for(b)
    until(sides, lambda: peer.readable)
    liar = a.peers.peer_at("liar", 1, a.now)
    a.peers.on_found("liar", 1, Reached(b.registration(pool="f" * 64), "127.0.0.1"), a.now)
    assert (liar.gone, peer.gone) == (True, False)
    assert "connected as another" in liar.reason
    assert a.peers.peer_at("other", 1, a.now) is peer


def test_a_bootstrap_server_without_a_registration_is_no_peer(sides):
    a, _ = sides
    peer = a.peers.peer_at("p", 1, a.now)
    a.peers.on_found("p", 1, "it is draining", a.now)
    assert a.lost == [peer]
    assert peer.reason == "the bootstrap server p:1 gave no registration: it is draining"
    a.peers.on_found("p", 1, "said twice", a.now)
    assert a.peers.peer_at("p", 1, a.now) is not peer


def test_a_refusal_ends_both_ends(sides):
    a, b = sides
    peer = a.ask_for(b)

    def failed():
        for side in sides:
            side.turn()
        a.work()
        for command in [m for m in b.commands if isinstance(m, ConnectPeer)]:
            b.commands.remove(command)
            b.peers.on_event(PeerFailed(command.peer, command.link, "no route to host"), b.now)
        return peer.gone

    wait_until(failed, LIMIT, "it was reported")
    assert (peer.status, peer.reason) == (409, "it refused this instance: no route to host")
    assert b.gone == [("a", "the workers can't reach each other: no route to host")]
    assert [m for m in b.commands if isinstance(m, DisconnectPeer)]


def test_asking_for_a_peer_that_does_not_let_go_fails_soon(sides):
    """A frozen shm prefill holds our memory. Waiting for its next link takes no longer than for a dead one."""
    a, b = sides
    first = a.ask_for(b)
    until(sides, lambda: first.readable)
    a.peers._gone(first, "it was silent")
    second = a.ask_for(b)

    def turned(condition):
        def both():
            for side in sides:
                side.turn()
            b.work()
            return condition()

        wait_until(both, LIMIT, "it has come to pass")

    turned(lambda: second.state is OPEN)
    a.now += REACH_SECONDS - 0.1
    b.now = second.heard_at = a.now
    a.peers._advance(second, a.now)
    assert second.reading is Reading.WANTED
    a.now += 0.2
    a.peers._advance(second, a.now)
    assert (second.gone, second.status) == (True, 503)
    assert "holds this instance's KV memory" in second.reason
    third = a.ask_for(b)
    a.peers.on_event(PeerLinkDown("b", first.number), a.now)
    assert a.down == [first]
    until(sides, lambda: third.readable)


def test_an_event_of_an_earlier_link_is_not_taken_for_the_next(sides):
    a, b = sides
    first = a.ask_for(b)
    until(sides, lambda: first.readable)
    a.peers.on_event(PeerLinkDown("b", first.number), a.now)
    second = a.ask_for(b)
    until(sides, lambda: second.readable)
    a.peers.on_event(PeerLinkDown("b", first.number), a.now)
    a.peers.on_event(PeerFailed("b", first.number, "late"), a.now)
    a.peers.on_event(PeerAdmitted("b", first.number), a.now)
    assert second.readable
    assert a.lost == [first]


def test_a_worker_that_does_not_answer_ends_the_link(sides):
    a, b = sides
    peer = a.ask_for(b)

    def turned():
        a.turn()
        b.turn()
        return peer.state is OPEN

    wait_until(turned, LIMIT, "both have said Hello")
    assert peer.reading is Reading.ADMITTING
    a.now += WORKER_SECONDS + 0.1
    peer.heard_at = a.now
    a.turn()
    assert peer.gone
    assert "the workers did not open a link" in peer.reason


def test_whatever_is_declared_for_a_hand_over_arrives(sides):
    a, b = sides
    peer = a.ask_for(b)
    until(sides, lambda: peer.readable)
    name = named(1, epoch="a")
    asks = [
        RoomQueued("b", name),
        ForecastRequest("b", name),
        TransferRequest("b", name, 4, 0, 0, [b""]),
        Withdraw("b", name),
        Abort("b", name, "late"),
        Declined("b", name),
    ]
    answers = [
        Forecast("a", name, 1.0),
        Progress("a", name, 1),
        FirstToken("a", name, 1, 0, Timing()),
        TransferDone("a", name, [], Timing()),
        TransferFailed("a", name, 500, "late"),
        Withdrawn("a", name, begun=False),
        AbortAck("a", name),
    ]
    assert {type(m) for m in asks} == set(get_args(ToSender))
    assert {type(m) for m in answers} == set(get_args(ToReceiver))
    peer.unsent += asks
    next(iter(b.peers.table.by_connection.values())).unsent += answers
    until(sides, lambda: len(a.heard) == len(answers) and len(b.heard) == len(asks))
    assert (b.heard, a.heard) == (asks, answers)


def test_what_a_peer_may_not_send_is_dropped(sides):
    """A peer may ask only when welcomed, answer only when asked, and send nothing in another's name."""
    a, b = sides
    peer = a.ask_for(b)
    until(sides, lambda: peer.readable)
    refused = [side.peers.refused for side in sides]
    peer.send(RoomQueued("b", named(1, epoch="c")))
    peer.send(AbortAck("b", named(1, epoch="b")))
    back = next(iter(b.peers.table.by_connection.values()))
    back.send(Abort("a", named(1, epoch="b"), "mine"))
    back.send(AbortAck("a", named(1, epoch="c")))
    until(sides, lambda: [side.peers.refused for side in sides] == [refused[0] + 2, refused[1] + 2])
    assert a.heard == b.heard == []


def stranger_in_the_name_of(victim: Side) -> Side:
    """Make a side that claims the victim's epoch, and has a pool of its own."""
    stranger = Side(victim.epoch)
    stranger.peers._local = stranger.peers._local._replace(worker=make_worker(b"the stranger's pool"))
    return stranger


@pytest.mark.parametrize("when", ["before", "while it is dialled", "after"])
@pytest.mark.parametrize("wanting", [0, 1])
def test_a_stranger_is_not_asked_for_kv_in_the_name_of_another(sides, when, wanting):
    """It knows all that a registration tells, and dials first."""
    victim, wants = sides[1 - wanting], sides[wanting]
    stranger = stranger_in_the_name_of(victim)
    everybody = (*sides, stranger)
    try:
        peer = None
        if when != "before":
            peer = wants.ask_for(victim)
        if when == "after":
            until(everybody, lambda: peer.readable)
        intruding = stranger.ask_for(wants)
        for side in (stranger, wants):
            side.peers.flush()
        if when == "before":
            until(everybody, lambda: intruding.state is OPEN)
            peer = wants.ask_for(victim)
        until(everybody, lambda: peer.readable and (intruding.gone or when == "while it is dialled"))
        assert states(victim) == [(OPEN, Reading.CLOSED, WRITTEN)]
        assert not any(isinstance(m, ConnectPeer) for m in stranger.commands)
        until(everybody, lambda: len(wants.peers.table.by_connection) == 1)
    finally:
        stranger.close()


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_a_dial_that_fails_leaves_the_connection_that_the_other_made(sides, how):
    """One of two may be behind something that rejects all connections."""
    a, b = sides
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = a.peers.peer_at("p", 1, a.now)
        reached = Reached(b.registration(control_port=silent.getsockname()[1]), "127.0.0.1")
        a.peers.on_found("p", 1, reached, a.now)
        back = b.ask_for(a)
        until(sides, lambda: there.spare is not None)
        assert (there.state, back.state) == (PeerState.GREETING, PeerState.GREETING)
        if how == "silent":
            a.now += 1.6
            until(sides, lambda: there.state is OPEN)
    until(sides, lambda: there.readable and back.readable)
    assert a.gone == b.gone == []
    assert states(a) == states(b) == [(OPEN, READ, WRITTEN)]


@pytest.mark.parametrize("keys", [[], [b"k" * 32]], ids=["open", "sealed"])
def test_an_instance_that_is_closed_says_so_and_is_found_again(keys):
    with closing(Side("a", keys)) as a, closing(Side("b", keys)) as b:
        b.peers.close("its memory was given back")
        peer = a.ask_for(b)
        until((a, b), lambda: peer.gone)
        assert (peer.status, peer.reason) == (503, "it refused this instance: its memory was given back")
        b.peers.closed = None
        again = a.ask_for(b)
        until((a, b), lambda: again.readable)


@pytest.mark.parametrize("status", [409, 503])
def test_a_refused_dial_leaves_the_connection_that_the_other_made(sides, status):
    """An instance may refuse a Hello, and dial once it takes peers again, before its refusal is read."""
    a, b = sides
    with closing(ControlPort("127.0.0.1")) as closed:
        there = a.peers.peer_at("p", 1, a.now)
        a.peers.on_found("p", 1, Reached(b.registration(control_port=closed.port), "127.0.0.1"), a.now)
        back = b.ask_for(a)
        until(sides, lambda: there.spare is not None)
        heard: list[int] = []

        def greeted():
            for side in sides:
                side.turn()
            heard.extend(identity for identity, _ in read_messages(closed))
            return heard

        wait_until(greeted, LIMIT, "its Hello has arrived")
        closed.send(heard[0], [Refused("a", "its memory was given back", status)])
        until(sides, lambda: there.readable and back.readable)
    assert a.gone == b.gone == []


def test_a_hello_of_an_earlier_try_replaces_no_peer(sides):
    a, b = sides
    peer = a.ask_for(b)
    until(sides, lambda: peer.readable)
    late = Dialled("127.0.0.1", b.port.port)
    late.send([a.peers._local.hello("b", peer.number, dialling=True)])
    until(sides, lambda: late.recv() is None and late.ended)
    late.close()
    assert peer.readable
    assert b.gone == []
    again = Dialled("127.0.0.1", b.port.port)
    again.send([a.peers._local.hello("b", peer.number + 1, dialling=True)])
    until(sides, lambda: again.recv() or b.gone)
    again.close()
    assert b.gone[0] == ("a", "it connected anew")


def test_no_stranger_learns_how_to_reach_a_pool_by_saying_hello(sides):
    a, b = sides
    stranger = Dialled("127.0.0.1", b.port.port)
    stranger.send([a.peers._local.hello("b", 1, dialling=True), Invite("b", b"mine")])
    heard = []
    until([b], lambda: heard.extend(stranger.recv() or []) or any(isinstance(m, Welcome) for m in heard))
    stranger.close()
    assert [m.metadata for m in heard if isinstance(m, Hello)] == [b""]
    assert not any(isinstance(m, Invite) for m in heard)


def test_one_that_keeps_what_lies_behind_windows_is_refused_by_one_that_does_not():
    """As ranks do: the reason says which flags to look at."""
    kept = uniform_layout(16, 4, 1, 8, "float32", 4096)
    apart = uniform_layout(16, 2, 1, 8, "float32", 2048, window=32)
    ours = LocalInstance("P", msgspec.structs.replace(make_worker(), layout=apart), "tcp")
    theirs = LocalInstance("D", msgspec.structs.replace(make_worker(), layout=kept), "tcp")
    problem = ours.problem(theirs.hello("P", 1, dialling=False))
    assert "instances D (1 groups of pages) and P (2 groups of pages)" in problem
    assert "--tp-size" in problem
    assert ours.problem(LocalInstance("D", ours.worker, "tcp").hello("P", 1, dialling=False)) is None
