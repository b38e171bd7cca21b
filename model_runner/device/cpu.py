"""The host's own processor: work is done when the call returns, nothing is queued and nothing captured.

Methods with tensors import torch, which nothing but a torch engine asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ...runtime.machine.memory import Memory, host_memory, resident_bytes
from ...runtime.malloc import trim
from .base import Device, Graph, HostCopy, T, as_tensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as TorchDType


class _There:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[npt.NDArray[Any]]:
        return [tensor.numpy() for tensor in self._tensors]


class CpuDevice(Device):
    """The host's own processor: work is done when a call returns, and nothing is queued or captured."""

    beside = False
    can_capture = False

    def __init__(self) -> None:
        super().__init__("cpu")

    def memory(self) -> Memory:
        """Return the host's total and free memory in bytes, within this process's control group."""
        return host_memory()

    def used(self) -> int:
        """Return this process's resident bytes, including mapped files and shared memory."""
        return resident_bytes()

    def peak(self, run: Callable[[], object]) -> int:
        """Raise ``NotImplementedError``: all processes share the host's memory."""
        raise NotImplementedError("memory of the host is shared by all processes")

    def host_zeros(self, shape: Sequence[int], dtype: TorchDType) -> Tensor:
        """Return zeros in ordinary memory: copies within the host need no pinned memory."""
        import torch

        return torch.zeros(*shape, dtype=dtype)

    def send(self, there: Tensor, here: Tensor) -> None:
        """Copy ``here`` to ``there`` at once; ``here`` may be changed afterwards."""
        there.copy_(here)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a copy of ``array`` in ordinary memory."""
        return as_tensor(array).clone()

    def staged(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a copy of ``array`` in ordinary memory: copies within the host need no pinned memory."""
        return as_tensor(array).clone()

    def fetch(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Return the tensors' own memory as finished copies. Later writes to the tensors show in them."""
        return _There(tensors)

    def transfer(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each pair (target, source) in the calling thread, one after another."""
        for to, source in copies:
            to.copy_(source)

    def mark(self) -> Callable[[], bool]:
        """Return a function that always returns True: no work is ever queued."""
        return lambda: True

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: there is no device to wait for."""
        return nullcontext()

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Raise ``NotImplementedError``: a CPU has no graphs."""
        raise NotImplementedError("nothing is captured on a CPU")

    def synchronize(self) -> None:
        """Do nothing: no work is queued."""

    def give_back(self) -> None:
        """Return free memory of the C heap to the kernel."""
        trim()
