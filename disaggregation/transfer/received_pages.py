"""The pages that peers write here: which of them they may write, and whether those that came are right."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ...mem_cache.kv_pages.page_order import PageConverter
from ...messages.base import HandoverId
from ...messages.worker import GrantPages, KVLayout, KVOrder, PagesVerified, RevokePages, TransferEvent, VerifyPages
from ..errors import BadPages
from .backends.base import TransferBackend
from .open_pools import OpenPools
from .page_check import Landed, PageCheck, make_check
from .page_checksums import PageChecksums

log = logging.getLogger(__name__)

CHECK_BYTES = 4 << 20
"""Bytes of received pages that are checked per tick."""


class ReceivedPages:
    """Grants of our pages to hand-overs, and the checks of what was written to them."""

    def __init__(
        self,
        backend: TransferBackend,
        pools: OpenPools,
        layout: KVLayout | None,
        emit: Callable[[TransferEvent], None],
    ) -> None:
        self._backend = backend
        self._pools = pools
        self._layout = layout
        self._emit = emit
        self._is_staged = backend.can.moves_data and pools.has_staging
        self._checks: deque[PageCheck] = deque()
        self._granted: dict[HandoverId, str] = {}
        """Peer that may write, by hand-over."""
        self._landed: dict[HandoverId, PageChecksums] = {}
        """Checksums of received pages that are on a device, until they are checked or revoked."""

    def grant(self, command: GrantPages) -> None:
        """Let a peer write pages for a hand-over. If the pages are invalid, grant none and report that at once."""
        try:
            granted = self._pools.unpack(command.pages, "destination")
            landed = None
            if self._is_staged:
                numbers, summed = self._pools.numbers, command.checksum
                landed = PageChecksums(self._layout, command.order, numbers, summed=summed)
        except (BadPages, ValueError) as e:
            log.error("can't grant room %d its pages: %s", command.handover.room, e)
            self._emit(PagesVerified(command.handover, ok=False, error=str(e)))
            return
        if landed is not None:
            self._landed[command.handover] = landed
            self._backend.note_checksums_in(command.peer, command.handover, landed)
        self._granted[command.handover] = command.peer
        for _, pool, pages in self._pools.pairs(granted):
            self._backend.grant(command.peer, command.handover, pages, pool.number)

    def revoke(self, command: RevokePages) -> None:
        """End a peer's permission to write pages for a hand-over, if it has one.

        Their checksums are dropped unless they are to be checked.
        """
        peer = self._granted.pop(command.handover, None)
        if not command.are_checked:
            self._landed.pop(command.handover, None)
        if peer is not None:
            self._backend.revoke(peer, command.handover)

    def verify(self, command: VerifyPages) -> None:
        """Queue the check of a hand-over's pages; ``PagesVerified`` with the result is sent later, or at once if it is
        known.
        """
        if not self._backend.can.moves_data:
            self._emit(PagesVerified(command.handover, ok=True))
            return
        try:
            landed = [
                Landed(group, pool, pages, None if self._is_staged else self._converter(command.order, group))
                for group, pool, pages in self._pools.pairs(self._pools.unpack(command.pages, "landed"))
            ]
            passed = self._landed.pop(command.handover, None) if self._is_staged else None
            check = make_check(command, landed, passed)
        except (BadPages, ValueError) as e:
            log.error("can't verify room %d: %s", command.handover.room, e)
            self._emit(PagesVerified(command.handover, ok=False, error=str(e)))
            return
        self._checks.append(check)

    def _converter(self, order: KVOrder | None, group: int) -> PageConverter | None:
        """Return the converter of a group's pages from the byte order ``order`` to ours; None if they are equal.

        Raises ``ValueError`` if our own order is unknown.
        """
        if order is None or (self._layout is not None and order == self._layout.order):
            return None
        if self._layout is None:
            raise ValueError(f"pages in the order {order!r}, and nothing is known of our own")
        return PageConverter(self._layout, order, group)

    def check(self) -> bool:
        """Check a part of the pages of the next hand-over in turn, and report the result if all are checked.

        Return whether any check is left.
        """
        if self._checks:
            check = self._checks.popleft()
            ok = check.step(CHECK_BYTES)
            if ok is None:
                self._checks.append(check)
            else:
                self._emit(PagesVerified(check.handover, ok))
        return bool(self._checks)
