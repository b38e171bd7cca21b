"""The base of every message, and the packing of integer arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

Epoch = Annotated[str, msgspec.Meta(max_length=128)]
"""Names one start of one instance."""
Room = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""What a request calls its hand-over, and both of its legs with it."""
Reason = Annotated[str, msgspec.Meta(max_length=2048)]
"""Why something is refused or over, for people. Whoever writes it cuts it: ``decode.shown(text, REASON_CHARS)``."""
REASON_CHARS = 1000

I32 = npt.NDArray[np.int32]


class HandoverId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names one hand-over, in every message that is about one.

    ``epoch`` is that of the decode instance, which draws a new ``attempt`` for each: a room alone can be used again, by
    a client that asks twice with the same body, while what it meant before is still being cleared away.
    """

    epoch: Epoch
    room: Room
    attempt: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A message that crosses a process boundary; its tag is the class name, an undeclared field is an error."""


def pack_i32(values: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Little-endian int32 bytes of ``values``; raises ``OverflowError`` where one does not fit."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack_i32(data: bytes) -> I32:
    """The read-only int32 array behind ``data`` (no copy)."""
    return np.frombuffer(data, dtype="<i4")
