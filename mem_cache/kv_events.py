"""Log of the pages that the tree stores and loses, for subscribers."""

from __future__ import annotations

from collections.abc import Sequence

from ..messages.base import I32, unpack_i32
from ..messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from ..messages.worker import WorkerReady
from .options import KVEventOptions
from .page_hash import model_seed


class KVEventLog:
    """``seed``: what the hashes of pages begin with (``page_hash.model_seed``)."""

    def __init__(self, seed: bytes, page_size: int) -> None:
        self._seed = seed
        self._page_size = page_size
        self._events: list[Event] = []

    def seed(self) -> bytes:
        """Return the seed of the page hashes, which depends on the model and the KV layout."""
        return self._seed

    def stored(self, parent: bytes | None, hashes: Sequence[bytes], key: bytes, pages: I32) -> None:
        """Record that pages were stored in the tree. ``key``: their tokens, as int32 bytes.

        ``parent``: hash of the page before, None if they begin the prompt. ``pages`` is ignored.
        """
        tokens = unpack_i32(key).tolist()
        self._events.append(BlockStored(list(hashes), parent, tokens, self._page_size))

    def leaving(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Do nothing: the same pages are recorded when ``removed`` is called next."""

    def removed(self, hashes: Sequence[bytes]) -> None:
        """Record that the pages with these hashes cannot be found in the tree any more."""
        if hashes:
            self._events.append(BlockRemoved(list(hashes)))

    def cleared(self) -> None:
        """Record that the tree has no pages any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """Remove and return the events recorded since the last call."""
        events, self._events = self._events, []
        return events


def make_event_log(options: KVEventOptions, worker: WorkerReady) -> KVEventLog | None:
    """Make the log of pages that the tree stores and loses; None without ``--kv-events-endpoint``.

    ``worker``: message of a worker that is ready. The hashes depend on the fingerprint and the KV layout in it.
    """
    if options.kv_events_endpoint is None:
        return None
    return KVEventLog(model_seed(worker.fingerprint, worker.layout), options.page_size)
