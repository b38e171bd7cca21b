"""Return of finished requests' KV to the prefill that computed their prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from ....messages.base import HandoverId
from ....messages.moves import MoveOffer, RunningRequest
from ....scheduler.req import Req
from ....scheduler.scheduler import Scheduler
from ..peer import Peer
from .migration import Migration, MigrationState
from .migration_rooms import MigrationRooms

log = logging.getLogger(__name__)

KV_RETURN_SECONDS = 10.0
"""Time limit in seconds of a KV return. No client waits for it, and its pages are pinned here meanwhile."""
MAX_KV_RETURNS = 256
"""Maximum number of KV returns under way."""
ROWS_PER_KV_RETURN = 8
"""Running requests, of ``--max-running-requests``, for each KV return that may be under way."""
SPARE_PAGES = 4
"""Obtainable pages for each running request, below which no KV return starts and offered ones are given up."""


class KVReturns:
    """The ``MigrationOwner`` of KV returns: their requests have finished, and only the KV is sent."""

    def __init__(self, scheduler: Scheduler, rooms: MigrationRooms, reach: Callable[[str, int, float], Peer]) -> None:
        self._scheduler = scheduler
        self._page_size = scheduler.options.page_size
        self._rooms = rooms
        self._reach = reach
        self._returns: list[Migration] = []
        self._max_returns = min(MAX_KV_RETURNS, scheduler.options.max_running_requests // ROWS_PER_KV_RETURN)
        self._now = 0.0
        self.given = 0

    def give_back(self, req: Req) -> None:
        """Begin to offer the KV of a request, which is about to finish, to the prefill that computed its prompt.

        The KV is cached here, too, and its memory pinned until the return is over. Do nothing if the request has no
        hand-over or no whole page of output, or if returns are too many or memory is short.
        """
        where, hold = req.msg.bootstrap, req.hold
        computed = min(req.computed, req.known_len) // self._page_size * self._page_size
        if where is None or where.source:
            return  # no request there can find it
        if hold is None or not hold.verified or computed <= req.prompt_len // self._page_size * self._page_size:
            return
        if len(self._returns) >= self._max_returns or self._scheduler.draining or self._memory_is_wanted():
            return
        peer = self._reach(where.host, where.port, self._now)
        move = Migration(self, req, where.host, peer, self._now, self._now + KV_RETURN_SECONDS, kv_len=computed)
        # Enter the prefix cache here at once, not only when the KV return is complete.
        self._scheduler.memory.share(req, computed)
        move.hold = self._scheduler.memory.pinned.pin(req)
        self._returns.append(move)
        self._rooms.add(move)

    def make_room(self, now: float) -> None:
        """Give up the KV returns with no page on its way yet, if other requests may need the memory. That unpins it."""
        self._now = now
        if self._returns and self._memory_is_wanted():
            states = (MigrationState.REACHING, MigrationState.OFFERED)
            for returned in [returned for returned in self._returns if returned.state in states]:
                self._rooms.fail(returned, "others need the memory")

    def advance(self, now: float) -> None:
        """Offer the KV of returns to peers that are connected by now, and fail returns past their deadline."""
        for move in list(self._returns):
            if move.state is MigrationState.REACHING:
                self._rooms.when_reached(move, now)
            self._rooms.check_deadline(move, now)

    def _memory_is_wanted(self) -> bool:
        """Return whether requests may need the KV pool's memory. They precede KV returns.

        True if a request lacks memory, or if few pages can be had. Few is less than ``SPARE_PAGES`` for each running
        request; pages count that are free or can be evicted.
        """
        planner, memory = self._scheduler.planner, self._scheduler.memory
        spare = SPARE_PAGES * self._page_size * max(1, len(planner.running))
        return memory.pool.obtainable < spare or planner.shortage.lacks_memory(self._now)

    # --- MigrationOwner ---

    def on_reached(self, move: Migration, now: float) -> None:
        """Offer the KV to the connected peer, as a request with its tokens as prompt and one token left to compute."""
        req, peer, handover = move.req, move.peer, self._rooms.draw_id(move)
        sampling = msgspec.structs.replace(req.msg.sampling, max_new_tokens=1, min_new_tokens=0, grammar=None)
        tokens = req.token_ids[: move.kv_len].tobytes()
        request = msgspec.structs.replace(req.msg, input_ids=tokens, sampling=sampling, logprobs=None, bootstrap=None)
        peer.send(MoveOffer(peer.epoch, handover, RunningRequest(request, b"", 1, 0.0), move.kv_len, keep=True))

    def on_sent(self, move: Migration) -> None:
        """Count the KV return and end it: all of its KV was sent."""
        self.given += 1
        self._rooms.forget(move)

    def on_ready(self, move: Migration, handover: HandoverId, now: float) -> None:
        """Do nothing: the request has finished, so there is nothing to continue."""

    def on_failed(self, move: Migration, state: MigrationState, reason: str) -> None:
        """Log why the KV return has failed; its request is not affected."""
        log.debug("its KV is not given back: %s", reason, extra={"rid": move.req.rid})

    def on_over(self, move: Migration) -> None:
        """Remove the KV return from the open ones, which makes room for another below their maximum number."""
        self._returns.remove(move)
