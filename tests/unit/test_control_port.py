"""A prefill's control port, with real sockets and no scheduler: who becomes a peer, what a turn reads, what is kept."""

from __future__ import annotations

import select

import msgspec
import pytest
import zmq
from support.control_wire import ControlSocket, framed
from support.handovers import named
from support.processes import wait_until

from pdserve.disaggregation.bootstrap.registration import Reached, Registration
from pdserve.disaggregation.handover import decode_peers
from pdserve.disaggregation.handover.control import server as control_server
from pdserve.disaggregation.handover.control.client import ControlClient
from pdserve.disaggregation.handover.control.frames import FRAME_MESSAGES, LENGTH, MESSAGES_A_TURN, TO_PREFILL_BYTES
from pdserve.disaggregation.handover.control.server import ControlServer
from pdserve.disaggregation.handover.decode_peers import DecodePeers
from pdserve.disaggregation.handover.prefill_link import LinkState, PrefillLink
from pdserve.disaggregation.handover.prefill_links import WORKER_SECONDS, PrefillLinks
from pdserve.disaggregation.wire.reactor import Reactor
from pdserve.messages.channel import encode
from pdserve.messages.decode import UndeclaredMessage
from pdserve.messages.handover import (
    PROTOCOL_VERSION,
    AuxData,
    Heartbeat,
    Hello,
    Refused,
    RoomQueued,
    TransferDone,
    TransferFailed,
    Welcome,
)
from pdserve.messages.outputs import Timing
from pdserve.messages.worker import ConnectPeer, DisconnectPeer, KVLayout, PeerConnected, PeerLinkDown, WorkerReady

LAYOUT = KVLayout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)
WORKER = WorkerReady("f", 100, 2048, 4096, LAYOUT, "cpu", "cpu", "float32", b"mine", {})
LIMIT = 10.0


class Host:
    """What the hand-over sees of a scheduler: an epoch, and a worker that is told things."""

    epoch = "P"

    def __init__(self) -> None:
        self.told = []

    def to_worker(self, message) -> None:
        self.told.append(message)


class Port:
    """A control port with its peers; ``clients`` connect to it."""

    def __init__(self) -> None:
        self.server = ControlServer("127.0.0.1")
        self.reactor = Reactor()
        self.host = Host()
        self.heard = []
        self.gone = []
        self.now = 100.0
        self.peers = DecodePeers(
            self.host,
            WORKER,
            "tcp",
            (0.3, 1.5),
            self.server,
            lambda peer, message, now: self.heard.append(message),
            lambda peer, reason: self.gone.append((peer.epoch, reason)),
        )
        self.sockets = []

    def socket(self, **how):
        """A stranger's."""
        self.sockets.append(ControlSocket(self.server.port, **how))
        return self.sockets[-1]

    def client(self):
        """A decode's."""
        client = ControlClient(self.reactor, "127.0.0.1", self.server.port)
        self.sockets.append(client)
        return client

    def readable(self):
        """Whether the loop would wake for it."""
        return bool(select.select([self.server], [], [], 0)[0])

    def turn(self) -> None:
        self.peers.poll(self.now)
        self.peers.flush()

    def until(self, condition) -> None:
        def turned():
            self.turn()
            return condition()

        wait_until(turned, LIMIT, "the port has heard it")

    def answer(self, socket):
        """What the port says next, heartbeats apart."""
        declared = list[Welcome | Refused | Heartbeat | TransferFailed]
        while True:
            self.until(lambda: socket.poll(0))
            said = msgspec.msgpack.decode(socket.recv(), type=declared)
            if said := [message for message in said if not isinstance(message, Heartbeat)]:
                return said

    def close(self) -> None:
        for socket in (*self.sockets, self.server):
            socket.close()
        self.reactor.close()


@pytest.fixture
def port():
    port = Port()
    yield port
    port.close()


def hello(sender="D", metadata=b"of D, with its secret", **changes):
    fields = {"version": PROTOCOL_VERSION, "fingerprint": "f", "layout": LAYOUT, "backend": "tcp", **changes}
    return encode([Hello("P", sender, metadata=metadata, **fields)])


def connect(port, socket, sender="D", metadata=b"of D, with its secret"):
    """Become a peer; returns the link's number."""
    before = links(port, sender, metadata)
    socket.send(hello(sender, metadata))
    port.until(lambda: links(port, sender, metadata) != before)
    link = links(port, sender, metadata)[-1]
    port.peers.on_peer_connected(PeerConnected(sender, link))
    assert port.answer(socket) == [Welcome(sender)]
    return link


def links(port, sender, metadata=b"of D, with its secret"):
    """Numbers of the links that the worker was told to open."""
    told = [m for m in port.host.told if isinstance(m, ConnectPeer)]
    return [m.link for m in told if (m.peer, m.metadata) == (sender, metadata)]


def test_layouts_may_differ_in_their_order_only(port):
    blocks = msgspec.structs.replace(LAYOUT, order="blocks")
    unlike, other = port.socket(), port.socket()
    unlike.send(hello("E", layout=msgspec.structs.replace(blocks, page_size=2 * LAYOUT.page_size)))
    [refused] = port.answer(unlike)
    assert isinstance(refused, Refused)
    assert "--page-size" in refused.reason
    other.send(hello("D", layout=blocks))
    port.until(lambda: links(port, "D"))


def test_a_forged_hello_does_not_end_the_link_of_its_victim(port):
    honest, stranger = port.socket(), port.socket()
    connect(port, honest)
    stranger.send(hello(metadata=b"of the stranger"))
    (refused,) = port.answer(stranger)
    assert "another data port" in refused.reason
    honest.send(encode([RoomQueued("P", named(7))]))
    port.until(lambda: port.heard == [RoomQueued("P", named(7))])
    assert port.gone == []
    assert not [m for m in port.host.told if isinstance(m, DisconnectPeer)]


def test_the_same_instance_may_connect_anew(port):
    first = connect(port, port.socket())
    again = port.socket()
    again.send(hello())
    port.until(lambda: port.gone == [("D", "the decode instance connected anew")])
    assert links(port, "D") == [first]
    port.peers.on_peer_link_down(PeerLinkDown("D", first))
    second = links(port, "D")[-1]
    assert second != first
    port.peers.on_peer_link_down(PeerLinkDown("D", first))  # said twice, it harms nobody
    port.peers.on_peer_connected(PeerConnected("D", first))
    port.peers.on_peer_connected(PeerConnected("D", second))
    assert port.answer(again) == [Welcome("D")]


def test_one_peer_too_many_is_refused_with_the_reason(port, monkeypatch):
    monkeypatch.setattr(decode_peers, "MAX_PEERS", 2)
    for sender in ("a", "b"):
        connect(port, port.socket(), sender)
    third = port.socket()
    third.send(hello("c"))
    (refused,) = port.answer(third)
    assert "2 decode instances are connected" in refused.reason
    port.now += 2  # the others fall silent: there is room again
    port.turn()
    third.send(hello("c"))
    port.until(lambda: links(port, "c"))


def harmless(port, stranger, data):
    """One refusal, and nothing else, comes of ``data``."""
    honest = port.socket()
    connect(port, honest)
    told = list(port.host.told)
    stranger.send_bytes(data)
    port.until(lambda: port.peers.refused == 1)
    assert (port.heard, port.gone, port.host.told) == ([], [], told)
    assert [peer["epoch"] for peer in port.peers.info()] == ["D"]


@pytest.mark.parametrize(
    "payload",
    [
        b"\x81\xa1\xff\x01",
        b"\x91\x82\xa4type\xa9Heartbeat\xa5epoch\xa3\xff\xfe\xfd",
        b"x" * 7,
        encode([Heartbeat("P"), Heartbeat("P")])[:-1],
        encode([Heartbeat("another life")]),
        encode([RoomQueued("P", named(1))]),
        hello(version=PROTOCOL_VERSION + 1),
    ],
)
def test_what_strangers_send_is_refused_and_nothing_else_happens(port, payload):
    stranger = port.socket()
    harmless(port, stranger, framed(payload))
    assert not stranger.has_ended()  # a frame that means nothing is dropped, and no more


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        LENGTH.pack((1 << 32) - 1) + bytes(100),
        LENGTH.pack(TO_PREFILL_BYTES) + b"no Hello is as long as that",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_frame_of_no_or_too_many_bytes_ends_its_connection(port, data):
    stranger = port.socket()
    harmless(port, stranger, data)
    wait_until(stranger.has_ended, LIMIT, "it was hung up on")


def test_a_frame_that_is_too_long_ends_its_connection_only(port):
    honest, stranger = port.socket(), port.socket()
    connect(port, honest)
    connect(port, stranger, "S")
    stranger.send_bytes(LENGTH.pack(TO_PREFILL_BYTES + 1) + bytes(1000))
    port.until(stranger.has_ended)
    assert port.heard == []
    assert [epoch for epoch, _ in port.gone] == ["S"]
    honest.send(encode([RoomQueued("P", named(7))]))
    port.until(lambda: port.heard)


def test_connections_without_a_hello_cost_nothing_here(port):
    idle = [port.socket() for _ in range(50)]
    for socket in idle:
        socket.send(encode([Heartbeat("P")]))
    connect(port, port.socket())
    assert len(port.peers._peers) == 1
    assert port.peers._closing == {}


def test_a_turn_reads_so_much_and_the_rest_wakes_the_loop_again(port):
    stranger = port.socket()
    connect(port, stranger)
    frame = encode([RoomQueued("P", named(1))] * FRAME_MESSAGES)
    frames = 3 * MESSAGES_A_TURN // FRAME_MESSAGES
    for _ in range(frames):
        stranger.send(frame)
    poller = zmq.Poller()
    poller.register(port.server.fileno(), zmq.POLLIN)
    turns = 0
    while len(port.heard) < frames * FRAME_MESSAGES:
        assert poller.poll(int(LIMIT * 1000))
        before = len(port.heard)
        port.turn()
        assert len(port.heard) - before <= MESSAGES_A_TURN
        turns += 1
    assert turns >= 3


def test_garbage_uses_up_a_turn_too(port, monkeypatch):
    monkeypatch.setattr(decode_peers, "MESSAGES_A_TURN", 10)
    stranger = port.socket()
    for _ in range(35):
        stranger.send(b"garbage")
    wait_until(port.readable, LIMIT, "the first has come")
    port.until(lambda: port.peers.refused == 35)
    before = port.peers.refused
    for _ in range(35):
        stranger.send(b"garbage")
    wait_until(port.readable, LIMIT, "the first has come")
    port.turn()
    assert port.peers.refused <= before + 10


def test_an_answer_too_long_for_a_frame_fails_its_room_only(port, monkeypatch):
    honest = port.socket()
    connect(port, honest)
    (peer,) = port.peers._peers.values()
    monkeypatch.setattr(control_server, "TO_DECODE_BYTES", 200)
    port.peers.send(peer, TransferDone("D", named(7), 1, AuxData(1, 0, Timing())))
    (failed,) = port.answer(honest)
    assert (failed.handover.room, failed.status) == (7, 400)
    assert "top_logprobs" in failed.reason


def test_a_peer_that_vanished_is_written_to_in_vain(port):
    stranger = port.socket()
    connect(port, stranger)
    (peer,) = port.peers._peers.values()
    stranger.close(linger=0)
    for _ in range(100):
        port.peers.send(peer, Heartbeat("D"))
        port.turn()
    port.server.send(-1, [Heartbeat("D")])


def test_a_peer_that_is_gone_is_hung_up_on(port):
    silent = port.socket()
    connect(port, silent)
    port.now += 2
    port.turn()
    assert port.gone == [("D", "the decode instance was silent for 1.5 s")]
    wait_until(silent.has_ended, LIMIT, "it need not wait for its own timeout")


def test_a_peer_whose_connection_ends_is_gone_at_once(port):
    honest = port.socket()
    connect(port, honest)
    honest.close()
    port.until(lambda: port.gone)
    assert port.gone == [("D", "its control connection ended: the peer closed the connection")]
    assert port.host.told[-1] == DisconnectPeer("D", 1)


def arrived(port):
    """The next frame, without anybody acting on it."""
    frames = []
    wait_until(lambda: frames.append(port.server.recv()) or frames[-1], LIMIT, "a frame has come")
    return frames[-1]


def heard(client):
    """The next frame that a decode gets; raises ``UndeclaredMessage``."""
    frames = []
    wait_until(lambda: frames.append(client.recv()) or frames[-1] is not None, LIMIT, "the client has it")
    return frames[-1]


def ended(client):
    """Why the connection is over, once everything was read."""
    return client.recv() is None and client.connection_ended()


def test_a_decode_writes_to_a_prefill_that_died_in_vain(port):
    client = port.client()
    client.send([Heartbeat("P")])
    identity, _ = arrived(port)
    port.server.drop(identity)
    wait_until(lambda: ended(client), LIMIT, "the client notices")
    assert client.connection_ended() == "the prefill instance closed the connection or died"
    for _ in range(10):
        client.send([Heartbeat("P")])
    assert not select.select([port.reactor], [], [], 0)[0]  # its owner can sleep


def test_a_decode_takes_messages_of_one_frame(port):
    client = port.client()
    client.send([Heartbeat("P")])
    identity, _ = arrived(port)
    (connection,) = port.server._strangers.values()
    for payload in (b"two", b"\x91\xa3\xff\xfe\xfd"):
        connection.send([payload])
        with pytest.raises(UndeclaredMessage):
            heard(client)
    port.server.send(identity, [Heartbeat("D")])
    assert heard(client) == [Heartbeat("D")]
    assert client.recv() is None
    assert client.connection_ended() is None
    connection.send([b""])
    wait_until(lambda: ended(client), LIMIT, "the client notices")
    assert "broke the protocol" in client.connection_ended()


class Reader:
    """A decode's links, with a client that says what it is told to."""

    def __init__(self) -> None:
        self.heard = []
        self.gone = []
        self.links = PrefillLinks(
            Host(),
            WORKER,
            "tcp",
            (0.3, 1.5),
            None,
            lambda host, port: None,
            lambda link, message: self.heard.append(message),
            self.gone.append,
            lambda link: None,
        )
        self.link = PrefillLink("p", 1, state=LinkState.GREETING, peer_epoch="prefill")
        self.frames = []

    def recv(self):
        frame = self.frames.pop(0) if self.frames else None
        if frame == b"garbage":
            raise UndeclaredMessage("dropped a frame")
        return frame

    def read(self) -> None:
        self.links._read(self.link, self, 1.0)


def test_a_turn_of_a_decode_reads_so_much_too():
    reader = Reader()
    failed = TransferFailed("P", named(1, epoch="P"), 503, "why")
    reader.frames = [[failed] * FRAME_MESSAGES, b"garbage", [], *[[failed] * FRAME_MESSAGES] * 4]
    reader.read()
    assert len(reader.heard) <= MESSAGES_A_TURN + FRAME_MESSAGES
    assert reader.frames
    reader.read()
    reader.read()
    assert len(reader.heard) == 5 * FRAME_MESSAGES
    assert reader.links.refused == 1
    reader.frames = [b"garbage"] * (MESSAGES_A_TURN + 5)
    reader.read()
    assert len(reader.frames) == 5


def test_a_prefill_is_not_linked_before_it_was_greeted():
    reader = Reader()
    reader.frames = [[Welcome("P")]]
    reader.read()
    assert reader.link.state is LinkState.GREETING
    reader.link.greeted = True
    reader.frames = [[Welcome("P")]]
    reader.read()
    assert reader.link.state is LinkState.READY


def test_who_asks_for_a_prefill_that_does_not_let_go_is_told_soon():
    """A frozen shm prefill holds our memory, and with it the address: nobody waits longer than for a dead one."""
    reader, asked = Reader(), []
    links = reader.links
    links._fetch_registration = lambda host, port: asked.append(port)
    first = links.link_to("p", 1, 0.0)
    first.state, first.peer_epoch, first.down = LinkState.READY, "prefill", False
    links._gone(first, "it was silent")
    second = links.link_to("p", 1, 10.0)
    links.poll(11.4)
    assert second.state is LinkState.ROUTING
    links.poll(11.6)
    assert (second.state, second.status, reader.gone) == (LinkState.GONE, 503, [first, second])
    assert "holds this instance's KV memory" in second.reason
    assert asked == [1]
    third = links.link_to("p", 1, 12.0)
    links.on_peer_link_down(PeerLinkDown("prefill", first.number))
    links.poll(12.1)
    assert (third.state, asked) == (LinkState.ROUTING, [1, 1])


def test_news_of_an_earlier_link_to_a_prefill_is_not_taken_for_the_next():
    reader = Reader()
    first, _ = reader.links.link_to("p", 1, 0.0), reader.links.link_to("q", 1, 0.0)
    first.state, first.peer_epoch, first.down = LinkState.READY, "prefill", False
    reader.links.on_peer_link_down(PeerLinkDown("prefill", first.number))
    second = reader.links.link_to("p", 1, 1.0)
    second.state, second.peer_epoch = LinkState.GREETING, "prefill"
    reader.links.on_peer_link_down(PeerLinkDown("prefill", first.number))
    assert (second.state, reader.gone) == (LinkState.GREETING, [first])


def route_of(epoch="prefill") -> Reached:
    return Reached(
        Registration(epoch=epoch, control_port=1, fingerprint="f", layout=LAYOUT, backend="tcp", ttl=5.0), "127.0.0.1"
    )


def test_an_instance_with_two_names_has_one_link():
    """A second one would end the first: news of links are told apart by instance."""
    reader = Reader()
    links, told = reader.links, reader.links._host.told
    first, second, third = (links.link_to(host, 1, 0.0) for host in "pqr")
    links.on_found("p", 1, route_of(), 0.1)
    links.on_found("q", 1, route_of(), 0.1)
    assert (second.state, second.asked, second.same_as) == (LinkState.ROUTING, False, None)  # it asks again
    first.state, first.client, first.greeted, first.heard_at = LinkState.READY, Silent(), True, 0.2
    links.on_found("q", 1, route_of(), 0.3)
    assert second.same_as is links.link_to("q", 1, 0.4) is first
    assert [m.link for m in told if isinstance(m, ConnectPeer)] == [first.number]
    links.on_peer_link_down(PeerLinkDown("prefill", first.number))
    assert reader.gone == [first]
    assert links.link_to("q", 1, 0.5) is not first
    assert third.state is LinkState.ROUTING


class Silent:
    """A client that nobody talks to."""

    def send(self, messages) -> None:
        """Nowhere."""

    def close(self) -> None:
        """Nothing to close."""


def test_a_worker_that_does_not_answer_ends_the_link():
    reader = Reader()
    link = reader.links.link_to("p", 1, 0.0)
    reader.links.on_found("p", 1, route_of(), 1.0)
    reader.links.poll(1.0 + WORKER_SECONDS - 0.1)
    assert link.state is LinkState.GREETING
    reader.links.poll(1.0 + WORKER_SECONDS + 0.1)
    assert (link.state, reader.gone) == (LinkState.GONE, [link])
