"""A device that computes on the host and behaves like one that computes beside it.

What happens is recorded, and waiting at the wrong time raises. A captured graph repeats just the operations that it
recorded, at the addresses that they were recorded at. What the host knew while it was captured is frozen in it, as in a
real one.

It is no kinder than a real one. A graph holds what it returns and computes in between, and nothing that it reads: if
that is freed, its replay raises. Queued work is done as late as possible: tensors are fetched when they are waited for.
Memory of what is computed within ``no_sync``, and within the device itself (``with device: ...``), is that of
``poisoned_memory.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pdserve.model_runner.device.base import Device, HostSync
from pdserve.runtime.machine.memory import Memory

from .poisoned_memory import Address, FreedMemory, PoisonedMemory, leaves_of, mapped, overwrite, tensors_in

READS = {"cpu", "numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__"}
"""Operations that read values, so that the host waits for them."""
SHAPES = {"nonzero", "unique", "masked_select", "bincount", "argwhere"}
"""Operations with shapes that depend on values, so that the host waits for them."""
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
            isinstance(i, Tensor) and i.dtype == torch.bool for i in leaves_of(args[1])
        ):
            raise HostSync(f"{name}[mask]")
        return func(*args, **kwargs)


class _Call(NamedTuple):
    """An operation. ``args`` and ``kwargs`` have an ``Address`` in each tensor's place."""

    func: Callable
    args: tuple
    kwargs: dict
    out: Any


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.made: list[Tensor] = []
        """The graph's own memory: every tensor that an operation made."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        self.made += [t for t in tensors_in(out) if t.untyped_storage().data_ptr() not in given]
        self.calls.append(_Call(func, *(mapped(Tensor, Address, part) for part in (args, kwargs or {}, out))))
        return out


class RecordedGraph:
    """``output`` and everything in between stay where they are. The latter is other graphs' memory between replays."""

    def __init__(self, device: RecordingDevice, number: int, recorder: _Recorder, output: Any) -> None:
        self._device = device
        self._number = number
        self._calls = recorder.calls
        self._made = recorder.made
        self.output = output
        self.own_bytes = sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._made}.values()
        )

    @torch.inference_mode()
    def replay(self) -> None:
        self._device.log.append(f"replay {self._number}")
        with _disable_current_modes():
            for made in self._made:
                overwrite(made)
            for call in self._calls:
                self._repeat(call)

    def _repeat(self, call: _Call) -> None:
        try:
            args, kwargs, old = mapped(Address, Address.tensor, (call.args, call.kwargs, call.out))
        except FreedMemory as e:
            raise FreedMemory(f"graph {self._number}, {call.func}: {e}") from None
        new = call.func(*args, **kwargs)
        if call.func.namespace == "c10d":
            # A device's own work would be queued behind it.
            new[-1].wait()
        for before, after in zip(leaves_of(old), leaves_of(new), strict=True):
            if isinstance(before, Tensor) and before.data_ptr() != after.data_ptr():
                before.copy_(after)


class _Fetched:
    def __init__(self, device: RecordingDevice, tensors: Sequence[Tensor]) -> None:
        self._device = device
        self._tensors = tensors
        self._asked = 0

    def is_done(self) -> bool:
        """Return whether the copy is done: not at the first call."""
        self._asked += 1
        return self._asked > 1

    def wait(self) -> list[np.ndarray]:
        if self._device.is_guarded:
            raise HostSync("wait")
        self._device.log.append("wait")
        with _disable_current_modes():  # copies are the host's
            return [tensor.clone().numpy() for tensor in self._tensors]


class RecordingDevice(Device):
    """``log``: what was asked for, in order. ``is_guarded``: within ``no_sync``."""

    beside = True
    can_capture = True

    def __init__(self, memory: PoisonedMemory | None = None) -> None:
        super().__init__("cpu")
        self.log: list[str] = []
        self.is_guarded = False
        self._is_capturing = False
        self._memory = memory or PoisonedMemory()
        self._depth = 0
        self._hosts: set[int] = set()
        self._host_memory: list[Tensor] = []
        self.marks: list[bool] = []
        """Whether each event has come; a test says when."""
        self._graphs: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()

    def __enter__(self) -> Self:
        self._depth += 1
        self._memory.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._depth -= 1
        self._memory.__exit__(*raised)

    def memory(self) -> Memory:
        return Memory(2**30, 2**29)

    def used(self) -> int:
        return 0

    def count_memory(self) -> int:
        """Begin to look for the ``most`` bytes that tensors have; return those that they have now."""
        return self._memory.mark()

    @property
    def most(self) -> int:
        return self._memory.peak

    def peak(self, run: Callable[[], object]) -> int:
        before = self.count_memory()
        with nullcontext() if self._depth else self:
            run()
        return self.most - before

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            zeros = torch.zeros(*shape, dtype=dtype)
        self._hosts.add(zeros.untyped_storage().data_ptr())
        self._host_memory.append(zeros)
        return zeros

    def send(self, there: Tensor, here: Tensor) -> None:
        self._note("send")
        there.copy_(here)

    def upload(self, array: np.ndarray) -> Tensor:
        self._note("upload")
        return self._memory.moved(torch.from_numpy(np.array(array)))

    def staged(self, array: np.ndarray) -> Tensor:
        self._note("staged")
        staged = torch.from_numpy(np.array(array))
        self._hosts.add(staged.untyped_storage().data_ptr())
        return staged

    def fetch(self, tensors: Sequence[Tensor]) -> _Fetched:
        self._note("fetch")
        return _Fetched(self, tensors)

    def transfer(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._note("transfer")
        for to, source in copies:
            assert self._is_host(to) != self._is_host(source)
            to.copy_(source)

    def mark(self) -> Callable[[], bool]:
        """Queue a mark, and return a function that tells whether it has come, as ``marks`` says."""
        self._note("mark")
        number = len(self.marks)
        self.marks.append(False)
        return lambda: self.marks[number]

    def _is_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in ``host_zeros``, or in a part of them."""
        at = tensor.data_ptr()
        return any(0 <= at - zeros.data_ptr() < zeros.nbytes for zeros in self._host_memory)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_guarded = self.is_guarded, True
        try:
            with nullcontext() if self._depth else self, _NoSync(self._hosts):
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
        graph = RecordedGraph(self, number, recorder, output)
        self._graphs.add(graph)
        weakref.finalize(graph, self._count_graphs).atexit = False
        self._count_graphs()
        return graph

    def _count_graphs(self) -> None:
        """Count the memory that graphs share: that of their intermediate results."""
        sizes = [graph.own_bytes for graph in self._graphs]
        self._memory.shared = sum(sizes) - max(sizes, default=0)

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
