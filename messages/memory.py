"""Messages to give memory back to the system and to take it again: HTTP → scheduler, and scheduler → worker.

The scheduler stands between the two (``scheduler/features/memory_saver.py``).
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from .base import Message
from .question import Answer, Question

MemoryTag = Literal["kv_cache", "weights"]
ALL_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)


class MemoryResult(Answer):
    """Scheduler → HTTP: result of a ``MemoryReq``."""

    released: list[MemoryTag]
    """Memory that is released now."""
    nbytes: int
    """Change of the worker's memory in bytes: released, or taken again. A KV pool takes memory only as it is used."""
    seconds: float
    """Time that the worker spent."""


class MemoryReq(Question[MemoryResult]):
    """HTTP → scheduler: give memory back, or take it again. Answered by ``MemoryResult``."""

    release: bool
    """True: give memory back. False: take it again."""
    tags: list[MemoryTag] = []
    """Kinds of memory; an empty list stands for all that can be given back."""
    wait_s: float = 0.0
    """Seconds that running requests have to end before their memory is given back."""


class ReleaseMemory(Message):
    """Scheduler → worker: give this memory back. No step and no peer uses it. Answered by ``MemoryChanged``."""

    tags: list[MemoryTag]


class ResumeMemory(Message):
    """Scheduler → worker: take this memory again, in its state after start-up. Answered by ``MemoryChanged``."""

    tags: list[MemoryTag]


class MemoryChanged(Message):
    """Worker → scheduler: memory was released or taken again. Fields are those of ``MemoryResult``."""

    released: list[MemoryTag]
    nbytes: int
    seconds: float
    error: str = ""
    """Why the command failed; "" if it did not."""


class MemoryUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Use of memory by a worker after its start, in bytes unless a field says otherwise."""

    weights: int = 0
    kv_pool: int = 0
    window_pool: int = 0
    host_tier: int = 0
    """Reserved memory of the host tier. Like the pools of a CPU, it is taken as it is used."""
    rest: int = 0
    """Memory of this process beside weights and pools; on an accelerator, memory of all processes."""
    total: int = 0
    free: int = 0
    tokens: int = 0
    """Size of the KV pool in tokens."""
    window_tokens: int = 0
    """Size of the window pool in tokens."""
    full_requests: float = 0.0
    """Number of requests of maximum context length that fit at a time."""
    limit_tokens: int = 0
    """Size in tokens that the KV pool can grow to."""


class Unreleasable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that a worker cannot give back, and the reason."""

    tag: MemoryTag
    reason: str


class ResizeResult(Answer):
    """Scheduler → HTTP: result of a ``ResizeReq``."""

    max_total_tokens: int
    """Size of the pool now, in tokens of whole pages."""
    before: int
    """Size of the pool before, in tokens of whole pages."""
    freed: int
    """Bytes that went back to the system."""


class ResizeReq(Question[ResizeResult]):
    """HTTP → scheduler: change the size of the KV pool, within its reserved size. Answered by ``ResizeResult``."""

    max_total_tokens: int
    wait_s: float = 0.0
    """Seconds that requests with pages beyond the new end have to finish."""


class TrimPool(Message):
    """Scheduler → worker: give back the memory of the pages at the end of the pools. Answered by ``PoolTrimmed``.

    No request uses these pages, and none gets them before the answer.
    """

    first: int
    """First page to give back."""
    first_window: int = 0
    """First page of the window pool to give back; 0 without such a pool."""


class PoolTrimmed(Message):
    """Worker → scheduler: ``nbytes`` went back to the system. ``error`` says why none did, and is "" otherwise."""

    nbytes: int
    error: str = ""


MemoryCommand = ReleaseMemory | ResumeMemory
