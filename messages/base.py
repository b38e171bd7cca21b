"""The base of every message, and the packing of integer arrays.

NumPy is imported when arrays are packed. The supervisor, routers and ``pdserve up`` pack none, and it would be a third
of what they import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Epoch = Annotated[str, msgspec.Meta(max_length=128)]
"""Names one start of one instance."""
Room = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Number of a hand-over, drawn for each request and sent to both of its legs."""
Reason = Annotated[str, msgspec.Meta(max_length=2048)]
"""Why something is refused or over, for people. Its author cuts it: ``decode.shown(text, REASON_CHARS)``."""
REASON_CHARS = 1000

MAX_TOKENS = (1 << 31) - 1
"""Maximum of a count of tokens, and of a token id."""

I32: TypeAlias = "npt.NDArray[np.int32]"


class HandoverId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names one hand-over, in every message that is about one.

    A room alone is not unique. A client that sends the same body twice uses it again, while the first hand-over is
    still being cleared away.
    """

    epoch: Epoch
    """Epoch of the decode instance."""
    room: Room
    attempt: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """Drawn anew by the decode for each hand-over."""


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """A message that crosses a process boundary; its tag is the class name, an undeclared field is an error."""


def pack_i32(values: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Pack ``values`` into little-endian int32 bytes; raises ``OverflowError`` if a value does not fit."""
    import numpy as np

    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack_i32(data: bytes) -> I32:
    """Return ``data`` as a read-only int32 array, without a copy."""
    import numpy as np

    return np.frombuffer(data, dtype="<i4")
