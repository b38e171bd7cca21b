"""The attacks on a router's members are seeded, and their judge can say no."""

from __future__ import annotations

import json
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from hostile.bait import bait
from hostile.members import MembersWatch, lasting
from hostile.neighbour import Question
from hostile.other_uid import intrusions
from hostile.watch import Record
from hostile.worker_attacks import exchanged, judge
from hostile.worker_requests import PATH, WorkerRequest, WorkerRequests, spellings
from support.processes import wait_until

QUESTION = Question("x", [1], [5])
MEMBER = {"url": "http://127.0.0.1:2", "role": "decode", "bootstrap_port": None, "state": "ready"}
MEMBER |= {"health": "healthy", "reason": "", "in_flight": 0, "epoch": "e", "source": "file"}


def drawn(seed: int, count: int) -> list[WorkerRequest]:
    requests = WorkerRequests(random.Random(seed), 7777, ["http://127.0.0.1:2"], ["http://127.0.0.1:3"])
    return [requests.draw(lambda method, target, body: [("x-api-key", "own")]) for _ in range(count)]


def test_a_seed_stands_for_one_list_of_requests() -> None:
    assert drawn(3, 100) == drawn(3, 100) != drawn(4, 100)


def test_all_orders_are_among_them_and_name_the_listener_and_an_instance() -> None:
    sent = [request.data() for request in drawn(5, 400)]
    for order in (b"GET /workers ", b"POST /workers ", b"PATCH /workers?url=", b"DELETE /workers?url="):
        assert any(data.startswith(order) for data in sent)
    assert any(b'{"url": "http://127.0.0.1:7777"}' in data for data in sent)
    assert b"DELETE /workers?url=http://127.0.0.1:2&drain=false HTTP/1.1\r\n" in b"".join(sent)
    assert all(b"\r\nx-api-key: own\r\n" in data for data in sent)
    assert max(map(len, sent)) > 4 << 20


def test_a_url_is_spelled_in_ways_that_differ() -> None:
    assert len(set(spellings(80))) == len(spellings(80)) > 30


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n{}", ""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 401 Unauthorized\r\n\r\n", ""),
        (b"", ""),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "got 200"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n{}HTTP/1.1 202 Accepted\r\n\r\n", "got 202"),
        (b"HTTP/1.1 307 Temporary Redirect\r\n\r\n", "got 307"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "got 503"),
        (b'HTTP/1.1 403 Forbidden\r\n\r\n{"workers":[]}', "was told the members"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\ncanary", "canary"),
    ],
)
def test_what_is_not_a_refusal_is_a_violation(answer: bytes, problem: str) -> None:
    record = Record(secrets=[b"canary"])
    judge(record, WorkerRequest("GET", PATH, [], b""), answer)
    assert len(record.violations) == bool(problem)
    assert not problem or problem in record.violations[0]


def test_an_answer_is_read_to_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(exchanged, server.getsockname()[1], b"x")
        with server.accept()[0] as connection:
            assert connection.recv(1) == b"x"
            for part in (b"HTTP/1.1 403 ", b"Forbidden"):
                connection.sendall(part)
        assert answer.result() == b"HTTP/1.1 403 Forbidden"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_to_the_bait_is_told(host: str) -> None:
    with bait() as found:
        assert found.taken() == []
        with socket.create_connection((host, found.port)) as sock:
            sock.sendall(b"GET /health")
        told: list[str] = []
        wait_until(lambda: told.extend(found.taken()) or len(told) > 1, 10, "the connection is told")
        assert "127.0.0.1" in told[0] or "::1" in told[0]
        assert "GET /health" in told[1]


@dataclass
class Bait:
    """Stands in for a listener that got no connection."""

    def taken(self) -> list[str]:
        return []


@dataclass
class Cluster:
    """Stands in for a cluster of one router, which has the members in its file."""

    members_file: Path
    follows: bool = True
    changed: dict[str, Any] = field(default_factory=dict)
    output: int = 5
    members_url: str = "http://router"
    bait: Bait = field(default_factory=Bait)

    @property
    def routers(self) -> list[str]:
        return [self.members_url]

    @property
    def admin(self) -> httpx.Client:
        return self.client("admin")

    def client(self, name: str, source: str = "") -> httpx.Client:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path != "/workers":
                return httpx.Response(200, json={"output_ids": [self.output]})
            urls = [entry["url"] for entry in json.loads(self.members_file.read_text())]
            urls = urls if self.follows else urls[:1]
            return httpx.Response(200, json={"workers": [MEMBER | {"url": url} | self.changed for url in urls]})

        return httpx.Client(transport=httpx.MockTransport(answer))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    file = tmp_path / "members.json"
    file.write_text(json.dumps([{"url": MEMBER["url"]}]))
    return Cluster(file)


def test_members_that_last_are_no_violation(cluster: Cluster) -> None:
    watch = MembersWatch(cluster)  # type: ignore[arg-type]
    cluster.changed = {"health": "unhealthy", "in_flight": 3, "reason": "busy"}
    assert watch.check(QUESTION) == []
    assert json.loads(cluster.members_file.read_text()) == [{"url": MEMBER["url"]}]


@pytest.mark.parametrize(
    ("name", "value"), [("state", "cordoned"), ("source", "api"), ("epoch", "f"), ("role", "worker")]
)
def test_members_that_changed_are_a_violation(cluster: Cluster, name: str, value: str) -> None:
    watch = MembersWatch(cluster)  # type: ignore[arg-type]
    cluster.changed = {name: value}
    (problem,) = watch.check(QUESTION)
    assert "were changed" in problem
    assert value in problem


def test_members_that_do_not_serve_are_a_violation(cluster: Cluster) -> None:
    watch = MembersWatch(cluster)  # type: ignore[arg-type]
    cluster.output = 6
    (problem,) = watch.check(QUESTION)
    assert "do not serve" in problem


def test_a_file_that_is_not_followed_is_a_violation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(condition: Any, *args: Any, **options: Any) -> None:
        assert condition()

    monkeypatch.setattr("hostile.members.wait_until", give_up)
    watch = MembersWatch(cluster)  # type: ignore[arg-type]
    cluster.follows = False
    (problem,) = watch.check(QUESTION)
    assert "does not follow" in problem


def test_what_lasts_of_a_member_is_what_only_an_admin_changes() -> None:
    assert lasting([MEMBER])[0].keys() == MEMBER.keys() - {"health", "reason", "in_flight"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_members_file_that_others_may_replace_is_found() -> None:
    with TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "members.json"
        file.write_text("[]")
        file.chmod(0o644)
        for mode, found in ((0o1777, set()), (0o777, {f"remove {file}", f"make a link of {file}", f"replace {file}"})):
            folder.chmod(mode)
            assert set(intrusions([], [], [file])) == found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_members_file_that_others_may_write_is_found() -> None:
    with TemporaryDirectory() as name:
        file = Path(name) / "members.json"
        file.write_text("[]")
        file.chmod(0o666)
        Path(name).chmod(0o755)
        assert {what.rpartition(" ")[2] for what in intrusions([], [], [file])} == {"O_CREAT", "O_APPEND", "O_TRUNC"}
