"""What a prefix cache tells those who follow it: which pages it has stored, which it no longer has.

The shape is vLLM's, field by field in the same order, so that what follows vLLM's events follows these. Two sockets:

- PUB: frames (topic, sequence number, batch). The number is 8 bytes, big-endian, counts from 0 and has no gaps, so who
  has missed a batch knows.
- ROUTER, for replay: frames (empty, number) ask for all batches from that number on. Each is answered by (empty,
  number, batch), and the end by number -1 with an empty batch. Only the newest ``--kv-events-buffer`` are kept: where
  the first that comes has a later number than was asked for, the rest is gone.

``Follower`` is what a router keeps of it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

Hash = bytes
MEDIUM = "GPU"
"""The first tier, whatever the device is: the word that vLLM's followers know."""
END = -1


class KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, frozen=True):
    """The base of all."""


class BlockStored(KVEvent, tag="BlockStored", frozen=True):
    """Pages that follow each other, behind the page ``parent_block_hash`` (None: at the start). ``token_ids``: of all
    of them, ``block_size`` each.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM


class BlockRemoved(KVEvent, tag="BlockRemoved", frozen=True):
    """These pages can't be found any more."""

    block_hashes: list[Hash]
    medium: str | None = MEDIUM


class AllBlocksCleared(KVEvent, tag="AllBlocksCleared", frozen=True):
    """None can."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What happened since the batch before. ``ts``: seconds since 1970."""

    ts: float
    events: list[Event]


class Frame(NamedTuple):
    """A numbered batch, as it is sent."""

    seq: int
    payload: bytes


encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(KVEventBatch).decode


def pack_seq(seq: int) -> bytes:
    """8 bytes."""
    return seq.to_bytes(8, "big", signed=True)


def unpack_seq(data: bytes) -> int:
    """Raises ``ValueError`` where these are not 8 bytes."""
    if len(data) != 8:
        raise ValueError(f"a sequence number has 8 bytes, not {len(data)}")
    return int.from_bytes(data, "big", signed=True)


class Follower:
    """The pages of one cache, by hash, kept up to date by its batches. Gives (parent, tokens) of each.

    A batch that is not the next one changes nothing: ``missing`` then says from which number on to ask for a replay.
    """

    def __init__(self) -> None:
        self.pages: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
        self.next_seq = 0
        self.missing: int | None = None

    def take(self, frame: Frame) -> bool:
        """Whether the batch was the next one; an older one is none either. Raises ``msgspec.MsgspecError``."""
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
        """What came before ``seq`` can't be had any more: go on from there, knowing nothing."""
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
