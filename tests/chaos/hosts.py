"""Hosts of our own: network namespaces on a bridge, with cables that can be pulled.

The campaign itself runs in a namespace of its own (``inside``), which holds the bridge and ends with it. So nothing
here reaches the machine's network, and nothing is left behind, however the campaign ends. Only iproute2 and util-linux
are needed. Packets are lost by sending them to an address that no card has, which needs no packet filter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from support.processes import wait_until

NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.1"
NOBODY = "02:00:00:00:00:fe"
"""A card's address that no card has."""
SLOW = ("rate", "4mbit", "burst", "16kb", "latency", "100ms")
"""A token bucket, which every kernel has (netem isn't in all): packets wait for up to 100 ms, or are lost."""


def run(*argv: str) -> str:
    """Run a command and return what it prints. Raises ``CalledProcessError`` if it fails."""
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20)
    return done.stdout


def inside() -> tuple[str, ...]:
    """Return the command that enters a new network namespace: as root, or as a user that is root in there only."""
    return ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")


def why_not() -> str | None:
    """Return why there can be no hosts of our own here, or None if there can."""
    try:
        bridge = "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && ss -K dport = :1"
        bridge += " && tc qdisc add dev v0 root tbf " + " ".join(SLOW)
        run(*inside(), "sh", "-c", bridge)
    except FileNotFoundError as e:
        return f"{e.filename} is missing"
    except subprocess.CalledProcessError as e:
        return (e.stderr.strip() or str(e)).splitlines()[-1]
    return None


@dataclass(frozen=True)
class Host:
    """One namespace; ``enter`` is the command that runs what follows it in there."""

    address: str
    enter: Sequence[str]
    cable: str

    def run(self, *argv: str) -> str:
        """Run a command on this host."""
        return run(*self.enter, *argv)

    def pull(self) -> None:
        """Pull the cable: nothing arrives here or leaves any more, without any notice."""
        run("ip", "link", "set", self.cable, "down")

    def plug(self) -> None:
        """Plug the cable in again."""
        run("ip", "link", "set", self.cable, "up")

    def slow_down(self) -> None:
        """Limit both directions to the rate of ``SLOW``. Beyond a short queue, packets are lost."""
        run("tc", "qdisc", "replace", "dev", self.cable, "root", "tbf", *SLOW)
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *SLOW)

    def speed_up(self) -> None:
        """Remove the limit of ``slow_down``."""
        run("tc", "qdisc", "del", "dev", self.cable, "root")
        self.run("tc", "qdisc", "del", "dev", "eth0", "root")

    def lose(self, other: Host) -> None:
        """Lose what this host sends to ``other``."""
        self.run("ip", "neigh", "replace", other.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def find(self, other: Host) -> None:
        """End the loss of ``lose``."""
        self.run("ip", "neigh", "del", other.address, "dev", "eth0")

    def reset(self, other: Host) -> None:
        """Break every TCP connection to ``other``: both ends see it at once."""
        self.run("ss", "--kill", "state", "connected", "dst", other.address)


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Make a host for each name, all on one bridge with this process, which must be ``inside``."""
    for command in (
        "ip link set lo up",
        "ip link add br0 type bridge forward_delay 0",
        f"ip addr add {GATEWAY}/24 dev br0",
        "ip link set br0 up",
    ):
        run(*command.split())
    with ExitStack() as stack:
        yield {name: stack.enter_context(_host(i)) for i, name in enumerate(names)}
        run("ip", "link", "del", "br0")


@contextmanager
def _host(number: int) -> Iterator[Host]:
    address, cable = f"{NETWORK}.{number + 2}", f"cable{number}"
    # A namespace lives as long as a process in it; this one ends with its input, that is, with the campaign.
    stay = [sys.executable, "-P", "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        ["unshare", "--net", *stay], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as keeper:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        enter = ("nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--")
        host = Host(address, enter, cable)
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
        run("ip", "link", "set", cable, "master", "br0", "up")
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "via", GATEWAY)
        wait_until(lambda: "LOWER_UP" in host.run("ip", "link", "show", "eth0"), 5, "the cable is plugged in")
        try:
            yield host
        finally:
            assert keeper.stdin is not None
            keeper.stdin.close()
