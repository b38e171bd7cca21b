"""Requests to instances as a router signs them."""

from __future__ import annotations

import asyncio
import time

import httpx

from pdserve.runtime.cluster_secret import RouterKeys
from pdserve.runtime.web.cluster_auth import CHALLENGE_HEADER, PROOF_HEADER, ClusterClient, digest_of
from pdserve.runtime.web.keys import KEY_NAME_HEADER


class RouterSigner:
    """Signs requests to instances by the cluster secret or the router key in a file."""

    def __init__(self, secret_file: str) -> None:
        keys = RouterKeys.read(secret_file)
        assert keys is not None
        self._client = ClusterClient(keys)
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
        self, epoch: bytes, method: str, target: str, body: bytes, caller: str, age: float = 0.0
    ) -> dict[str, str]:
        """Return the headers of ``caller``'s request to the instance ``epoch``, signed ``age`` seconds ago."""
        named = [(KEY_NAME_HEADER, caller.encode())]
        digest = asyncio.run(digest_of([body]))
        name, value = self._client.sign(epoch, method, target, named, digest, time.time() - age)
        return {KEY_NAME_HEADER.decode(): caller, name.decode(): value.decode()}
