"""The contestants: pairs with one threshold each, and unified instances with as many threads in all."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from pdserve.benchmark.options import BackendName
from pdserve.runtime.python import python_command

from ..peers.engines import HOST, Engine, Launch
from ..peers.layout import PeerSetup

PAIR: Final = ("--prefill", "1", "--decode", "1")
CLUSTERS: Final[dict[str, tuple[str, ...]]] = {
    "auto": (*PAIR, "--disaggregation-threshold", "auto"),
    "always": (*PAIR, "--disaggregation-threshold", "always"),
    "never": (*PAIR, "--disaggregation-threshold", "never"),
    "unified-2": ("--prefill", "0", "--decode", "0", "--unified", "2"),
    "unified-1": ("--prefill", "0", "--decode", "0", "--unified", "1"),
}
"""Flags of ``pdserve up``, which divides the cores evenly between its instances."""
FREE_THRESHOLD: Final = re.compile(r"\d+")
OTHER: Final = "other"


@dataclass(frozen=True)
class Cluster(Engine):
    """One contestant. ``python``: that of the checkout that it is started from."""

    contestant: str
    python: str
    model_path: str
    dtype: str

    name: ClassVar[str] = "cluster"
    title: ClassVar[str] = "a cluster of pdserve's"
    backend: ClassVar[BackendName] = "pdserve"

    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        """Return one launch: ``pdserve up`` on the first of ``ports``, which starts the rest of the cluster."""
        threshold = (*PAIR, "--disaggregation-threshold", self.contestant)
        shape = CLUSTERS.get("auto" if self.contestant == OTHER else self.contestant, threshold)
        where = ("--port", str(ports[0]), "--cpus", ",".join(map(str, setup.cores)))
        model = ("--model-path", self.model_path, "--dtype", self.dtype)
        argv = python_command("-m", "pdserve.server.cli", "up", *shape, *where, *model, python=self.python)
        return [Launch(self.contestant, tuple(argv), f"http://{HOST}:{ports[0]}/health")]


def make_cluster(contestant: str, other_python: Path | None, model_path: str, dtype: str) -> Cluster:
    """Return the cluster to start for ``contestant``: a name of ``CLUSTERS``, a threshold in tokens, or ``OTHER``.

    Only ``OTHER`` is started by ``other_python``, which must be given then.
    """
    python = str(other_python) if contestant == OTHER else sys.executable
    return Cluster(contestant, python, model_path, dtype)
