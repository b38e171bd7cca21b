"""The third tier's thread: reads and writes a store beside the worker's loop, one command at a time, in order.

Steps never wait for it. A command that fails is answered at once with a count of 0, and serving goes on without. So is
a command that is not tried because the store failed before (``Breaker``). The host pages of a command are its own until
it is answered. After the cooldown the store is tried again, and the scheduler gets a report.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ...mem_cache.page_hash import HASH_BYTES
from ...mem_cache.storage.base import PageStore, StoreError, StoreFull
from ...mem_cache.storage.breaker import Breaker, BreakerState
from ...messages.base import unpack_i32
from ...messages.tiers import (
    DropPages,
    FetchPages,
    FindPages,
    KeepPages,
    PagesFetched,
    PagesFound,
    PagesKept,
    PagesStored,
    StorePages,
    StoreState,
)
from .host_pool import HostPool

log = logging.getLogger(__name__)

T = TypeVar("T")

USAGE_SECONDS = 1.0
"""Seconds between two reports of what the store holds."""

StoreCommand = StorePages | FetchPages | FindPages | DropPages | KeepPages
StoreEvent = PagesStored | PagesFetched | PagesFound | PagesKept | StoreState


class StoreEngine:
    """``emit`` sends to the scheduler, from this thread alone."""

    def __init__(
        self,
        store: PageStore,
        pool: HostPool,
        emit: Callable[[StoreEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._pool, self._emit, self._clock = store, pool, emit, clock
        self._breaker = Breaker()
        self._reported: StoreState | None = None
        self._reported_at = float("-inf")
        self._commands: queue.SimpleQueue[StoreCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)

    def start(self) -> StoreEngine:
        """Start the store's thread, and return this engine."""
        self._thread.start()
        return self

    def submit(self, command: StoreCommand) -> None:
        """Queue a command for the store's thread; never wait. Its answer is emitted later. Any thread may call this."""
        self._commands.put(command)

    def stop(self) -> None:
        """Let the thread carry out what was submitted, wait for its end, and close the store."""
        self._commands.put(None)
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=self.probe_in)
            except queue.Empty:
                self.probe()
                continue
            if command is None:
                return
            self.obey(command)

    @property
    def probe_in(self) -> float | None:
        """Seconds until ``probe`` is due; None: no probe is due unless the store fails."""
        return self._breaker.probe_in(self._clock())

    def probe(self) -> None:
        """Test whether the store answers again, and report its state if that has changed.

        After a failure no command is sent to the store, so without this it would never be seen to recover.
        """
        self._ask(self._store.probe, None)
        self._report_state()

    def obey(self, command: StoreCommand) -> None:
        """Carry out one command in this thread, emit its answer, and emit the store's state if that has changed.

        A failure gives an answer with the count 0. ``DropPages`` has no answer.
        """
        self._obey(command)
        self._report_state()

    def _obey(self, command: StoreCommand) -> None:
        began = self._clock()
        hashes = [command.hashes[i : i + HASH_BYTES] for i in range(0, len(command.hashes), HASH_BYTES)]
        if isinstance(command, DropPages):
            self._ask(lambda: self._store.remove(hashes), None)
            return
        if isinstance(command, KeepPages):
            count, error = self._ask(lambda: self._store.keep(hashes, command.until), 0)
            self._emit(PagesKept(command.id, count, error))
            return
        if isinstance(command, FindPages):
            count, error = self._ask(lambda: self._store.exists(hashes), 0)
            self._emit(PagesFound(command.id, count, error))
            return
        views = [self._pool.page(page) for page in unpack_i32(command.pages).tolist()]
        if isinstance(command, FetchPages):
            count, error = self._ask(lambda: self._store.get(hashes, views), 0)
            self._emit(PagesFetched(command.id, count, self._clock() - began, error))
        else:
            stored, error = self._ask(lambda: self._set(hashes, views), 0)
            self._emit(PagesStored(command.id, stored, self._clock() - began, error))

    def _set(self, hashes: list[bytes], views: list[memoryview]) -> int:
        self._store.set(hashes, views)
        return len(hashes)

    def _ask(self, work: Callable[[], T], otherwise: T) -> tuple[T, str]:
        """Call ``work``, which uses the store, and return its result and "".

        If it fails, or the store has failed before and is not tried, return ``otherwise`` and the reason.
        """
        if self._breaker.state(self._clock()) is BreakerState.OPEN:
            return otherwise, self._breaker.reason
        try:
            result = work()
        except StoreFull as e:
            # It can be read, and may have room again.
            log.debug("%s", e)
            return otherwise, str(e)
        except StoreError as e:
            return otherwise, self._failed(str(e))
        except Exception as e:
            # Broad, as a store is another's library. A command without an answer would keep its pages, and without this
            # thread none is answered.
            log.exception("the KV store failed in a way that is none of its own")
            return otherwise, self._failed(type(e).__name__)
        self._breaker.succeeded()
        return result, ""

    def _failed(self, reason: str) -> str:
        trips = self._breaker.trips
        self._breaker.failed(reason, self._clock())
        if self._breaker.trips > trips:
            log.warning("the KV store is left alone for a while: %s", reason)
        return reason

    def _report_state(self) -> None:
        now = self._clock()
        breaker = self._breaker.state(now)
        if self._reported is not None and self._reported.breaker == breaker and now - self._reported_at < USAGE_SECONDS:
            return
        usage = self._store.usage()
        pages, nbytes = (-1 if value is None else value for value in usage[:2])
        reason = "" if breaker is BreakerState.CLOSED else self._breaker.reason
        state = StoreState(str(breaker), reason, pages, nbytes, usage.bad_pages, usage.evicted_pages)
        if state != self._reported:
            self._emit(state)
        self._reported, self._reported_at = state, now
