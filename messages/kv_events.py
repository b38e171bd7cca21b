"""KV events: the pages that a prefix cache has stored, and those that it no longer has.

The format is vLLM's, field by field in the same order, so that subscribers of vLLM's events understand these. There
are two sockets:

- PUB: frames (topic, sequence number, batch). The number is 8 bytes, big-endian. It counts from 0 without gaps, so a
  subscriber notices that it has missed a batch.
- ROUTER, for replay: a frame (empty, number) asks for all batches from that number on. The answers are (empty, number,
  batch) for each, then number -1 with an empty batch. Only the newest ``--kv-events-buffer`` batches are kept. If the
  first answer has a later number than the one asked for, the batches before it are lost.

``Follower`` is a subscriber's copy of the cache's pages.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

Hash = bytes
MEDIUM = "GPU"
"""Name of the first tier on every device, a CPU included: subscribers of vLLM's events know this word."""
END = -1


class KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, frozen=True):
    """Base class of all events."""


class BlockStored(KVEvent, tag="BlockStored", frozen=True):
    """Consecutive pages were stored."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    """The page before the first of them; None at the start of a prompt."""
    token_ids: list[int]
    """Tokens of all the pages, ``block_size`` for each."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM


class BlockRemoved(KVEvent, tag="BlockRemoved", frozen=True):
    """These pages are no longer cached."""

    block_hashes: list[Hash]
    medium: str | None = MEDIUM


class AllBlocksCleared(KVEvent, tag="AllBlocksCleared", frozen=True):
    """No page is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events since the previous batch."""

    ts: float
    """Seconds since 1970."""
    events: list[Event]


class Frame(NamedTuple):
    """A numbered batch, as it is sent."""

    seq: int
    payload: bytes


encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(KVEventBatch).decode


def pack_seq(seq: int) -> bytes:
    """Pack a sequence number, which may be -1, into 8 bytes, big-endian."""
    return seq.to_bytes(8, "big", signed=True)


def unpack_seq(data: bytes) -> int:
    """Unpack a sequence number from 8 bytes, big-endian; raises ``ValueError`` for any other length."""
    if len(data) != 8:
        raise ValueError(f"a sequence number has 8 bytes, not {len(data)}")
    return int.from_bytes(data, "big", signed=True)


class Follower:
    """The pages of one cache, kept up to date by its batches.

    A batch that is not the next one changes nothing but ``missing``.
    """

    def __init__(self) -> None:
        self.pages: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
        """Parent page and tokens of each page, by its hash."""
        self.next_seq = 0
        self.missing: int | None = None
        """Sequence number from which a replay is needed; None if no batch is missing."""

    def take(self, frame: Frame) -> bool:
        """Apply a batch if it is the next one, and return whether it was. A later batch only sets ``missing``.

        Raises ``msgspec.MsgspecError`` for a payload that is no batch.
        """
        if frame.seq != self.next_seq:
            if frame.seq > self.next_seq:
                self.missing = self.next_seq
            return False
        for event in decode_batch(frame.payload).events:
            self._apply(event)
        self.next_seq += 1
        self.missing = None
        return True

    def start_at(self, seq: int) -> None:
        """Forget all pages, and expect batch ``seq`` next, because earlier batches are lost."""
        self.pages.clear()
        self.next_seq, self.missing = seq, None

    def _apply(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            for i, block in enumerate(event.block_hashes):
                self.pages[block] = parent, tuple(event.token_ids[i * size : (i + 1) * size])
                parent = block
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                self.pages.pop(block, None)
        else:
            self.pages.clear()
