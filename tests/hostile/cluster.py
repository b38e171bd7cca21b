"""The cluster under attack: ``pdserve up`` with a cluster secret, two user keys, an admin key and a tiny model.

A second router beside it follows a ``--members-file`` with the same instances.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from support.machine import limit
from support.processes import NO_REUSE, Launched, launched, wait_until
from support.scripted_model import TEMPLATE
from support.tiny_model import tiny_args

from .bait import Bait, bait

ALICE, MALLORY = "alice", "mallory"
"""Names of the two user keys: the neighbour's and the attacker's."""
POOL_TOKENS = 16384
ROUTER = "router"
MEMBERS_ROUTER = "router with members file"
MODEL = "smollm2"
"""Name of the model for clients."""


class Usage(NamedTuple):
    """Resident bytes and open descriptors of one process."""

    pid: int
    rss: int
    descriptors: int


@dataclass
class Cluster:
    """What the campaign knows of the cluster. ``keys``: by name, the admin's is ``admin``. ``instances``: URL by role.

    ``bootstraps``: port of each instance's bootstrap server, by role. ``members_router``: the router that follows
    ``members_file``. ``bait``: a listener of the attacker's.
    """

    server: Launched
    keys: dict[str, str]
    secret_file: Path
    backend: str
    members_router: Launched
    members_file: Path
    bait: Bait
    instances: dict[str, str] = field(default_factory=dict)
    bootstraps: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.admin = self.client("admin")
        for report in self.info()["instances"]:
            self.instances[report["info"]["role"]] = report["url"]
            self.bootstraps[report["info"]["role"]] = report["info"]["disaggregation"]["bootstrap_port"]

    @property
    def url(self) -> str:
        """URL of the router."""
        return self.server.url

    @property
    def urls(self) -> dict[str, str]:
        """URLs of the router and the instances, by role."""
        return {ROUTER: self.url, **self.instances}

    @property
    def members_url(self) -> str:
        """URL of the router that follows a file."""
        return self.members_router.url

    @property
    def routers(self) -> list[str]:
        """URLs of both routers."""
        return [self.url, self.members_url]

    def log(self) -> str:
        """Return the logs of all processes."""
        return self.server.log() + self.members_router.log()

    def headers(self, name: str) -> dict[str, str]:
        """Return the headers of a request with the key of this name."""
        return {"authorization": f"Bearer {self.keys[name]}"}

    def client(self, name: str, source: str = "127.0.0.1") -> httpx.Client:
        """Return a client with the key of this name. ``source``: the address that it connects from."""
        transport = httpx.HTTPTransport(local_address=source, limits=NO_REUSE)
        return httpx.Client(transport=transport, headers=self.headers(name), timeout=limit(30), trust_env=False)

    def info(self) -> dict[str, Any]:
        """Return the admin's ``/server_info`` of the router."""
        report: dict[str, Any] = self.admin.get(self.url + "/server_info").raise_for_status().json()
        return report

    def processes(self) -> dict[str, psutil.Process]:
        """Return every living process of the cluster, by its name and the name of its parent."""
        found = {}
        for name, server in (("up", self.server), (MEMBERS_ROUTER, self.members_router)):
            assert server.process is not None
            found[name] = psutil.Process(server.process.pid)
            for child in found[name].children(recursive=True):
                with contextlib.suppress(psutil.Error, IndexError):
                    found[f"{child.cmdline()[0]} < {child.parent().cmdline()[0]}"] = child
        return found

    def usage(self) -> dict[str, Usage]:
        """Return the memory and descriptors that each process uses now."""
        found = {}
        for name, process in self.processes().items():
            with contextlib.suppress(psutil.Error):
                found[name] = Usage(process.pid, process.memory_info().rss, process.num_fds())
        return found

    def listening(self) -> dict[str, set[int]]:
        """TCP ports that each process listens on."""
        return {
            name: {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            for name, process in self.processes().items()
        }

    def in_use(self) -> dict[str, Any]:
        """Return what is still in use, by instance. It is empty if nothing is, and if the instances' own
        checks agree.
        """
        found = {}
        for report in self.info()["instances"]:
            info = report.get("info")
            if info is None:
                return {report["url"]: report.get("error")}
            sides = info["disaggregation"]
            held = {
                "requests": info["requests"]["total"],
                "tokens": info["pool"]["in_use"],
                "rows": info["pool"]["rows_in_use"],
                "rooms sent": sides["sent"]["rooms"],
                "rooms received": sides["received"]["rooms"],
                "peers beyond the other instance": len(sides["peers"]) - 1 if len(sides["peers"]) > 1 else 0,
                "steps since the check": info["invariants_steps_ago"],
            }
            if any(held.values()) or info["invariants"] != "ok":
                found[report["url"]] = held | {"invariants": info["invariants"]}
        return found

    def wait_given_back(self, seconds: float) -> None:
        """Wait until nothing is held; an AssertionError that says what is."""
        left: dict[str, Any] = {}

        def nothing() -> bool:
            left.clear()
            left.update(self.in_use())
            return not left

        try:
            wait_until(nothing, seconds, "everything is given back", every=0.5)
        except AssertionError as e:
            raise AssertionError(f"not given back: {left}") from e


@contextlib.contextmanager
def cluster(folder: Path, backend: str) -> Iterator[Cluster]:
    """Run the cluster for the duration of the block; its commands must then end with code 0."""
    keys = {name: secrets.token_urlsafe(24) for name in (ALICE, MALLORY, "admin")}
    files = {
        "users": f"{ALICE} {keys[ALICE]}\n{MALLORY} {keys[MALLORY]}\n",
        "admin": keys["admin"] + "\n",
        "secret": secrets.token_urlsafe(32) + "\n",
    }
    for name, text in files.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(text)
    for name in ("model", "sessions"):
        (folder / name).mkdir(mode=0o700)
    args = [
        *tiny_args(folder / "model"),
        "--max-total-tokens",
        str(POOL_TOKENS),
        "--kv-sessions-dir",
        str(folder / "sessions"),
    ]
    # The tokenizer's own template has neither tools nor reasoning.
    (folder / "chat.jinja").write_text(TEMPLATE)
    args += ["--chat-template", str(folder / "chat.jinja"), "--served-model-name", MODEL]
    keys_args = ["--api-key-file", str(folder / "users"), "--admin-key-file", str(folder / "admin")]
    keys_args += ["--cluster-secret-file", str(folder / "secret")]
    args += [*keys_args, "--return-kv", "--disaggregation-transfer-backend", backend]
    with contextlib.ExitStack() as stack:
        up = ("up", *args, "--threads", "1", "--drain-timeout", "20")
        server = stack.enter_context(launched(folder, "cluster", *up))
        server.wait_healthy()
        with httpx.Client(headers={"authorization": f"Bearer {keys['admin']}"}, trust_env=False) as admin:
            workers = admin.get(server.url + "/workers").raise_for_status().json()["workers"]
        # Any user may make files in the file's folder, as in /tmp.
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-members-")))
        shared.chmod(0o1777)
        members_file = shared / "members.json"
        members_file.write_text(json.dumps([{"url": worker["url"]} for worker in workers]))
        members_file.chmod(0o644)
        args = ["router", "--members-file", str(members_file), *keys_args]
        router = stack.enter_context(launched(folder, "members-router", *args))
        router.wait_healthy()
        found = Cluster(server, keys, folder / "secret", backend, router, members_file, stack.enter_context(bait()))
        yield found
        assert router.stop() == 0, router.log()[-3000:]
        assert server.stop() == 0, server.log()[-3000:]
