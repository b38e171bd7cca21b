"""A device that computes on the host and behaves as one that computes beside it: what happens is recorded, waiting
where one must not raises, and a captured graph repeats just the operations that it recorded, on the tensors that they
were recorded on. What the host knew while it was captured is frozen in it, as in a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdserve.model_runner.device.base import Device, HostSync
from pdserve.runtime.machine.memory import Memory

READS = {"cpu", "numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__"}
"""Of values: the host waits for them."""
SHAPES = {"nonzero", "unique", "masked_select", "bincount", "argwhere"}
"""Of results that depend on values, which the host must then know."""
COPIES = {"tensor", "as_tensor", "cuda"}
"""From memory of the host that is not pinned."""


class _NoSync(TorchFunctionMode):
    def __init__(self, hosts: set[int]) -> None:
        super().__init__()
        self._hosts = hosts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        ours = args and isinstance(args[0], Tensor) and args[0].untyped_storage().data_ptr() in self._hosts
        if (name in READS and not ours) or name in SHAPES or name in COPIES:
            raise HostSync(name)
        if name == "to" and not kwargs.get("non_blocking") and any(isinstance(a, str | torch.device) for a in args[1:]):
            raise HostSync("to(device)")
        if name in ("__getitem__", "__setitem__") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in tree_leaves(args[1])
        ):
            raise HostSync(f"{name}[mask]")
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class RecordedGraph:
    """``output`` and everything in between stay where they are."""

    def __init__(self, device: RecordingDevice, number: int, calls: list[tuple], output: Any) -> None:
        self._device = device
        self._number = number
        self._calls = calls
        self.output = output

    @torch.inference_mode()
    def replay(self) -> None:
        self._device.log.append(f"replay {self._number}")
        for func, args, kwargs, old in self._calls:
            new = func(*args, **kwargs)
            if func.namespace == "c10d":
                # A device's own work would be queued behind it.
                new[-1].wait()
            for before, after in zip(tree_leaves(old), tree_leaves(new), strict=True):
                if isinstance(before, Tensor) and before.data_ptr() != after.data_ptr():
                    before.copy_(after)


class _Fetched:
    def __init__(self, device: RecordingDevice, tensors: Sequence[Tensor]) -> None:
        self._device = device
        self._arrays = [tensor.clone().numpy() for tensor in tensors]

    def wait(self) -> list[np.ndarray]:
        if self._device.is_guarded:
            raise HostSync("wait")
        self._device.log.append("wait")
        return self._arrays


class RecordingDevice(Device):
    """``log``: what was asked for, in order. ``is_guarded``: within ``no_sync``."""

    beside = True
    can_capture = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[str] = []
        self.is_guarded = False
        self._is_capturing = False
        self._hosts: set[int] = set()
        self._host_memory: list[Tensor] = []

    def memory(self) -> Memory:
        return Memory(2**30, 2**29)

    def used(self) -> int:
        return 0

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        zeros = torch.zeros(*shape, dtype=dtype)
        self._hosts.add(zeros.untyped_storage().data_ptr())
        self._host_memory.append(zeros)
        return zeros

    def send(self, there: Tensor, here: Tensor) -> None:
        self._note("send")
        there.copy_(here)

    def upload(self, array: np.ndarray) -> Tensor:
        self._note("upload")
        return torch.from_numpy(np.array(array))

    def staged(self, array: np.ndarray) -> Tensor:
        self._note("staged")
        staged = torch.from_numpy(np.array(array))
        self._hosts.add(staged.untyped_storage().data_ptr())
        return staged

    def fetch(self, tensors: Sequence[Tensor]) -> _Fetched:
        self._note("fetch")
        with torch._C.DisableTorchFunction():
            return _Fetched(self, tensors)

    def transfer(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._note("transfer")
        for to, source in copies:
            assert self._is_host(to) != self._is_host(source)
            to.copy_(source)

    def _is_host(self, tensor: Tensor) -> bool:
        """Whether it lies in ``host_zeros``, or a part of them."""
        at = tensor.data_ptr()
        return any(0 <= at - zeros.data_ptr() < zeros.nbytes for zeros in self._host_memory)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_guarded = self.is_guarded, True
        try:
            with _NoSync(self._hosts):
                yield
        finally:
            self.is_guarded = before

    def capture(self, run: Callable[[], Any]) -> RecordedGraph:
        number = sum(line.startswith("capture") for line in self.log)
        self._note(f"capture {number}")
        self._is_capturing = True
        try:
            with self.no_sync(), _Recorder() as recorder:
                output = run()
        finally:
            self._is_capturing = False
        return RecordedGraph(self, number, recorder.calls, output)

    def synchronize(self) -> None:
        if self.is_guarded:
            raise HostSync("synchronize")
        self.log.append("synchronize")

    def give_back(self) -> None:
        self.log.append("give back")

    def _note(self, what: str) -> None:
        if self._is_capturing:
            raise HostSync(f"{what} while capturing")
        self.log.append(what)
