"""One instance on two hosts of our own, against one rank alone: run inside a new network namespace.

``python -m support.two_hosts MODEL ENGINE SIZE FOLDER``: MODEL are the arguments of ``tiny_args``, with commas in
between, SIZE the ranks of both hosts together.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from chaos.hosts import Host, hosts

from support.processes import ONE_THREAD, Launched, free_ports, wait_until

PROMPTS = [[(7 * i * i + 13 * i + n) % 40000 + 10 for i in range(length)] for n, length in enumerate((5, 33, 300))]
SAMPLINGS = ({"temperature": 0}, {"temperature": 0.9, "sampling_seed": 3})
ENDLESS = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
SOON_OVER = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
HASTY = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""Environment for which a name look-up fails fast: the hosts have no names, and torch looks up those of its peers."""
MEETING_PORT = 29500
ONE_EACH = 2
"""Ranks, where more of them would only take longer to start: most of that is what each of them imports."""


def start(host: Host, node: int, lead: Host, args: list[str], folder: Path, size: int = ONE_EACH) -> Launched:
    """Start one host's part of an instance with ``size`` ranks, or a whole instance of one rank."""
    port = free_ports(1)[0]
    own = ["server", *args, "--host", host.address, "--port", str(port), "--tp-size", str(size)]
    if size > 1:
        own += ["--nnodes", "2", "--node-rank", str(node)]
        own += ["--dist-init-addr", f"{lead.address}:{MEETING_PORT}"]
    log = folder / f"host{node}-{size}.log"
    server = Launched(own, port, log, host=host.address, enter=host.enter, env=os.environ | HASTY)
    server.start()
    return server


def ended(server: Launched) -> bool:
    """Return whether the process has ended."""
    return server.process is not None and server.process.poll() is not None


def answers(server: Launched) -> list[list[int]]:
    """Return the output of every prompt, with each kind of sampling."""
    return [
        server.generate(input_ids=ids, sampling_params=sampling | {"max_new_tokens": 16, "ignore_eos": True})[
            "output_ids"
        ]
        for sampling in SAMPLINGS
        for ids in PROMPTS
    ]


def main() -> None:
    """See the module; ends with a traceback where anything is not as it should be."""
    model, engine, size, folder = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    args = [*model, "--attention-backend", engine]
    with ExitStack() as stack:
        first, second = stack.enter_context(hosts(["first", "second"])).values()

        both = list(enumerate((first, second)))

        def together(size: int = ONE_EACH) -> tuple[Launched, Launched]:
            servers = tuple(start(host, node, first, args, folder, size) for node, host in both)
            for server in servers:
                stack.callback(end, server)
            servers[0].wait_healthy()
            return servers[0], servers[1]

        alone = start(first, 0, first, [*args, *ONE_THREAD], folder, size=1)
        stack.callback(end, alone)
        alone.wait_healthy()
        expected = answers(alone)
        end(alone)
        lead, other = together(size)
        assert answers(lead) == expected
        if engine == "cpu":
            how_they_end(together, lead, other)
            refused(both, [args, [*args, "--page-size", "32"]], first, folder, stack)
    print("all as expected")


def how_they_end(together: Callable[[], tuple[Launched, Launched]], lead: Launched, other: Launched) -> None:
    """Check how hosts end: the death of any rank ends both, and a stop of the first host ends both in good order."""
    # While something runs.
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lead.post, "/generate", {"input_ids": PROMPTS[2], "sampling_params": ENDLESS})
        wait_until(lambda: lead.info()["counters"]["decode_tokens"] > 5, 20, "a stream runs")
        lead.family()["worker-1"].send_signal(signal.SIGKILL)
        wait_until(lambda: ended(other) and ended(lead), 10, "both hosts end")
        assert answer.result().status_code == 503
    assert "process worker-1 was killed by SIGKILL" in lead.log(), lead.log()
    assert "--node-rank 0 of the instance is gone" in other.log(), other.log()
    lead, other = together()
    # While nothing does.
    other.family()["worker-1"].send_signal(signal.SIGKILL)
    wait_until(lambda: ended(other) and ended(lead), 10, "both hosts end")
    assert "process worker-1 was killed by SIGKILL" in other.log(), other.log()
    assert "--node-rank 1 of the instance is gone" in lead.log(), lead.log()
    lead, other = together()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lead.post, "/generate", {"input_ids": PROMPTS[2], "sampling_params": SOON_OVER})
        wait_until(lambda: lead.info()["counters"]["decode_tokens"] > 5, 20, "a stream runs")
        for server in (other, lead):
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ended(other) and ended(lead), 30, "both hosts end")
        assert answer.result().status_code == 200
    assert lead.process is not None
    assert other.process is not None
    assert (lead.process.returncode, other.process.returncode) == (0, 0), other.log()


def refused(hosts: list[tuple[int, Host]], args: list[list[str]], first: Host, folder: Path, stack: ExitStack) -> None:
    """Check that hosts that serve different things end with a message."""
    unlike = [start(host, node, first, args[node], folder) for node, host in hosts]
    for server in unlike:
        stack.callback(end, server)
    wait_until(lambda: all(map(ended, unlike)), 60, "hosts that serve different things end")
    for server in unlike:
        assert "--node-rank 1 serves something else than --node-rank 0" in server.log(), server.log()


def end(server: Launched) -> None:
    """Stop it, if it has not ended."""
    if not ended(server):
        server.stop(signal.SIGINT)


if __name__ == "__main__":
    main()
