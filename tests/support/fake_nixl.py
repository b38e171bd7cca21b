"""NIXL within a process, as ``backends/nixl.py`` calls it: memory of every kind is the process's own.

A write goes only from what one agent has registered to what the other has, of the kind and device that it was
registered as.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

Registered = tuple[int, int, int, str]


class BackendError(Exception):
    """Its errors are known by the end of their names."""


class Pieces(NamedTuple):
    """``rows``: [N, 3] address, bytes, device."""

    agent: str
    rows: np.ndarray
    kind: str


class Agent:
    """Agent with one name. ``agents`` has all agents, ``kinds`` the memory types of all writes."""

    agents: ClassVar[dict[str, Agent]]
    kinds: ClassVar[set[tuple[str, str]]]

    def __init__(self, name: str, config: Any) -> None:
        assert not config["enable_prog_thread"]
        self.name = name
        self.registered: list[Registered] = []
        self.agents[name] = self

    def create_backend(self, plugin: str, params: dict[str, str]) -> None:
        assert plugin == "UCX"

    def register_memory(self, memory: list[Registered], kind: str) -> None:
        self.registered += [(address, nbytes, device, kind) for address, nbytes, device, _ in memory]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def get_new_notifs(self) -> dict[str, Any]:
        return {}

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def prep_xfer_dlist(self, agent: str, rows: np.ndarray, kind: str) -> Pieces:
        [(address, nbytes, device, stride, count)] = rows.tolist()
        each = [(address + i * stride, nbytes, device) for i in range(count)]
        return Pieces(self._named(agent), np.array(each, dtype=np.uint64), kind)

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> Pieces:
        assert (rows.dtype, rows.shape[1]) == (np.uint64, 3)
        return Pieces("", rows, kind)

    def make_prepped_xfer(self, op: str, here: Pieces, src: np.ndarray, there: Pieces, dst: np.ndarray) -> Any:
        assert op == "WRITE"
        return here._replace(rows=here.rows[src]), there._replace(rows=there.rows[dst])

    def initialize_xfer(self, op: str, local: Pieces, remote: Pieces, peer: str) -> Any:
        assert op == "WRITE"
        return local._replace(agent=self.name), remote._replace(agent=peer)

    def transfer(self, handle: tuple[Pieces, Pieces]) -> None:
        here, there = handle
        self.kinds.add((here.kind, there.kind))
        for source, target in zip(self._resolved(here), self._resolved(there), strict=True):
            assert source[1] == target[1]
            ctypes.memmove(target[0], source[0], source[1])

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def _named(self, agent: str) -> str:
        return self.name if agent == "NIXL_INIT_AGENT" else agent

    def _resolved(self, pieces: Pieces) -> list[tuple[int, int]]:
        registered = self.agents[pieces.agent].registered
        for address, nbytes, device in pieces.rows.tolist():
            if not any(
                begin <= address and address + nbytes <= begin + total and (device, pieces.kind) == known
                for begin, total, *rest in registered
                if (known := tuple(rest))
            ):
                raise BackendError(f"{pieces.agent} has not registered {nbytes} bytes of {pieces.kind} {device}")
        return [(address, nbytes) for address, nbytes, _ in pieces.rows.tolist()]


def install(monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    """Have the nixl backend find this in the library's place; returns the kind of agents that it makes."""

    class Agents(Agent):
        agents: ClassVar[dict[str, Agent]] = {}
        kinds: ClassVar[set[tuple[str, str]]] = set()

    api, bindings = ModuleType("nixl_cu12._api"), ModuleType("nixl_cu12._bindings")
    api.nixl_agent = Agents  # type: ignore[attr-defined]
    api.nixl_agent_config = dict  # type: ignore[attr-defined]
    bindings.BackendError = BackendError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl_cu12", ModuleType("nixl_cu12"))
    monkeypatch.setitem(sys.modules, "nixl_cu12._api", api)
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", bindings)
    # Anew, with this; and gone again behind the test.
    monkeypatch.delitem(sys.modules, "pdserve.disaggregation.transfer.backends.nixl", raising=False)
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return Agents
