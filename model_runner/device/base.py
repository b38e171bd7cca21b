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
        """Return whether ``wait`` would return at once. Never waits itself."""
        ...

    def wait(self) -> list[npt.NDArray[Any]]:
        """Wait for everything that was queued before ``fetch``, and return the arrays."""
        ...


class Graph(Protocol, Generic[T]):
    """Captured work. ``output``: what the captured function returned; each replay writes it anew, at its place."""

    output: T

    def replay(self) -> None:
        """Queue the captured work again, on the arguments that lie at the same addresses."""
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
        """Return the device as torch has it. Imports torch."""
        import torch

        return torch.device(self.place)

    @property
    def name(self) -> str:
        """Model of the device: like devices have the same name."""
        return self.kind

    def numa_node(self) -> int | None:
        """Return the NUMA node that the device is attached to, or None if it has none or it is not known."""
        return None

    @abstractmethod
    def memory(self) -> Memory:
        """Return the device's total and free memory."""

    @abstractmethod
    def used(self) -> int:
        """Return the bytes in use: by this process on the host, by all processes on an accelerator."""

    @abstractmethod
    def peak(self, run: Callable[[], object]) -> int:
        """Run ``run``; return by how many bytes the memory that this process has on the device grew at most."""

    @abstractmethod
    def host_zeros(self, shape: Sequence[int], dtype: TorchDType) -> Tensor:
        """Allocate zeros on the host, in memory from which copies to the device are queued without waiting."""

    @abstractmethod
    def send(self, there: Tensor, here: Tensor) -> None:
        """Queue a copy of ``here`` (``host_zeros``) to ``there``. ``here`` must stay as it is until that is done."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Queue a copy of ``array`` to the device and return it. The array may be changed right away."""

    @abstractmethod
    def staged(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy ``array`` on the host, to memory from which copies to the device are queued without waiting."""

    @abstractmethod
    def fetch(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copies to the host, behind what is queued so far; the tensors stay as they are until they are done."""

    @abstractmethod
    def transfer(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor to the first, beside all that is queued, and wait for these copies.

        One tensor of each pair is in ``host_zeros``. The caller makes sure that the source has been written and that
        nothing else uses the target. May be called by another thread than the one that calls the rest.
        """

    def beside_steps(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's work is queued beside that of steps, as ``transfer``'s is."""
        return nullcontext()

    @abstractmethod
    def mark(self) -> Callable[[], bool]:
        """Queue an event behind all that is queued so far; return what tells whether it has come, in any thread.

        Waits for nothing.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which waiting for the device raises (``HostSync``, ``RuntimeError``).

        On devices that can't tell, it does nothing.
        """

    @abstractmethod
    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Record what ``run`` queues, without doing it. It has run before, on the same shapes: nothing is compiled or
        allocated for good while work is recorded. Graphs share the memory of what they compute in between.
        """

    def forget_graphs(self) -> None:  # noqa: B027 - nothing, where there are none
        """Note that all graphs are dropped, so that the next one begins with memory of its own."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all that was queued is done."""

    @abstractmethod
    def give_back(self) -> None:
        """Return memory that nothing uses to the system."""


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Return the array as a tensor on the host, which may share its memory; read-only ones are copied."""
    import torch

    return torch.from_numpy(array if array.flags.writeable else np.array(array))
