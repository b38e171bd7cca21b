"""2 prefills, 2 decodes and a router: on hosts of their own where that is possible, and what they say of themselves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from support.import_path import with_inherited
from support.machine import stretched
from support.processes import Launched, free_ports, wait_until
from support.scrape import Page

from .faults import DECODES, PREFILLS, ROUTER
from .hosts import GATEWAY, Host, hosts, run

LOOPBACK = "127.0.0.1"
FAULTY = Path(__file__).parent / "faulty_writes"
PORTS = 20000
"""On hosts of our own: below those that the system gives to connections, one of which could have a port meanwhile."""
INSTANCES = (*PREFILLS, *DECODES)
RECOMPUTED = "pdserve_handovers_recomputed_total"
HANDOVERS = {"prefill": "sent", "decode": "received"}


@dataclass
class Cluster:
    """``hosts`` is empty where all of it is on one. ``writes``: where each prefill reads how its writes go wrong."""

    servers: dict[str, Launched]
    control_ports: dict[str, int]
    hosts: dict[str, Host]
    writes: dict[str, Path]

    @property
    def url(self) -> str:
        """Return the URL of the router."""
        return self.servers[ROUTER].url

    def start(self) -> None:
        """Launch all and wait until they serve."""
        for server in self.servers.values():
            server.start()
        for server in self.servers.values():
            server.wait_healthy()
        wait_until(self.is_whole, 20, "the router knows all instances", every=0.2)

    def end(self) -> None:
        """Kill all living processes of the cluster. To see it end well, stop it before."""
        for server in self.servers.values():
            if server.process is not None and server.process.poll() is None:
                family = list(server.family().values())
                for process in family:
                    process.kill()
                psutil.wait_procs(family, timeout=stretched(5))
                server.process.wait(stretched(5))

    def reports(self) -> dict[str, dict]:
        """Return the router's record of each instance; ``info`` is the instance's own report."""
        found = {instance["url"]: instance for instance in self.servers[ROUTER].info()["instances"]}
        return {name: found[self.servers[name].url] for name in INSTANCES}

    def is_whole(self) -> bool:
        """Return whether the router finds all instances healthy."""
        return all(report["state"] == "healthy" and "info" in report for report in self.reports().values())

    def handed_over(self) -> dict[str, tuple[str, int]]:
        """Return for each instance its epoch, and how many hand-overs it has done since it started."""
        return {
            name: (report["epoch"], report["info"]["disaggregation"][HANDOVERS[name[:-1]]]["done"])
            for name, report in self.reports().items()
            if "info" in report and report["info"]["disaggregation"]
        }

    def all_moved_on(self, since: dict[str, tuple[str, int]]) -> bool:
        """Return whether each instance, in its present start, has done a hand-over that it had not ``since``."""
        try:
            now, whole = self.handed_over(), self.is_whole()
        except httpx.HTTPError:
            return False
        return whole and all(name in now and _is_later(now[name], since.get(name)) for name in INSTANCES)

    def recomputed(self) -> dict[str, tuple[str, float]]:
        """Return for each decode its epoch, and how many prompts it had to compute after their first token."""
        found = {}
        for name in DECODES:
            server = self.servers[name]
            page = Page(server.client.get(server.url + "/metrics").raise_for_status().text)
            found[name] = (server.info()["epoch"], page.total(RECOMPUTED))
        return found

    def in_use(self) -> dict[str, str]:
        """Return what is left on each instance. It is empty if nothing is, and the instances' own checks agree."""
        found = {}
        for name in INSTANCES:
            server = self.servers[name]
            info = server.info()
            rest = {
                "requests": info["requests"]["total"],
                "tokens": info["pool"]["in_use"],
                "rows": info["pool"]["rows_in_use"],
                "sent rooms": info["disaggregation"]["sent"]["rooms"],
                "received rooms": info["disaggregation"]["received"]["rooms"],
                "transfers": server.client.get(server.url + "/transfers").raise_for_status().json()["open"],
                "steps since the check": info["invariants_steps_ago"],
            }
            if any(rest.values()) or info["invariants"] != "ok":
                found[name] = f"invariants {info['invariants']}, {rest}"
        return found

    def reset(self, prefill: str, decode: str) -> None:
        """Break the connections between the two. On one host, all connections to the prefill's control port break."""
        if self.hosts:
            self.hosts[prefill].reset(self.hosts[decode])
            return
        port = f":{self.control_ports[prefill]}"
        run("ss", "--kill", "state", "connected", "( dport = " + port + " or sport = " + port + " )")


def faulty(report: Path) -> dict[str, str]:
    """Return the environment of a prefill with writes that go wrong as the file ``report`` says."""
    return {**os.environ, "PYTHONPATH": with_inherited(FAULTY), "PDSERVE_CHAOS_WRITES": str(report)}


def _is_later(now: tuple[str, int], since: tuple[str, int] | None) -> bool:
    return now[1] > (since[1] if since is not None and since[0] == now[0] else 0)


@contextmanager
def running(tmp: Path, backend: str, args: Sequence[str], inside: bool) -> Iterator[Cluster]:
    """Run a cluster, and stop it with SIGTERM at the end. ``inside``: this process has a network of its own."""
    secret = tmp / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_urlsafe(32))
    with ExitStack() as stack:
        places: dict[str, Host] = {}
        if inside and backend == "shm":
            run("ip", "link", "set", "lo", "up")
        elif inside:
            places = stack.enter_context(hosts(INSTANCES))
        ports = iter(range(PORTS, PORTS + 50)) if inside else iter(free_ports(20))
        common = ["--cluster-secret-file", str(secret)]
        instance_args = ["--disaggregation-transfer-backend", backend, *args, *common]
        cluster = Cluster({}, {}, places, {})
        route = [*common, "--policy", "random"]
        cores = sorted(os.sched_getaffinity(0))
        for i, name in enumerate(INSTANCES):
            host = places[name].address if places else LOOPBACK
            port, bootstrap, control, data = (next(ports) for _ in range(4))
            own = ["--host", host, "--port", str(port), "--disaggregation-mode", name[:-1], *instance_args]
            own += ["--disaggregation-control-port", str(control), "--cpus", str(cores[i % len(cores)])]
            own += ["--disaggregation-data-port", str(data)] if backend != "shm" else []
            own += ["--disaggregation-bootstrap-port", str(bootstrap)] if name in PREFILLS else []
            enter, env = places[name].enter if places else (), None
            if name in PREFILLS:
                cluster.writes[name] = tmp / f"{name}.writes"
                cluster.writes[name].touch()
                env = faulty(cluster.writes[name])
            log = tmp / f"{name}.log"
            cluster.servers[name] = Launched(["server", *own], port, log, host=host, enter=enter, env=env)
            cluster.control_ports[name] = control
            role = ["--prefill", cluster.servers[name].url, str(bootstrap)]
            route += role if name in PREFILLS else ["--decode", cluster.servers[name].url]
        host, port = (GATEWAY if places else LOOPBACK), next(ports)
        route += ["--host", host, "--port", str(port)]
        cluster.servers[ROUTER] = Launched(["router", *route], port, tmp / "router.log", host=host)
        stack.callback(cluster.end)
        cluster.start()
        yield cluster
        for server in reversed(cluster.servers.values()):
            assert server.stop() == 0, f"ended badly:\n{server.log()[-3000:]}"
