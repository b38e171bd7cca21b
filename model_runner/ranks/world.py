"""The ranks of several hosts, or of a torch model, as a world of torch.distributed, by gloo, and NCCL between GPUs.

Its connections have no authentication. On one host they stay on the loopback interface. Between hosts it listens at
``--dist-init-addr`` and on the interface by which that is reached.

Each kind of exchange has connections of its own, and threads don't share any:

    model    sums of the torch model, every rank                    in the order of the passes
    devices  the same where each rank has a GPU, by NCCL            in the order of the passes
    leads    what the hosts' leads carry over in a pass, and steps   in the order of the passes
    watch    a word every few seconds between rank 0 and each lead   so that a death is noticed also while nothing runs
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

# torch.distributed exports these as well, but its type stubs lack them.
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from ...model_files.errors import UnsupportedModel
from ...runtime.cluster_secret import addresses
from ...runtime.ranks import RankPlace
from ...runtime.web.ports import listen
from .process_end import WATCH_SECONDS
from .torch_ranks import TorchRanks

log = logging.getLogger(__name__)

FOR_EVER = timedelta(days=100)
"""An idle instance has no step for as long; that the other side lives, ``watch`` knows."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class World:
    """This rank's membership. Raises ``UnsupportedModel`` where the ranks don't find each other in time."""

    def __init__(self, place: RankPlace, address: str | None, run_dir: Path, seconds: float) -> None:
        """Connect to all other ranks within ``seconds``.

        ``address``: where several hosts meet; None: all ranks are on this host, and meet in ``run_dir``.
        """
        self.place = place
        limit = timedelta(seconds=seconds)
        if address is None:
            os.environ[_INTERFACE] = _named("127.0.0.1")
        else:
            os.environ.setdefault(_INTERFACE, _interface(*_split(address)))
            log.info("rank %d of %d waits for the others at %s, for %.0f s", place.rank, place.size, address, seconds)
        try:
            store = FileStore(f"{run_dir}/ranks", place.size) if address is None else _store(place, address, limit)
            dist.init_process_group("gloo", timeout=limit, world_size=place.size, rank=place.rank, store=store)
            leads = [node * place.local_size for node in range(place.nodes)]
            self.model = _made(dist.new_group(timeout=FOR_EVER))
            self.leads = dist.new_group(leads, timeout=FOR_EVER)
            self.watch = dist.new_group(leads, timeout=timedelta(seconds=WATCH_SECONDS))
            self._devices: dist.ProcessGroup | None = None
        except (RuntimeError, ValueError) as e:
            raise UnsupportedModel(
                f"rank {place.rank} of {place.size} did not meet the others at {address or 'this host'} within "
                f"{seconds:.0f} s: start all {place.nodes} hosts with the same --tp-size, --nnodes and "
                f"--dist-init-addr, one with each --node-rank ({_first_line(e)})"
            ) from e

    def torch_ranks(self, vocab: int, device: torch.device) -> TorchRanks:
        """Return a torch model's ranks, which exchange tensors by gloo on CPUs and by NCCL on GPUs.

        ``vocab``: tokens of the whole vocabulary, which need not divide evenly among the ranks.
        The first call for a GPU connects all ranks, so every rank must make it.
        Raises ``UnsupportedModel`` if torch lacks NCCL, or if NCCL can't connect the GPUs.
        """
        if device.type != "cuda":
            return TorchRanks(self.model, vocab, device)
        if self._devices is None:
            self._devices = _nccl()
            # The first exchange takes memory of the device. It comes before free memory is measured.
            TorchRanks(self._devices, vocab, device).meet()
        return TorchRanks(self._devices, vocab, device)

    def agree(self, pages: int, identity: str) -> int:
        """Return the smallest ``pages`` of all ranks, the KV pages that each has room for. Every rank must call this.

        ``identity`` is equal if all serve the same. Raises ``UnsupportedModel`` if it differs.
        """
        own = torch.tensor([pages, xxhash.xxh3_64_intdigest(identity.encode()) >> 1])
        answers = [torch.empty_like(own) for _ in range(self.place.size)]
        dist.all_gather(answers, own, group=self.model)
        for rank, (_, theirs) in enumerate(answer.tolist() for answer in answers):
            if theirs != int(answers[0][1]):
                raise UnsupportedModel(
                    f"rank {rank} of --tp-size {self.place.size} serves something else than rank 0: its GPU is another "
                    "model of GPU; name alike ones by CUDA_VISIBLE_DEVICES and --base-gpu-id"
                )
        return min(int(answer[0]) for answer in answers)

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return ``own`` of each host's lead, in the order of the hosts.

        All leads call this, with tensors of one size and type.
        """
        parts = [torch.empty_like(own) for _ in range(self.place.nodes)]
        dist.all_gather(parts, own, group=self.leads)
        return parts

    def broadcast(self, tensor: Tensor, node: int) -> None:
        """Copy ``tensor`` from the lead of host ``node`` into that of all other leads, in place.

        All leads call this.
        """
        dist.broadcast(tensor, node * self.place.local_size, group=self.leads)

    def send_frame(self, frame: bytes) -> None:
        """Send the bytes ``frame`` from rank 0 to the leads of all other hosts, which call ``recv_frame``."""
        self.broadcast(torch.tensor([len(frame)]), 0)
        self.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 0)

    def recv_frame(self) -> bytes:
        """Wait, without a limit, for the bytes that rank 0 sends by ``send_frame``, and return them.

        Leads of other hosts call it.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self.broadcast(size, 0)
        frame = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(frame, 0)
        return frame.numpy().tobytes()


def _nccl() -> dist.ProcessGroup:
    """Connect all ranks by NCCL, each with the current GPU of its thread. Raises ``UnsupportedModel``.

    This has not been tried on GPUs yet.
    """
    if not dist.is_nccl_available():
        raise UnsupportedModel("--tp-size on GPUs needs NCCL, which this build of torch has not: install one for CUDA")
    # Where its ranks find each other; what they exchange goes by NVLink, PCIe or the host's memory.
    os.environ.setdefault(_NCCL_INTERFACE, f"={os.environ[_INTERFACE]}")
    try:
        return _made(dist.new_group(backend="nccl", timeout=FOR_EVER))
    except (RuntimeError, ValueError) as e:
        raise UnsupportedModel(f"NCCL does not bring the GPUs of the ranks together: {_first_line(e)}") from e


def _made(group: dist.ProcessGroup | object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def _store(place: RankPlace, address: str, limit: timedelta) -> Store:
    """Open the store through which ranks exchange their addresses. Rank 0 listens, at ``address`` alone."""
    host, port = _split(address)
    if place.rank:
        return TCPStore(host, port, place.size, False, limit)
    try:
        listener = listen(host, port, place.size)
    except OSError as e:
        raise UnsupportedModel(
            f"can't listen on {address} ({e.strerror}); --dist-init-addr is an address of the first host"
        ) from e
    return TCPStore(host, port, place.size, True, limit, master_listen_fd=listener.detach())


def _split(address: str) -> tuple[str, int]:
    [(host, port)] = addresses("--dist-init-addr", address)
    return host, port


def _interface(host: str, port: int) -> str:
    """Return the name of the network interface by which ``host`` is reached; nothing is sent.

    Raises ``UnsupportedModel``.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            # Of a datagram socket: nothing is sent.
            probe.connect(where)
            return _named(probe.getsockname()[0])
    except OSError as e:
        raise UnsupportedModel(f"--dist-init-addr {host}:{port} can't be reached: {e.strerror}") from e


def _named(address: str) -> str:
    for name, its_addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == address for found in its_addresses):
            return name
    raise UnsupportedModel(f"no network interface has the address {address}; name one in {_INTERFACE}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
