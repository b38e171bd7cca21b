"""Requests to instances as a router signs them, with the cluster secret, or replayed without it."""

from __future__ import annotations

from typing import Any

import orjson
from support.router_signer import RouterSigner

from .cluster import MALLORY, Cluster


class Signer(RouterSigner):
    """Signs requests to the instances of a cluster, in the name of mallory."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(str(cluster.secret_file))

    def headers(
        self, epoch: bytes, method: str, target: str, body: bytes, caller: str = MALLORY, age: float = 0.0
    ) -> dict[str, str]:
        """Return the headers of a request to the instance ``epoch``, signed ``age`` seconds ago."""
        return super().headers(epoch, method, target, body, caller, age)

    def bootstrap(self, port: int, room: int, leg: str) -> dict[str, Any]:
        """Return the bootstrap fields of a request."""
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        return fields | {"bootstrap_leg": leg}

    def body(self, content: dict[str, Any]) -> bytes:
        """Return the JSON of a body as a router writes it."""
        return orjson.dumps(content)
