"""The registry of transfer backends: what options, checks, pools and benchmarks need to know without importing one.

To add a backend, write its class in a file of ``disaggregation/transfer/backends/`` and add a line here. The class is
imported only when its backend is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol


class BackendOptions(Protocol):
    """The options of an instance that a backend's check may read."""

    @property
    def device(self) -> str:
        """Device of the model: "auto", "cpu" or "cuda"."""

    @property
    def kv_staging_size(self) -> float | None:
        """Gigabytes of host memory between the pool of a GPU and a backend; None: the default."""


def _nothing(options: BackendOptions) -> Iterator[str]:
    """Yield no complaint."""
    yield from ()


@dataclass(frozen=True)
class BackendSpec:
    """One transfer backend."""

    path: str
    """Module and class, within ``disaggregation/transfer/backends``."""
    summary: str
    """Where the backend moves pages, for help texts."""
    needs: str | None = None
    """How to get what the backend needs beside pdserve itself. None: it needs nothing."""
    needs_shared_memory: bool = False
    """Whether peers map the memory of the pool, so it must be allocated as shared memory."""
    stays_on_devices: bool = False
    """Whether pages move from device to device only, and never pass through host memory."""
    pins_pool: bool = False
    """Whether the backend registers the memory of the pool with a library or a device.

    Memory that went back to the system would come again at other physical pages, and peers would write to the old ones.
    So such a pool keeps its size.
    """
    moves_nothing: bool = False
    """Whether pages are not moved at all: for tests."""
    check: Callable[[BackendOptions], Iterator[str]] = _nothing
    """Yield a complaint for each option of the instance that does not work with the backend."""


def _check_cuda_ipc(options: BackendOptions) -> Iterator[str]:
    if options.device == "cpu":
        yield (
            "--disaggregation-transfer-backend cuda_ipc moves KV from GPU to GPU, and --device cpu has none: use shm, "
            "which also goes between a GPU and a CPU"
        )
    if options.kv_staging_size:
        yield "--kv-staging-size and cuda_ipc: nothing passes through the host's memory there; drop one of the two"


_LIBRARY = "by these libraries, any host"
_MOONCAKE = "pip install 'pdserve[mooncake]' and, on Debian, apt-get install libibverbs1 librdmacm1 libnuma1"
_CUDA_IPC = "it needs an NVIDIA GPU and its driver; between instances of one host without one, use shm"

BACKENDS = {
    "tcp": BackendSpec("tcp.TcpBackend", "any host"),
    "shm": BackendSpec("shm.ShmBackend", "same host, one copy", needs_shared_memory=True),
    "nixl": BackendSpec("nixl.NixlBackend", _LIBRARY, needs="pip install 'pdserve[nixl]'", pins_pool=True),
    "mooncake": BackendSpec("mooncake.MooncakeBackend", _LIBRARY, needs=_MOONCAKE, pins_pool=True),
    "cuda_ipc": BackendSpec(
        *("cuda_ipc.CudaIpcBackend", "from GPU to GPU of one host, or within one; not tried on a GPU yet", _CUDA_IPC),
        stays_on_devices=True,
        check=_check_cuda_ipc,
    ),
    "fake": BackendSpec("fake.FakeBackend", "moves nothing, for tests", moves_nothing=True),
}
"""Every backend by its name, in the order of help texts."""


def describe_backends() -> str:
    """Return all names with their summaries, for a help text. Neighbours with the same summary share it."""
    groups = groupby(BACKENDS, key=lambda name: BACKENDS[name].summary)
    return ", ".join(f"{' and '.join(names)} ({summary})" for summary, names in groups)


if TYPE_CHECKING:
    TransferBackendName = str
else:
    TransferBackendName = Literal[tuple(BACKENDS)]
"""A name in ``BACKENDS``. The command line shows and checks these choices; a type checker can't read them."""
