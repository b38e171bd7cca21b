"""Requests to instances as a router signs them, with the cluster secret, or replayed without it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import orjson

from pdserve.runtime.cluster_secret import BootstrapSignature, RouterKeys
from pdserve.runtime.web.cluster_auth import CHALLENGE_HEADER, PROOF_HEADER, ClusterClient, digest_of
from pdserve.runtime.web.keys import KEY_NAME_HEADER

from .cluster import MALLORY, Cluster


class Signer:
    """Signs requests to the instances of a cluster, in the name of mallory."""

    def __init__(self, cluster: Cluster) -> None:
        keys = RouterKeys.read(str(cluster.secret_file))
        assert keys is not None
        self._client = ClusterClient(keys)
        self._bootstrap = BootstrapSignature(keys)
        self._epochs: dict[str, bytes] = {}

    def epoch(self, url: str, http: httpx.Client) -> bytes:
        """Return the proven epoch of an instance."""
        if url not in self._epochs:
            proven = self._client.proven(*self.challenged(url, http), url)
            assert proven is not None
            self._epochs[url] = proven
        return self._epochs[url]

    def challenged(self, url: str, http: httpx.Client) -> tuple[bytes, bytes]:
        """Return a challenge, and the proof that an instance gives for it."""
        challenge = self._client.challenge()
        answer = http.get(url + "/livez", headers={CHALLENGE_HEADER.decode(): challenge.decode()})
        return challenge, answer.headers.get(PROOF_HEADER.decode(), "").encode()

    def is_proof(self, challenge: bytes, proof: bytes, url: str) -> bool:
        """Return whether a router would accept ``proof`` from the server at ``url``."""
        return self._client.proven(challenge, proof, url) is not None

    def headers(
        self, epoch: bytes, method: str, target: str, body: bytes, caller: str = MALLORY, age: float = 0.0
    ) -> dict[str, str]:
        """Return the headers of a request to the instance ``epoch``, signed ``age`` seconds ago."""
        named = [(KEY_NAME_HEADER, caller.encode())]
        digest = asyncio.run(digest_of([body]))
        name, value = self._client.sign(epoch, method, target, named, digest, time.time() - age)
        return {KEY_NAME_HEADER.decode(): caller, name.decode(): value.decode()}

    def bootstrap(self, port: int, room: int, leg: str) -> dict[str, Any]:
        """Return the signed bootstrap fields of a request."""
        host = "127.0.0.1"
        signature = self._bootstrap.sign(host, port, room, time.time())
        fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        return fields | {"bootstrap_signature": signature, "bootstrap_leg": leg}

    def body(self, content: dict[str, Any]) -> bytes:
        """Return the JSON of a body as a router writes it."""
        return orjson.dumps(content)
