"""What the benchmark says to the processes that it measures, and what they answer: one answer to each command."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from ...messages.base import Message
from ...messages.worker import SliceChecksum


class How(Enum):
    """Means of moving bytes. ``ENGINE``: a ``TransferEngine``, by one of its backends. ``RAW``: a library alone."""

    ENGINE = "engine"
    RAW = "raw"
    MEMCPY = "memcpy"


class Role(Enum):
    """Role of a side. The pool of ``OWNER`` is written to. Copying within one process needs no owner."""

    WRITER = "writer"
    OWNER = "owner"


class Way(NamedTuple):
    """A way to move bytes. ``backend`` names the transfer backend or the library; it is "" for a plain copy."""

    how: How
    backend: str = ""

    @property
    def label(self) -> str:
        """Return the way's name for people, such as "raw nixl"."""
        return {How.ENGINE: self.backend, How.RAW: f"raw {self.backend}", How.MEMCPY: "memcpy"}[self.how]


MEMCPY = Way(How.MEMCPY)


class Begin(Message):
    """The first command. Answers: ``Begun``, ``NotInstalled``."""

    how: How
    backend: str
    role: Role
    page_bytes: int
    num_pages: int


class Begun(Message):
    """``means``: what the writer has to know of the owner."""

    means: bytes = b""


class NotInstalled(Message):
    """``error`` says how to install it."""

    error: str


class Connect(Message):
    """To the writer: the owner is there. Answer: ``Done``."""

    means: bytes


class Grant(Message):
    """To the owner: these pages (int32) are about to be written, and no others; without any, none are for now. Answer:
    ``Done``.
    """

    pages: bytes


class Done(Message):
    """It is done."""


class Move(Message):
    """To the writer: move pages (int32), again and again for ``seconds``. Answer: ``Moved``.

    ``hashed``: whether the sender computes checksums meanwhile; only an engine does.
    """

    src: bytes
    dst: bytes
    seconds: float
    hashed: bool


class Moved(Message):
    """``times``: seconds of each request; ``slices``: the engine's checksums."""

    times: list[float]
    slices: Sequence[SliceChecksum] = ()


class Verify(Message):
    """Command to check pages (int32) of the destination against checksums, repeatedly for ``seconds``.

    It goes to the owner of the pool, or to the only side if there is no owner. Answer: ``Verified``.
    """

    pages: bytes
    slices: Sequence[SliceChecksum]
    seconds: float


class Verified(Message):
    """``times``: seconds of each time."""

    times: list[float]


class Failed(Message):
    """Instead of any other answer."""

    error: str


Command = Begin | Connect | Grant | Move | Verify
Answer = Begun | NotInstalled | Done | Moved | Verified | Failed
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.encode
