"""What must be true of pages, holds and locks between two plans. Slow and independent of the code that it checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..messages.base import I32
from .allocator import TokenToKVPoolAllocator
from .base_prefix_cache import KVHold
from .errors import InvariantViolation
from .req_to_token_pool import ReqToTokenPool
from .tree_node import NO_SLOTS, TreeNode


class Claim(NamedTuple):
    """``owner`` says that it holds ``pages`` [P]."""

    owner: str
    pages: I32


def require(condition: bool, message: str) -> None:
    """Raise ``InvariantViolation`` with ``message`` unless ``condition``."""
    if not condition:
        raise InvariantViolation(message)


def claim_pages(owner: str, slots: I32, page_size: int) -> Claim:
    """Return the claim of ``owner`` on the pages of ``slots`` [N], which begin at a page border.

    ``owner``: description of the owner for error messages. Raises ``InvariantViolation`` if the slots are not runs of
    whole pages, the last one excepted.
    """
    first_slots = slots[::page_size]
    whole = first_slots[:, None] + np.arange(page_size, dtype=np.int32)
    aligned = not (first_slots % page_size).any()
    require(aligned and np.array_equal(whole.ravel()[: slots.size], slots), f"{owner}: its slots are no runs of pages")
    return Claim(owner, first_slots // page_size)


def hold_claims(holds: Iterable[KVHold], req_to_token: ReqToTokenPool, page_size: int) -> list[Claim]:
    """Return the claim of each hold on its pages outside the cache: positions ``[cached_len, kv_len)`` of its row."""
    return [
        claim_pages(f"request in row {h.row}", req_to_token.table[h.row, h.cached_len : h.kv_len], page_size)
        for h in holds
    ]


def check_pages(allocator: TokenToKVPoolAllocator, claims: Sequence[Claim]) -> None:
    """Check that free pages and ``claims`` together name each page of the pool exactly once.

    Claims may also name, once, pages beyond the pool's end (``allocator.beyond``). Raises ``InvariantViolation``.
    """
    claims = [Claim("free list", allocator.free_pages()), *claims]
    pages = np.concatenate([claim.pages for claim in claims])
    outside = (pages < 1) | (pages > allocator.most_pages)
    require(not outside.any(), f"page {pages[outside.argmax()]} is claimed and is not in the pool")
    named = np.bincount(pages, minlength=allocator.most_pages + 1)[1:]
    expected = np.ones_like(named)
    expected[allocator.num_pages :] = named[allocator.num_pages :] > 0
    wrong = named != expected
    require(
        int(expected[allocator.num_pages :].sum()) == allocator.beyond, "pages beyond the pool's end are miscounted"
    )
    if wrong.any():
        page = int(wrong.argmax()) + 1
        owners = [claim.owner for claim in claims for _ in range(int(np.count_nonzero(claim.pages == page)))]
        raise InvariantViolation(f"page {page} has owners: {', '.join(owners) or 'none'} ({wrong.sum()} such pages)")


def check_windows(allocator: TokenToKVPoolAllocator, holds: Sequence[KVHold], req_to_token: ReqToTokenPool) -> None:
    """Check the states of window pages (``window_pages.py``). Raises ``InvariantViolation``.

    Each is free, or attached to exactly one full page, which is in use. Those in spans are attached. Idle ones are
    attached and in no span.
    """
    windows, size = allocator.windows.accounts(), allocator.page_size
    if windows is None:
        return
    attached = windows.page_of[windows.page_of != 0]
    both = np.concatenate([attached, windows.free]).astype(np.int64)
    named = np.bincount(both, minlength=windows.most_pages + 1)
    expected = np.ones(windows.most_pages + 1, dtype=np.int64)
    expected[0] = 0
    # Since the pool became smaller.
    end = windows.num_pages + 1
    expected[end:] = np.bincount(attached, minlength=windows.most_pages + 1)[end:] > 0
    require(np.array_equal(named, expected), "window pages are not each free or attached to one page")
    require(int(expected[end:].sum()) == windows.beyond, "window pages beyond the pool's end are miscounted")
    require(not windows.page_of[allocator.free_pages()].any(), "a free page has a window page")
    uses = np.zeros_like(windows.page_of)
    for hold in holds:
        span = hold.window
        require(0 <= span.begin <= span.end <= -(-hold.kv_len // size), f"row {hold.row}: impossible span {span}")
        uses[req_to_token.table[hold.row, span.begin * size : span.end * size : size] // size] += 1
    require(np.array_equal(uses, windows.uses), "the uses of window pages are not those of the holds' spans")
    require(bool(windows.page_of[uses > 0].all()), "a page in a request's window has no window page")
    idle = np.flatnonzero((windows.page_of != 0) & (uses == 0)).tolist()
    require(not (windows.page_of[idle] >= end).any(), "an idle window page lies beyond the pool's end")
    require(sorted(windows.idle) == idle, "idle window pages are not those that are attached and unused")
    committed = sum(hold.window.committed for hold in holds)
    require(committed == windows.committed <= windows.num_pages, f"{committed} window pages are promised")


def check_holds(holds: Sequence[KVHold], req_to_token: ReqToTokenPool, lock_refs: Mapping[TreeNode, int]) -> None:
    """Check that rows in use belong to one hold each and start with the slots of the hold's cached prefix.

    Check that ``lock_refs`` are the numbers of holds that pin each node. Raises ``InvariantViolation``.
    """
    rows = Counter(hold.row for hold in holds)
    shared = [row for row, count in rows.items() if count > 1]
    require(not shared, f"rows {shared} are held by several requests")
    leaked = rows.keys() ^ req_to_token.rows_in_use()
    require(not leaked, f"rows {sorted(leaked)} are either held or handed out, not both")
    pins: Counter[TreeNode] = Counter()
    for hold in holds:
        require(hold.live, f"row {hold.row}: its hold was given back")
        require(
            hold.cached_len <= hold.kv_len <= req_to_token.context_len, f"row {hold.row}: impossible lengths {hold}"
        )
        path = list(hold.node.path_up())
        pins.update(path)
        slots = np.concatenate([NO_SLOTS, *(node.slots for node in reversed(path))])
        row = req_to_token.table[hold.row, : hold.cached_len]
        require(np.array_equal(slots, row), f"row {hold.row}: its first {hold.cached_len} slots are not its node's")
    for node in pins.keys() | lock_refs.keys():
        if lock_refs.get(node) != pins[node]:
            raise InvariantViolation(
                f"the node over slots {node.slots[:1]} … has lock_ref {lock_refs.get(node, 'none, it left the tree')}, "
                f"{pins[node]} requests pin it"
            )
