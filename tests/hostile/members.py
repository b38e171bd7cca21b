"""What the campaign judges of the routers' members: they are the same at the end, serve, and follow their file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from support.processes import wait_until

from .cluster import ALICE, Cluster
from .neighbour import SOURCE, TOKENS, Question

LASTING = ("url", "role", "bootstrap_port", "state", "epoch", "source")
"""Fields of a member that nothing but an admin changes. ``source`` tells one that was removed and added again."""
UNREACHABLE = "http://127.0.0.1:1"
"""A member that never gets a request: no server listens there."""

Member = dict[str, Any]


def lasting(members: list[Member]) -> list[Member]:
    """Return of each member what must last."""
    return [{name: member[name] for name in LASTING} for member in members]


class MembersWatch:
    """The members of each router against what they were at the start."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._start = {url: lasting(listed(cluster, url)) for url in cluster.routers}

    def check(self, question: Question) -> list[str]:
        """Return what is wrong with the members now. ``question``: one that each router must answer."""
        problems = self._cluster.bait.taken()
        for url, start in self._start.items():
            now = lasting(listed(self._cluster, url))
            if now != start:
                problems.append(f"the members of {url} were changed: {now}, not {start}")
            problems += self._served(url, question)
        return problems + self._follows()

    def _served(self, url: str, question: Question) -> list[str]:
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        with self._cluster.client(ALICE, SOURCE) as client:
            answer = client.post(f"{url}/generate", json={"text": question.text, "sampling_params": params})
        if answer.status_code != 200 or answer.json()["output_ids"] != question.answer:
            return [f"the members of {url} do not serve: {answer.status_code}: {answer.text[:500]}"]
        return []

    def _follows(self) -> list[str]:
        """Return a problem if a router does not follow its file any more, in which another member comes and goes."""
        content, url = self._cluster.members_file.read_bytes(), self._cluster.members_url

        def is_member() -> bool:
            return any(member["url"] == UNREACHABLE for member in listed(self._cluster, url))

        steps: list[tuple[list[Any], Callable[[], bool], str]] = [
            ([*json.loads(content), {"url": UNREACHABLE, "role": "decode"}], is_member, "adds"),
            (json.loads(content), lambda: not is_member(), "removes"),
        ]
        for members, is_followed, does in steps:
            replace_file(self._cluster.members_file, json.dumps(members).encode())
            try:
                wait_until(is_followed, 30, f"the router {does} a member", every=0.2)
            except AssertionError as e:
                return [f"{url} does not follow its --members-file any more: {e}"]
        return []


def listed(cluster: Cluster, url: str) -> list[Member]:
    """Return the members of a router as its admin sees them."""
    found: list[Member] = cluster.admin.get(f"{url}/workers").raise_for_status().json()["workers"]
    return found


def wait_ready(cluster: Cluster) -> None:
    """Wait until all members of the routers get requests."""

    def are_ready() -> bool:
        with suppress(httpx.TransportError):
            members = [member for url in cluster.routers for member in listed(cluster, url)]
            return all(member["state"] == "ready" and member["epoch"] for member in members)
        return False

    wait_until(are_ready, 60, "all members are ready", every=0.2)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is never seen half-written."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    os.replace(new, path)
