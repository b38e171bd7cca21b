"""Pushes KV pages to peers and checks those that landed, beside the model worker's forward passes.

    SendPages … SendPages(last) ─▶ slices, round robin over rooms ─▶ all landed ─▶ SendEnded
    CancelSend ─▶ no new slice; those under way land ─▶ SendEnded(cancelled)
    the link goes down ─▶ SendEnded(error) for each of the peer's rooms ─▶ PeerLinkDown

One thread owns the transfer backend and all state. It sleeps while there is nothing to do. Chunks are cut into slices of
a few MiB, so that small rooms pass between the slices of huge ones and a cancel waits for little.

A room that failed takes no more pages: those still on their way from the scheduler are dropped, since a checksum over the
rest would claim what is not true.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from ..messages.worker import (
    CancelSend,
    ConnectPeer,
    DisconnectPeer,
    PagesVerified,
    PeerConnected,
    PeerLinkDown,
    SendEnded,
    SendPages,
    TransferCommand,
    TransferEvent,
    VerifyPages,
)
from .backends.base import Admitted, ConnectFailed, LinkDown, LinkUp, TransferBackend, WriteState
from .errors import BadSpans, NotConnected, TransferError
from .outgoing_room import OutgoingRoom
from .page_check import PageCheck
from .region import KVRegion

log = logging.getLogger(__name__)

SLICE_BYTES = 2 << 20
WINDOW_BYTES = 8 << 20
"""Bytes of a peer's slices that may be under way: enough to keep a fast link busy while we prepare the next one."""
WINDOW_SLICES = 64
CHECK_BYTES = 4 << 20
MAX_TOMBSTONES = 4096


def end_process(error: BaseException) -> None:
    """What a broken engine does unless told otherwise: a worker that can't transfer must not look healthy."""
    log.critical("the transfer engine failed; ending the process", exc_info=error)
    logging.shutdown()
    os._exit(1)
