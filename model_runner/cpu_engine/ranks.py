"""What the tensor-parallel ranks of a host share: the memory in which the CPU engines add up their parts of a sum.

The host's lead makes it, and its other ranks map it by its descriptor. It is a memfd: it has no name, and is gone with
the last rank. Room for the longest pass's parts is reserved, and memory is taken as passes first need it. Logits
go in slices of a fixed number of rows.

Shapes: R ranks, T tokens, V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int32, c_int64, c_uint32
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...runtime.ranks import RankPlace
from .library import load_library

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
PANEL = 32
"""``kPanel`` of linear.h: rows of the residual are padded to it."""
FLOAT_BYTES = 4
PATIENCE_SECONDS = 300
"""Maximum seconds that a rank waits for the others of its host in one exchange.

Only a rank that hangs or was stopped is so late. ``/health`` reports the step earlier (``--watchdog-timeout``).
"""


class Exchange(IntEnum):
    """``Exchange`` of rank_group.h, but for what is not carried between hosts."""

    PARTS = 0
    LOGITS = 1


class ExchangeRoom(NamedTuple):
    """Passes have up to ``tokens`` tokens, of ``hidden`` and ``vocab`` elements."""

    tokens: int
    hidden: int
    vocab: int

    @property
    def part_floats(self) -> int:
        """Number of float32 elements that one rank writes to a sum of the longest pass, with rows padded to panels."""
        return self.tokens * (-(-self.hidden // PANEL) * PANEL)

    def make(self, place: RankPlace, fd: int | None = None, carry: Carry | None = None) -> NativeRanks:
        """Return the exchange of the rank at ``place`` with the others of its host, after making or mapping its memory.

        ``fd``: descriptor of the shared memory that the host's lead rank has made; None: this is the lead, and makes
        it. ``carry``: function that exchanges with other hosts, called on the lead alone; None: there are none.
        """
        return NativeRanks(place, self, fd, carry)


Carry = Callable[["NativeRanks", Exchange, int, int], None]
"""Brings what this host's ranks have written to the others, and theirs here. It must not raise.

Arguments: the memory, what is carried, the number of the exchange or of the slice of logits, and a count. It counts the
floats of a part, or the rows of logits.
"""
_CARRY = CFUNCTYPE(None, c_int32, c_uint32, c_int64)


def _end_without(rank: int) -> None:
    """End this process, because ``rank`` of this host has ended and the engine would wait for it for ever."""
    log.critical(
        "tensor-parallel rank %d of this host has ended in the middle of a pass; ending this process, and with it the "
        "instance. The last messages of rank %d say why; then start the instance again",
        *(rank, rank),
    )
    logging.shutdown()
    os._exit(1)  # sys.exit would raise into the engine, where it is lost.


def _end_late(seconds: int) -> None:
    """End this process, because a rank of this host has not come to an exchange for ``seconds``, and has not ended."""
    log.critical(
        "a tensor-parallel rank of this host hangs or was stopped: the others have waited for it for %d s in the "
        "middle of a pass; ending this process, and with it the instance. Look for a process that is stopped, or waits "
        "for a disk (state T or D of ps); then start the instance again",
        seconds,
    )
    logging.shutdown()
    os._exit(1)  # sys.exit would raise into the engine, where it is lost.


_END_WITHOUT = CFUNCTYPE(None, c_int32)(_end_without)
_END_LATE = CFUNCTYPE(None, c_int32)(_end_late)


class NativeRanks:
    """The shared memory of tensor-parallel ranks, as the rank at ``place`` sees it.

    ``fd``: of memory that the lead has made; None for the lead itself. ``carry``: the lead's, if there are other hosts.
    ``patience``: seconds to wait for other ranks in an exchange, before this process ends. Raises ``OSError`` if there
    is no memory.
    """

    def __init__(
        self,
        place: RankPlace,
        room: ExchangeRoom,
        fd: int | None = None,
        carry: Carry | None = None,
        patience: int = PATIENCE_SECONDS,
    ) -> None:
        self._library = library = load_library()
        self.place, self.room = place, room
        self.most_tokens: int | None = room.tokens
        """Maximum tokens of a pass."""
        nbytes = library.pds_ranks_bytes(place.size, room.part_floats, room.vocab)
        self.fd = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, nbytes)
        self._memory = mmap.mmap(self.fd, nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._carry = _CARRY() if carry is None else _CARRY(lambda what, *rest: carry(self, Exchange(what), *rest))
        self.handle: int | None = library.pds_ranks_new(
            self._address,
            place.rank,
            place.size,
            room.part_floats,
            room.vocab,
            place.local_size,
            self._carry,
            _END_WITHOUT,
            _END_LATE,
            patience,
        )
        if self.handle is None:
            raise MemoryError
        self.close = weakref.finalize(self, library.pds_ranks_free, self.handle)

    def parts(self, exchange: int, count: int) -> Floats:
        """Return a view of what each rank has written to the sum with number ``exchange``, [R, count] floats.

        The ranks' parts are summands, not yet added up. ``count``: floats of each part that the pass uses.
        """
        first, second = (self._library.pds_ranks_part(self.handle, exchange, rank) for rank in (0, 1))
        stride = (second - first) // FLOAT_BYTES
        return self._floats(first, self.place.size * stride).reshape(self.place.size, stride)[:, :count]

    def logits(self, rows: int, slice_number: int) -> Floats:
        """Return a view of the logits in slice ``slice_number`` of the shared memory, [rows, V]."""
        begin = self._library.pds_ranks_logits(self.handle, slice_number)
        return self._floats(begin, rows * self.room.vocab).reshape(rows, self.room.vocab)

    def _floats(self, address: int, count: int) -> Floats:
        return np.frombuffer(self._memory, dtype=np.float32, count=count, offset=address - self._address)
