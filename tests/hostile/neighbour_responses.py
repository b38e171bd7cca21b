"""The neighbour's kept responses: they stay readable, unchanged and its own."""

from __future__ import annotations

import json
from typing import Any

import httpx

from .cluster import ROUTER, Cluster

PATH = "/v1/responses"
KEEPERS = (ROUTER, "decode")
"""Servers that keep a response of the neighbour's."""
EXCUSED = (429, 503)
"""Statuses that say that the cluster is busy."""


class NeighbourResponses:
    """One kept response at each of ``KEEPERS``. ``canary``: in its input, its instructions and its metadata."""

    def __init__(self, cluster: Cluster, client: httpx.Client, canary: str) -> None:
        self._client, self._canary = client, canary
        self.problems: list[str] = []
        self._kept = [self._make(cluster.urls[role]) for role in KEEPERS]

    @property
    def ids(self) -> list[tuple[str, str]]:
        """URL and id of each response. The attacker knows them."""
        return [(url, response["id"]) for url, response in self._kept]

    @property
    def secrets(self) -> list[bytes]:
        """Texts of the responses' outputs, as JSON."""
        texts = [part["text"] for _, one in self._kept for item in one["output"] for part in item.get("content", [])]
        return [json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode() for text in texts for ascii_only in (0, 1)]

    def check(self) -> None:
        """Read each response and go on with it. What is wrong goes to ``problems``."""
        for url, response in self._kept:
            got = self._asked("GET", f"{url}{PATH}/{response['id']}")
            if got is not None and got != response:
                self.problems.append(f"its kept response has changed: {got}, not {response}")
            body = self._body("Why?") | {"previous_response_id": response["id"], "store": False}
            self._asked("POST", url + PATH, body)

    def delete(self) -> None:
        """Delete the responses."""
        for url, response in self._kept:
            self._client.delete(f"{url}{PATH}/{response['id']}")

    def _make(self, url: str) -> tuple[str, dict[str, Any]]:
        answer = self._client.post(url + PATH, json=self._body(f"Keep {self._canary}."))
        made: dict[str, Any] = answer.raise_for_status().json()
        return url, made

    def _body(self, text: str) -> dict[str, Any]:
        own = {"instructions": f"You are {self._canary}.", "metadata": {"note": self._canary}}
        return {"input": text, "max_output_tokens": 16, "temperature": 0, "ignore_eos": True, **own}

    def _asked(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the answer; None if the cluster is busy, or if it is wrong."""
        try:
            answer = self._client.request(method, url, json=body)
        except httpx.HTTPError as e:
            self.problems.append(f"its connection broke: {e!r}")
            return None
        if answer.status_code == 200:
            content: dict[str, Any] = answer.json()
            return content
        if answer.status_code not in EXCUSED:
            self.problems.append(f"its kept response: status {answer.status_code}: {answer.text[:500]}")
        return None
