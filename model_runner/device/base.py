"""What the step loop needs of a device: queued copies, events, graphs, and a guard against waiting.

A device that computes beside the worker has three streams. All work is queued on the main one, in the order of the
calls. Results travel to the host on another, so that the next step's work is not behind them, and pages of KV on a
third. What is queued reads its arguments when its turn comes. So memory of the host that is sent must not change until
then. ``upload`` sees to that, and so do the two turns of ``step_arrays.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ...runtime.machine.memory import Memory

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as TorchDevice
    from torch import dtype as TorchDType

T = TypeVar("T")


class HostSync(RuntimeError):
    """The host waited for the device where it must not; see ``Device.no_sync``."""


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def is_done(self) -> bool:
        """Return whether ``wait`` would return at once, because all tensors have arrived. Never waits itself."""
        ...

    def wait(self) -> list[npt.NDArray[Any]]:
        """Wait until the copies have arrived, and return them as arrays in the order of the tensors."""
        ...


class Graph(Protocol, Generic[T]):
    """Captured work. ``output``: what the captured function returned; each replay writes it anew, at its place."""

    output: T

    def replay(self) -> None:
        """Queue the captured work again. It reads its arguments at the addresses that it was captured with."""
        ...


class Device(ABC):
    """One device; see the module. ``beside``: whether it computes beside the host, so that work can be queued."""

    beside: bool
    can_capture: bool
    memory_errors: tuple[type[Exception], ...] = (MemoryError,)
    """What is raised if the device has no memory left."""

    def __init__(self, place: str) -> None:
        """Represent the device at ``place``, as torch names it: "cpu" or "cuda:0"."""
        self.place = place
        self.kind = place.split(":")[0]
        """Kind of the device: "cpu" or "cuda"."""

    @cached_property
    def torch(self) -> TorchDevice:
        """Return the ``torch.device`` of this device. Imports torch."""
        import torch

        return torch.device(self.place)

    @property
    def name(self) -> str:
        """Name of the device's model. Devices of the same model have the same name."""
        return self.kind

    def numa_node(self) -> int | None:
        """Return the NUMA node that the device is attached to, or None if it has none or it is not known."""
        return None

    @abstractmethod
    def memory(self) -> Memory:
        """Return the device's total and free memory in bytes."""

    @abstractmethod
    def used(self) -> int:
        """Return the bytes of memory in use: by this process on the host, by all processes on an accelerator."""

    @abstractmethod
    def peak(self, run: Callable[[], object]) -> int:
        """Call ``run``, and return by how many bytes this process's memory on the device grew at most meanwhile."""

    @abstractmethod
    def host_zeros(self, shape: Sequence[int], dtype: TorchDType) -> Tensor:
        """Return zeros in host memory from which copies to the device, and to which copies from it, need no wait."""

    @abstractmethod
    def send(self, there: Tensor, here: Tensor) -> None:
        """Queue a copy from the host tensor ``here`` to the device tensor ``there``.

        ``here`` is from ``host_zeros``, and must not be changed before the copy is done.
        """

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Queue a copy of ``array`` to the device, and return the device's tensor.

        ``array`` may be changed right away.
        """

    @abstractmethod
    def staged(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a host copy of ``array``, in memory from which copies to the device are queued without waiting."""

    @abstractmethod
    def fetch(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copies of ``tensors`` to the host, behind the work queued so far, and return without waiting.

        The tensors must not be written until the copies are done.
        """

    @abstractmethod
    def transfer(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy in each pair (target, source), beside the steps' work, and wait for these copies alone.

        One tensor of each pair is in ``host_zeros``. The caller makes sure that the source has been written and that
        nothing else uses the target. Another thread than that of the other calls may call this.
        """

    def beside_steps(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's work is queued beside that of steps, on the queue of ``transfer``.

        This default does nothing.
        """
        return nullcontext()

    @abstractmethod
    def mark(self) -> Callable[[], bool]:
        """Queue an event behind earlier work, and return a function that tells whether the device has reached it.

        The function never waits, and any thread may call it.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which waiting for the device raises ``HostSync`` or ``RuntimeError``.

        It does nothing on devices that can't detect a wait.
        """

    @abstractmethod
    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Record the work that ``run`` queues as a graph, without doing it.

        ``run`` must have run before on the same shapes, so that nothing is compiled or allocated for good while it is
        recorded. Graphs share their intermediate memory, so only one may run at a time.
        """

    def forget_graphs(self) -> None:  # noqa: B027 - nothing, where there are none
        """Give up the memory that all graphs share, after the caller has dropped every graph.

        The next capture takes new memory.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work that was queued on the device is done."""

    @abstractmethod
    def give_back(self) -> None:
        """Return memory that this process's allocator keeps unused to the device or the kernel."""


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Return ``array`` as a tensor on the host that shares its memory; a read-only array is copied."""
    import torch

    return torch.from_numpy(array if array.flags.writeable else np.array(array))
