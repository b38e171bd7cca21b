"""The hostile campaign's judge must be able to say no, and a seed must stand for one list of requests."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass, field

import pytest
from hostile.bodies import Bodies
from hostile.cluster import Usage
from hostile.neighbour import last_event
from hostile.other_uid import unix_sockets
from hostile.peer_messages import Messages
from hostile.watch import LEFT_BYTES, LEFT_DESCRIPTORS, PEAK_BYTES, REPLACED, Record, Vitals

from pdserve.messages.channel import Codec
from pdserve.messages.decode import UndeclaredMessage
from pdserve.messages.peer import PeerMessage


@pytest.mark.parametrize("status", [500, 502, 505])
def test_a_fault_of_the_servers_is_a_violation(status: int) -> None:
    record = Record()
    record.sent("kind", "the request")
    record.got("kind", status, b"why")
    (violation,) = record.violations
    assert f"status {status}" in violation
    assert "the request" in violation


def test_documented_statuses_are_none() -> None:
    record = Record(secrets=[b"canary"])
    for status in (200, 400, 401, 403, 404, 413, 429, 501, 503, 504, 507):
        record.got("kind", status, b"fine")
    assert record.violations == []


def test_anothers_data_is_a_violation_in_bodies_and_headers() -> None:
    record = Record(secrets=[b"canary"])
    record.got("kind", 200, b"a canary sings")
    record.got("kind", 200, b"", headers=b"x: canary")
    assert len(record.violations) == 2


@dataclass
class Processes:
    """Stands in for a cluster."""

    now: dict[str, Usage] = field(default_factory=lambda: {"router": Usage(7, 100 << 20, 20)})

    def usage(self) -> dict[str, Usage]:
        return dict(self.now)


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ({}, "ended"),
        ({"router": Usage(8, 100 << 20, 20)}, "ended"),
        ({"router": Usage(7, 100 << 20, 20), "other": Usage(9, 1, 1)}, "was started"),
        ({"router": Usage(7, (100 << 20) + PEAK_BYTES + 1, 20)}, "has grown"),
    ],
)
def test_processes_that_end_come_or_grow_are_violations(now: dict[str, Usage], problem: str) -> None:
    cluster = Processes()
    vitals = Vitals(cluster)  # type: ignore[arg-type]
    assert vitals.check() == []
    cluster.now = now
    (found,) = vitals.check()
    assert problem in found


@pytest.mark.parametrize("name", REPLACED)
def test_a_process_that_is_replaced_after_a_bomb_is_no_violation(name: str) -> None:
    cluster = Processes({name: Usage(7, 1, 1)})
    vitals = Vitals(cluster)  # type: ignore[arg-type]
    for now in ({}, {name: Usage(8, 1, 1)}):
        cluster.now = now
        assert vitals.check() == []


@pytest.mark.parametrize(
    ("rss", "descriptors", "problem"),
    [((100 << 20) + LEFT_BYTES + 1, 20, "MiB more"), (100 << 20, 21 + LEFT_DESCRIPTORS, "descriptors more")],
)
def test_what_is_kept_after_the_attack_is_a_violation(rss: int, descriptors: int, problem: str) -> None:
    cluster = Processes()
    vitals = Vitals(cluster)  # type: ignore[arg-type]
    assert vitals.check_left(0) == []
    cluster.now = {"router": Usage(7, rss, descriptors)}
    (found,) = vitals.check_left(0)
    assert problem in found


PAGE = {
    "paths": {
        "/generate": {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/Generate"}}}}}},
        "/kv/sessions/{name}": {"delete": {}},
    },
    "Generate": {
        "type": "object",
        "required": ["text"],
        "properties": {
            "text": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "n": {"type": "integer", "minimum": 1, "maximum": 64},
            "stream": {"type": "boolean"},
        },
    },
}


def drawn(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    bodies = Bodies(PAGE, rng)
    made = []
    for _ in range(count):
        operation = rng.choice(bodies.operations)
        made.append(bodies.target(operation).encode() + bodies.body(operation.schema or {}))
    return made


def test_a_seed_stands_for_one_list_of_bodies() -> None:
    assert drawn(3, 50) == drawn(3, 50) != drawn(4, 50)


def test_control_messages_are_decoded_or_refused_and_most_are_sound() -> None:
    messages = Messages(random.Random(5), "mine", "theirs", 16)
    codec: Codec[object] = Codec(PeerMessage, 64 << 20, 1024)
    kinds, sound = set(), 0
    for _ in range(600):
        try:
            decoded = codec.decode(messages.payload())
        except UndeclaredMessage:
            continue
        sound += 1
        kinds |= {type(message).__name__ for message in decoded}
    assert sound > 300
    assert {"MoveOffer", "MoveCommit", "TransferRequest", "FirstToken", "TransferDone"} <= kinds


def test_the_unix_sockets_of_a_process_are_found() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0pdserve test of sockets")
        sock.listen()
        assert any("pdserve" in name for name in unix_sockets([os.getpid()]))


def test_the_last_event_of_a_stream_is_read() -> None:
    assert last_event('data: {"output_ids": [1]}\n\ndata: {"output_ids": [1, 2]}\n\ndata: [DONE]\n\n') == [1, 2]
