"""Control connections under a cluster secret: with the right one, with another, and as a mere listener."""

from __future__ import annotations

import contextlib
import socket

import pytest
from support.control_wire import ControlSocket, framed
from support.dialled import Dialled
from support.machine import limit
from support.processes import wait_until

from pdserve.disaggregation.errors import ProtocolBroken
from pdserve.disaggregation.handover.control.connection_cipher import SEAL_BYTES, ConnectionCipher
from pdserve.disaggregation.handover.control.frames import LENGTH, greeting
from pdserve.disaggregation.handover.control.port import STRANGER_BYTES, ControlPort
from pdserve.messages.channel import encode
from pdserve.messages.handover import Heartbeat
from pdserve.runtime.cluster_secret import ClusterSecret, RouterKeys
from pdserve.server.cli import app

LIMIT = limit(10.0)
OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
BEAT = [Heartbeat("P")]


@contextlib.contextmanager
def two(listening, dialling):
    """Yield a control port, and one that has dialled it, with these keys."""
    port = ControlPort("127.0.0.1", keys=listening)
    client = Dialled("127.0.0.1", port.port, dialling)
    try:
        yield port, client
    finally:
        client.close()
        port.close()


def exchange(port, client):
    """Send a frame there and one back. Returns the reason if the connection ends instead."""
    client.send(BEAT)
    frames = []

    def there():
        client.recv()
        frames.append(port.recv())
        return frames[-1] or client.ended

    wait_until(there, LIMIT, "it has come, or the connection is over")
    if client.ended:
        return client.ended
    identity, messages = frames[-1]
    assert messages == BEAT
    assert port.send(identity, BEAT * 2) == []
    back = []
    wait_until(lambda: back.append(client.recv()) or back[-1], LIMIT, "the answer is there")
    assert back[-1] == BEAT * 2
    return None


@pytest.mark.parametrize(
    ("listening", "dialling"),
    [([OLD], [OLD]), ([OLD, NEW], [NEW, OLD]), ([NEW, OLD], [OLD]), ([], []), ([NEW], [NEW, OLD])],
)
def test_who_has_a_secret_in_common_gets_through(listening, dialling):
    with two(listening, dialling) as pair:
        assert exchange(*pair) is None


@pytest.mark.parametrize(
    ("listening", "dialling", "said"),
    [
        ([OLD], [OTHER], "another cluster secret"),
        ([OLD], [OTHER, OLD], "another cluster secret"),  # it uses its first
        ([OLD], [], "has no cluster secret"),
        ([], [OLD], "has a cluster secret"),
    ],
)
def test_who_has_none_in_common_is_hung_up_on(listening, dialling, said, caplog):
    with two(listening, dialling) as (port, client):
        assert exchange(port, client)
        assert port.connections == 0
    assert said in caplog.text or said in client.ended


def test_nothing_that_is_said_can_be_read_on_the_way():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Dialled("127.0.0.1", listener.getsockname()[1], [OLD])
        middle, _ = listener.accept()
        with middle, contextlib.closing(client):
            port = ControlPort("127.0.0.1", keys=[OLD])
            with contextlib.closing(port), socket.create_connection(("127.0.0.1", port.port)) as onwards:
                heard = {middle: b"", onwards: b""}
                for sock in heard:
                    sock.setblocking(False)
                client.send([Heartbeat("a name that is easy to find")])
                frames = []

                def passed():
                    for source, target in ((middle, onwards), (onwards, middle)):
                        with contextlib.suppress(BlockingIOError):
                            data = source.recv(1 << 16)
                            heard[source] += data
                            target.sendall(data)
                    client.recv()
                    frames.append(port.recv())
                    return frames[-1]

                wait_until(passed, LIMIT, "it has come through")
                assert frames[-1][1] == [Heartbeat("a name that is easy to find")]
    assert b"easy to find" not in heard[middle]
    assert b"Heartbeat" not in heard[middle]
    replay(heard[middle])


def replay(said: bytes) -> None:
    """Send an overheard conversation again to the same kind of port: nothing of it is accepted."""
    with contextlib.closing(ControlPort("127.0.0.1", keys=[OLD])) as port:
        stranger = ControlSocket(port.port, greet=False)
        stranger.send_bytes(said)
        frames = []

        def over():
            frames.append(port.recv())
            return stranger.has_ended()

        wait_until(over, LIMIT, "it is hung up on")
        stranger.close()
        assert not any(frames)


def sessions(ours=(OLD,), theirs=(OLD,)):
    dialling, dialled = ConnectionCipher(list(ours), dialled=True), ConnectionCipher(list(theirs), dialled=False)
    dialling.greeted(dialled.greeting)
    dialled.greeted(dialling.greeting)
    return dialling, dialled


def test_frames_are_taken_once_in_their_order_and_as_they_were():
    dialling, dialled = sessions()
    first, second = dialling.seal(b"one"), dialling.seal(b"two")
    assert dialled.open(first) == b"one"
    for bad in (first, second[:-1], second[:-1] + bytes([second[-1] ^ 1]), b"", bytes(100)):
        with pytest.raises(ProtocolBroken):
            dialled.open(bad)
        dialled._received -= 1  # a connection ends there; this one shall be asked again
    assert dialled.open(second) == b"two"
    assert dialling.open(dialled.seal(b"three")) == b"three"
    with pytest.raises(ProtocolBroken):
        dialled.open(dialled.seal(b"one's own"))


def test_each_connection_has_keys_of_its_own():
    assert len({sessions()[0].seal(b"the same") for _ in range(20)}) == 20


def test_a_key_that_makes_the_secret_known_is_refused():
    """A point of small order gives all the same result."""
    dialled = ConnectionCipher([OLD], dialled=False)
    with pytest.raises(ProtocolBroken, match="key is none"):
        dialled.greeted(greeting(b"\x01" + bytes(31)))


@pytest.mark.parametrize("more", [0, 1])
def test_a_sealed_frame_may_be_as_long_as_one_that_is_not(more, caplog):
    with contextlib.closing(ControlPort("127.0.0.1", keys=[OLD])) as port:
        stranger = ControlSocket(port.port, greet=False)
        announced = STRANGER_BYTES + SEAL_BYTES + more
        stranger.send_bytes(ConnectionCipher([OLD], dialled=True).greeting + LENGTH.pack(announced) + b"x" * announced)
        wait_until(lambda: not port.recv() and stranger.has_ended(), LIMIT, "it is hung up on")
        stranger.close()
    # With the right length it is read, and then found not to be sealed by this key.
    assert ("another cluster secret" in caplog.text, f"announced a frame of {announced}" in caplog.text) == (
        (True, False) if not more else (False, True)
    )


def test_a_frame_that_is_not_sealed_is_refused(caplog):
    with contextlib.closing(ControlPort("127.0.0.1", keys=[OLD])) as port:
        stranger = ControlSocket(port.port, greet=False)
        stranger.send_bytes(ConnectionCipher([OLD], dialled=True).greeting + framed(encode(BEAT)))
        wait_until(lambda: not port.recv() and stranger.has_ended(), LIMIT, "it is hung up on")
        stranger.close()
    assert "another cluster secret" in caplog.text


def test_a_routers_key_opens_no_control_connection(tmp_path, capsys):
    (tmp_path / "secret").write_bytes(OLD)
    assert app(["router-key", "--cluster-secret-file", str(tmp_path / "secret")], result_action="return_value") == 0
    (tmp_path / "router-key").write_text(capsys.readouterr().out)
    secret = ClusterSecret.read(str(tmp_path / "secret"))
    router = RouterKeys.read(str(tmp_path / "router-key"))
    assert router._secrets == secret.for_routers()._secrets
    for keys in (router.keys("control"), list(router._secrets)):
        with two(secret.keys("control"), keys) as pair:
            assert exchange(*pair)
    with two(secret.keys("control"), secret.keys("control")) as pair:
        assert exchange(*pair) is None
