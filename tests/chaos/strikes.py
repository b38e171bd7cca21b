"""How each kind of fault is done. Each returns when the fault is over: what was killed serves again, what was frozen or
cut off goes on.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import psutil
from support.machine import stretched
from support.processes import wait_until

from .cluster import Cluster
from .expected import MOST_TOKENS, Question
from .faults import ROUTER, WRITES, Fault, Kind
from .load import body

LEAVING = 200
ABORTED = 120
BY_NAME = 10
"""Number of aborted requests that are aborted by name, before the others. They came last, so they still run."""
STORM_SECONDS = 0.3
EXIT_SECONDS = 10.0


def strike(cluster: Cluster, fault: Fault, questions: Sequence[Question]) -> None:
    """Do it, and wait until it is over; an AssertionError where something does not end, or start, as it should."""
    if fault.kind in (Kind.LEAVE, Kind.ABORT):
        storm(cluster, fault, questions)
    else:
        STRIKES[fault.kind](cluster, fault)


def kill(cluster: Cluster, fault: Fault) -> None:
    """Kill one process. The instance must end by itself, and is started again on the same ports."""
    server = cluster.servers[fault.victim]
    assert server.process is not None
    family = server.family()
    victim = family["supervisor" if fault.process == ROUTER else fault.process]
    victim.send_signal(signal.SIGKILL)
    code = server.process.wait(stretched(EXIT_SECONDS))
    assert code != 0, "it ended as if all were well"
    _, alive = psutil.wait_procs(list(family.values()), timeout=stretched(EXIT_SECONDS))
    assert not alive, f"orphans: {alive}"
    server.start()
    server.wait_healthy()


def freeze(cluster: Cluster, fault: Fault) -> None:
    """Freeze one process."""
    _freeze([cluster.servers[fault.victim].family()[fault.process]], fault.seconds)


def freeze_all(cluster: Cluster, fault: Fault) -> None:
    """Freeze all processes of the victim."""
    _freeze(cluster.servers[fault.victim].family().values(), fault.seconds)


def _freeze(processes: Iterable[psutil.Process], seconds: float) -> None:
    with ExitStack() as stack:
        for process in processes:
            process.suspend()
            stack.callback(process.resume)
        time.sleep(seconds)


def reset(cluster: Cluster, fault: Fault) -> None:
    """Reset the connections between two instances."""
    cluster.reset(fault.victim, fault.peer)


def lose(cluster: Cluster, fault: Fault) -> None:
    """Lose what two instances send each other; all other connections work."""
    one, other = cluster.hosts[fault.victim], cluster.hosts[fault.peer]
    with ExitStack() as stack:
        for a, b in ((one, other), (other, one)):
            a.lose(b)
            stack.callback(a.find, b)
        time.sleep(fault.seconds)


def unplug(cluster: Cluster, fault: Fault) -> None:
    """Cut the victim off from all others."""
    host = cluster.hosts[fault.victim]
    with ExitStack() as stack:
        host.pull()
        stack.callback(host.plug)
        time.sleep(fault.seconds)


def slow_down(cluster: Cluster, fault: Fault) -> None:
    """Slow down the victim's connections. What does not fit into the line is lost."""
    host = cluster.hosts[fault.victim]
    with ExitStack() as stack:
        host.slow_down()
        stack.callback(host.speed_up)
        time.sleep(fault.seconds)


def write_wrong(cluster: Cluster, fault: Fault) -> None:
    """Let the victim's backend write something else than it is given."""
    orders = cluster.writes[fault.victim]
    made = orders.with_suffix(".made")
    made.unlink(missing_ok=True)
    orders.write_text(WRITES[fault.kind])
    try:
        wait_until(made.exists, EXIT_SECONDS, "a write went wrong")
        time.sleep(fault.seconds)
    finally:
        orders.write_text("")


def storm(cluster: Cluster, fault: Fault, questions: Sequence[Question]) -> None:
    """Send hundreds of requests at once, and hang up or abort them; aborted ones must be answered, too."""
    leaving = fault.kind is Kind.LEAVE
    server = cluster.servers[ROUTER]
    with ExitStack() as stack:
        clients = []
        for i in range(LEAVING if leaving else ABORTED):
            client = stack.enter_context(socket.create_connection((server.host, server.port), stretched(EXIT_SECONDS)))
            client.sendall(_request(server.host, questions[i % len(questions)], f"storm-{i}"))
            clients.append(client)
        time.sleep(STORM_SECONDS)
        if leaving:
            return
        named = [f"storm-{i}" for i in range(ABORTED - BY_NAME, ABORTED)]
        orders = [{"rid": rid} for rid in named] + [{"abort_all": True}]
        count = sum(server.post("/abort_request", what).raise_for_status().json()["aborted"] for what in orders)
        assert count, "nothing was aborted: the storm was over too soon"
        # A request that waits at the router is at no instance yet, so aborting once is not enough.
        deadline = time.monotonic() + stretched(EXIT_SECONDS)
        for client in clients:
            client.settimeout(0.2)
            while not _has_ended(client):
                assert time.monotonic() < deadline, "an aborted request does not end"
                server.post("/abort_request", {"abort_all": True}).raise_for_status()


def _request(host: str, question: Question, rid: str) -> bytes:
    content = json.dumps({**body(question, MOST_TOKENS, streaming=True), "rid": rid}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def _has_ended(client: socket.socket) -> bool:
    try:
        while client.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    return True


STRIKES: dict[Kind, Callable[[Cluster, Fault], None]] = {
    Kind.KILL: kill,
    Kind.FREEZE: freeze,
    Kind.FREEZE_INSTANCE: freeze_all,
    Kind.FREEZE_ROUTER: freeze_all,
    Kind.RESET: reset,
    Kind.LOSE: lose,
    Kind.UNPLUG: unplug,
    Kind.SLOW: slow_down,
    **dict.fromkeys(WRITES, write_wrong),
}
