"""Memory that is given back to the system, and taken again: what HTTP asks, and what the worker is told.

The scheduler stands between the two (``scheduler/occupation.py``).
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from .base import Message

MemoryTag = Literal["kv_cache", "weights"]
ALL_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)


class MemoryReq(Message):
    """HTTP → scheduler: give memory back (``release``), or take it again.

    ``tags``: of what; none: all that can be. ``wait_s``: seconds in which running requests may end before it is given
    back.
    """

    id: int
    release: bool
    tags: list[MemoryTag] = []
    wait_s: float = 0.0


class MemoryResult(Message):
    """``status``: as of HTTP, with the reason unless it is 200. ``released``: what is not there now.

    ``nbytes``: how much less the worker has than before, or more, where memory was taken (a KV pool takes it as it is
    used). ``seconds``: what the worker spent.
    """

    id: int
    status: int
    message: str = ""
    released: list[MemoryTag] = []
    nbytes: int = 0
    seconds: float = 0.0


class ReleaseMemory(Message):
    """Scheduler → worker: nobody needs this, nobody computes and no peer reads or writes. Answer: ``MemoryChanged``."""

    tags: list[MemoryTag]


class ResumeMemory(Message):
    """Scheduler → worker: have this again, as it was at the start. Answer: ``MemoryChanged``."""

    tags: list[MemoryTag]


class MemoryChanged(Message):
    """Worker → scheduler: what is not there now. ``error``: why it is not as was told. The rest: ``MemoryResult``."""

    released: list[MemoryTag]
    nbytes: int
    seconds: float
    error: str = ""


class MemoryUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker's memory is when it has started, in bytes, but for ``tokens``, ``window_tokens``, what the pool
    can grow to (``limit_tokens``) and ``full_requests``: how many requests of the longest context fit at a time.

    ``rest``: of this process (of an accelerator: of all processes) beside weights and pools. ``host_tier``: reserved,
    and taken as it is used, as a CPU's pools are.
    """

    weights: int = 0
    kv_pool: int = 0
    window_pool: int = 0
    host_tier: int = 0
    rest: int = 0
    total: int = 0
    free: int = 0
    tokens: int = 0
    window_tokens: int = 0
    full_requests: float = 0.0
    limit_tokens: int = 0


class Unreleasable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker can't give back, and why."""

    tag: MemoryTag
    reason: str


class ResizeReq(Message):
    """HTTP → scheduler: have a KV pool of this many tokens, of those that are reserved. ``wait_s``: seconds for
    requests that use pages at the end to be over.
    """

    id: int
    max_total_tokens: int
    wait_s: float = 0.0


class ResizeResult(Message):
    """``status``: as of HTTP, with the reason unless it is 200. Tokens, whole pages of them: now, and before.

    ``freed``: bytes that went back to the system.
    """

    id: int
    status: int
    max_total_tokens: int
    before: int
    message: str = ""
    freed: int = 0


class TrimPool(Message):
    """Scheduler → worker: pages from ``first`` on are nobody's, nor window pages from ``first_window`` on (0: there are
    none); their memory can go. Answer: ``PoolTrimmed``, before which none of them is used again.
    """

    first: int
    first_window: int = 0


class PoolTrimmed(Message):
    """Worker → scheduler: done; ``nbytes`` went back to the system. ``error``: why none did."""

    nbytes: int
    error: str = ""


MemoryCommand = ReleaseMemory | ResumeMemory
