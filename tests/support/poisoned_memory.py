"""Memory of a simulated device: freed blocks are overwritten, and no block begins at a multiple of 16 bytes.

A caching allocator gives a freed block to the next tensor of its size, so work that still reads it computes from other
numbers. Here such work computes from ``POISON``. It is NaN in every float type, and as an integer beyond every index.
Memory that was never written contains it as well.

Blocks begin 8 bytes after a multiple of 64. Slices of one copy may begin at any multiple of an element, so no kernel
may rely on more. The bytes in use are counted.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

POISON = 0x7FFF
"""Pattern of 16 bits that fills freed memory."""
LINE, BEHIND = 64, 8
KEPT_BACK = 64
"""Freed blocks of a size that wait before one of them is used again: until then a read gives ``POISON``."""
KEPT_BYTES = 256 << 20
"""Bytes of all freed blocks that wait. What is freed beyond goes to the system at once."""


BRANCHES = (tuple, list, dict)
"""Types of a tree's inner nodes. Their subclasses, such as named tuples, are left to torch."""


class FreedMemory(RuntimeError):
    """A graph reads memory that was freed after its capture."""


class PoisonedMemory(TorchDispatchMode):
    """Within it, results of operations lie in this memory. ``behind``: bytes of a block's begin beyond a line."""

    def __init__(self, behind: int = BEHIND) -> None:
        super().__init__()
        self._behind = behind
        self._free: dict[int, deque[np.ndarray]] = defaultdict(deque)
        self._kept = 0
        self.used = 0
        """Bytes of tensors."""
        self.peak = 0
        """Maximum of ``used`` since this was last set."""
        self.shared = 0
        """Part of ``used`` that a device would not take a second time, because graphs share it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        written = "empty" not in func.__name__

        def moved(tensor: Tensor) -> Tensor:
            return tensor if tensor.untyped_storage().data_ptr() in given else self.moved(tensor, written)

        return mapped(Tensor, moved, out)

    def moved(self, tensor: Tensor, written: bool = True) -> Tensor:
        """Return the tensor in a block of this memory, with its values only if it is ``written``."""
        storage = tensor.untyped_storage()
        if not storage.nbytes() or tensor.device.type != "cpu":
            return tensor
        block = self._block(storage.nbytes())
        there = torch.from_numpy(block).view(tensor.dtype)
        if written:
            there.copy_(torch.empty(0, dtype=tensor.dtype).set_(storage, 0, there.shape))
        return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _block(self, nbytes: int) -> np.ndarray:
        size = -(-nbytes // LINE) * LINE
        free = self._free[size]
        memory = free.popleft() if len(free) > KEPT_BACK else None
        if memory is None:
            memory = _memory(size, self._behind)
        else:
            self._kept -= size
        # The tensor's storage holds this view and nothing else does.
        block = memory[:nbytes]
        self.used += size
        self.peak = max(self.peak, self.used - self.shared)
        weakref.finalize(block, self._take_back, memory).atexit = False
        return block

    def mark(self) -> int:
        """Begin to look for the peak; return what is in use now."""
        self.peak = self.used - self.shared
        return self.peak

    def _take_back(self, memory: np.ndarray) -> None:
        self.used -= len(memory)
        memory.view(np.uint16)[:] = POISON
        if self._kept + len(memory) <= KEPT_BYTES:
            self._free[len(memory)].append(memory)
            self._kept += len(memory)


class Address:
    """A tensor as captured work knows it: where it lies, not whether it is still there."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        """Return the tensor at this address; raises ``FreedMemory``."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise FreedMemory(f"{self._dtype} {list(self._layout[1])} was freed")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of ``tree``."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


# Each operation's arguments go through these two, for which torch's own take longer than the operation.


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of ``tree``."""
    if not isinstance(tree, BRANCHES):
        return [tree]
    if type(tree) not in BRANCHES:
        return tree_leaves(tree)
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves_of(part)]


def mapped(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with a change of each leaf of a ``kind``."""
    if isinstance(tree, kind):
        return change(tree)
    if not isinstance(tree, BRANCHES):
        return tree
    if type(tree) is tuple:
        return tuple([mapped(kind, change, part) for part in tree])
    if type(tree) is list:
        return [mapped(kind, change, part) for part in tree]
    if type(tree) is dict:
        return {name: mapped(kind, change, part) for name, part in tree.items()}
    return tree_map_only(kind, change, tree)


def overwrite(tensor: Tensor) -> None:
    """Fill all of its memory with ``POISON``."""
    torch.empty(0, dtype=torch.int16).set_(tensor.untyped_storage()).fill_(POISON)


def _memory(size: int, behind: int) -> np.ndarray:
    room = np.empty(size + 2 * LINE, dtype=np.uint8)
    begin = -room.ctypes.data % LINE + behind
    memory = room[begin : begin + size]
    memory.view(np.uint16)[:] = POISON
    return memory
