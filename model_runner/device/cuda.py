"""An NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic

import numpy.typing as npt
import torch
from torch import Tensor

from ...runtime.machine.gpus import numa_node_of
from ...runtime.machine.memory import Memory
from .base import Device, Graph, HostCopy, T, as_tensor


class _Pinned:
    """Copies in pinned memory, and the event behind them. The tensors are held until they are read."""

    def __init__(self, tensors: Sequence[Tensor], copies: Sequence[Tensor], done: torch.cuda.Event) -> None:
        self._tensors: Sequence[Tensor] | None = tensors
        self._copies = copies
        self._done = done

    def is_done(self) -> bool:
        done: bool = self._done.query()  # type: ignore[no-untyped-call]
        return done

    def wait(self) -> list[npt.NDArray[Any]]:
        self._done.synchronize()
        self._tensors = None
        return [copy.numpy() for copy in self._copies]


class _CudaGraph(Generic[T]):
    def __init__(self, graph: torch.cuda.CUDAGraph, output: T) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice(Device):
    """The GPU that torch calls ``place``, and takes from now on in this thread; its current stream is the main one.

    ``strict``: have ``no_sync`` mean it. Without, it costs nothing and does nothing.
    """

    beside = True
    can_capture = True
    memory_errors = (MemoryError, torch.OutOfMemoryError)

    def __init__(self, place: str, *, strict: bool = False) -> None:
        super().__init__(place)
        device = self.torch
        # Kernels that Triton and FlashInfer launch go to the thread's device, whatever their arguments are on.
        if device.index is not None:
            torch.cuda.set_device(device)
        self._strict = strict
        # Of high priority: otherwise their short kernels wait until all blocks of a running kernel are issued.
        self._copies = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._transfers = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._graph_memory: Any = None

    @property
    def name(self) -> str:
        """Name of the GPU's model, as CUDA reports it."""
        return torch.cuda.get_device_name(self.torch)

    def numa_node(self) -> int | None:
        """Return the NUMA node of the GPU's PCI address, or None if torch or the host does not report it."""
        properties = torch.cuda.get_device_properties(self.torch)
        # Older ones of torch do not tell.
        domain, bus, number = (int(getattr(properties, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device"))
        return None if min(domain, bus, number) < 0 else numa_node_of(f"{domain:04x}:{bus:02x}:{number:02x}.0")

    def memory(self) -> Memory:
        """Return the GPU's total and free memory in bytes, after releasing unused blocks of torch's allocator."""
        self.give_back()
        free, total = torch.cuda.mem_get_info(self.torch)
        return Memory(total, free)

    def used(self) -> int:
        """Return the bytes of the GPU in use by all processes, after releasing unused blocks of torch's allocator."""
        memory = self.memory()
        return memory.total - memory.free

    def peak(self, run: Callable[[], object]) -> int:
        """Call ``run``, and return by how many bytes the memory that torch's allocator has reserved grew at most.

        Gaps between tensors count; memory that other libraries allocate does not. Unused reserved blocks are released
        first.
        """
        self.give_back()
        before = torch.cuda.memory_reserved(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        run()
        self.synchronize()
        return torch.cuda.max_memory_reserved(self.torch) - before

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in pinned host memory."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def send(self, there: Tensor, here: Tensor) -> None:
        """Queue the copy of ``here`` to ``there`` on the current stream, without waiting."""
        there.copy_(here, non_blocking=True)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy ``array`` to pinned memory, queue the copy from there to the GPU, and return the GPU's tensor.

        Torch reuses the pinned memory only after the copy is done.
        """
        return self.staged(array).to(self.torch, non_blocking=True)

    def staged(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a copy of ``array`` in pinned host memory."""
        return as_tensor(array).pin_memory()

    def fetch(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Queue copies to pinned memory on a stream of their own, behind the current stream's work; never wait."""
        self._copies.wait_stream(torch.cuda.current_stream(self.torch))
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            done.record(self._copies)
        return _Pinned(tensors, copies, done)

    def transfer(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queue the copies of the pairs (target, source) on the transfer stream, and wait until they are done."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._transfers):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            done.record(self._transfers)
        done.synchronize()

    def beside_steps(self) -> AbstractContextManager[object]:
        """Return a context that makes this GPU and its transfer stream the thread's current ones."""
        beside: AbstractContextManager[object] = torch.cuda.stream(self._transfers)
        return beside

    def mark(self) -> Callable[[], bool]:
        """Record an event on the current stream, and return its query function, which never waits."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch))
        has_come: Callable[[], bool] = event.query
        return has_come

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which torch raises ``RuntimeError`` on a wait, if the device is ``strict``.

        If it isn't, the context does nothing. Waits within other libraries go unnoticed.
        """
        return _no_sync() if self._strict else nullcontext()

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Capture the work that ``run`` queues as a CUDA graph, without executing it.

        All graphs share one memory pool. Raises the error of ``run`` that broke the capture, and not the capture's own.
        Raises ``torch.OutOfMemoryError`` if torch, the driver or Triton had no memory left.
        """
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        failure: Exception | None = None
        try:
            # Other threads (a transfer's) may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
                try:
                    output = run()
                except Exception as e:
                    # Any error: the end of a broken capture raises an error of its own, which hides this one.
                    failure = e
                    raise
        except RuntimeError as e:
            error = failure or e
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" not in str(error):
                raise error from None
            # The driver's part of a graph, or a kernel's code.
            raise torch.OutOfMemoryError(str(error)) from None
        return _CudaGraph(graph, output)

    def forget_graphs(self) -> None:
        """Use a new memory pool for the next graph: torch refuses allocations in a pool that is being freed."""
        self._graph_memory = None

    def synchronize(self) -> None:
        """Wait until all streams of the GPU are idle."""
        torch.cuda.synchronize(self.torch)

    def give_back(self) -> None:
        """Release unused blocks of torch's allocator to the GPU."""
        torch.cuda.empty_cache()


@contextmanager
def _no_sync() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
