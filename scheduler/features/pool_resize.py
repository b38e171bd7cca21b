"""Makes the KV pool smaller or larger while it is used.

::

    asked ─▶ WAITING ─it fits─▶ SHRINKING ─no page beyond the end in use─▶ TRIMMING ─worker confirms─▶ answered, 200
                └── after wait_s: 409, as it was ◀──┘

A host's pool is address space with memory that is taken page by page. So it is reserved for its maximum size, and the
scheduler hands out only the first pages: fewer or more after a resize. The worker returns the memory of the others.
Nothing moves, so peers and other ranks, which know pages by their numbers, need not be told.

A smaller pool counts from the moment that the shrinking begins. Pages are handed out within its end only. Cached
prefixes beyond it are evicted or, if requests use them, no longer found by others. So the end empties as requests end,
however many arrive. Until the worker has returned the memory, none of it is handed out again: a peer could have written
to it already.

Requests that may become longer than the new pool are waited for first, but only those older than the order. The others
are limited to the new pool's size when it begins. They get their limits back if the resize comes to nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from ...messages.memory import PoolTrimmed, ResizeReq, ResizeResult, TrimPool
from ...messages.question import RefusedAnswer
from ...runtime.machine.memory import Memory, host_memory
from ..feature import Feature
from ..handlers import answers, receives
from ..req import Req, Route
from ..scheduler import Scheduler

log = logging.getLogger(__name__)
GIB = 2**30


class PoolResize(Feature):
    """Resizes of the pool, one at a time. Called from the scheduler's loop. ``host`` reads the host's memory."""

    def __init__(self, scheduler: Scheduler, host: Callable[[], Memory] = host_memory) -> None:
        self._scheduler, self._memory = scheduler, scheduler.memory
        self._host = host
        self._order: ResizeReq | None = None
        self._until = math.inf
        self._before = self._memory.pool.max_total_tokens
        self._begun = self._is_trimming = False
        self._earlier: frozenset[str] = frozenset()
        """Rids of the requests that came before the order."""
        if self._before < self._memory.pool.end.most:
            self._trim()  # before it is used: no memory is committed there in advance

    @property
    def aim(self) -> int | None:
        """Size in tokens that the pool is about to have; None while no resize is under way."""
        return None if self._order is None else self._order.max_total_tokens

    def status(self, now: float) -> dict[str, Any]:
        """Return ``memory.resizing_to``: the size in tokens that a resize under way aims at; None without a resize."""
        return {"memory": {"resizing_to": self.aim}}

    def seconds_left(self, now: float) -> float:
        """Return the seconds until a resize that waits for requests is given up.

        0 means that its deadline has passed. Infinity means that no resize waits for requests.
        """
        return max(0.0, self._until - now)

    @answers(ResizeReq)
    def ask(self, order: ResizeReq, now: float) -> ResizeResult | RefusedAnswer | None:
        """Begin to resize the pool, and return None: the answer is sent when its memory has changed, or ``wait_s`` is
        over.

        Return a refusal at once if the size or the instance does not allow it.
        """
        if (closed := self._scheduler.gate.refusal()) is not None:
            return RefusedAnswer(409, closed.message)
        problem = self._problem(order.max_total_tokens)
        if problem is not None:
            return problem
        self._order, self._until, self._before = order, now + order.wait_s, self._memory.pool.max_total_tokens
        self._begun, self._earlier = False, frozenset(self._scheduler.reqs)
        self._memory.pool.end.announce(order.max_total_tokens)
        self.tick(now)
        return None

    def tick(self, now: float) -> None:
        """Advance a resize that waits for requests. After ``wait_s``, restore the old size and refuse the order with
        409.
        """
        order, memory = self._order, self._memory
        if order is None or self._is_trimming:
            return
        is_late = now >= self._until
        why = None if self._begun else self._why_not_yet(order.max_total_tokens, at_once=is_late)
        if why is None and not self._begun:
            self._limit_outputs(order.max_total_tokens)
            memory.pool.resize(order.max_total_tokens)
            self._begun = True
        if why is None and not memory.pool.end.beyond:
            self._until = math.inf
            self._trim()
        elif is_late:
            if self._begun:
                memory.pool.resize(self._before)
                self._free_outputs()
            self._order, self._until = None, math.inf
            memory.pool.end.settle()
            why = why or "requests use pages at the pool's end"
            text = f"{why}; try again later, or give it time (wait_s)"
            self._scheduler.outbox.reply(order, RefusedAnswer(409, text))

    @receives(PoolTrimmed)
    def on_trimmed(self, event: PoolTrimmed, now: float) -> None:
        """Answer the order: the worker has given the memory beyond the pool's new end back to the system.

        Do nothing after the trim at the start, which no order asked for.
        """
        self._is_trimming = False
        if self._order is None or not self._begun:
            return  # the first trim, at the start
        order, self._order = self._order, None
        self._memory.pool.end.settle()
        tokens = self._memory.pool.max_total_tokens
        log.info("KV pool resized from %d to %d tokens", self._before, tokens)
        self._scheduler.outbox.reply(order, ResizeResult(tokens, self._before, event.nbytes))

    def _trim(self) -> None:
        scheduler, memory = self._scheduler, self._memory
        self._is_trimming = True
        # Pages are saved before their memory goes: the worker keeps the order of messages.
        scheduler.outbox.all_to_worker(scheduler.tiers.copies.take_before())
        windows = memory.pool.end.window_pages + 1 if memory.pool.has_windows else 0
        scheduler.outbox.to_worker(TrimPool(memory.pool.max_total_tokens // memory.pool.page_size + 1, windows))

    def _why_not_yet(self, tokens: int, *, at_once: bool) -> str | None:
        """Return why shrinking to ``tokens`` tokens has to wait, or None if it can begin or the pool grows.

        ``at_once``: whether pages in use at the pool's end are a reason, too.
        """
        scheduler, memory = self._scheduler, self._memory
        if tokens >= self._before:
            return None
        waited_for = (req for req in scheduler.reqs.values() if not self._is_limited(req, tokens))
        # A request that is handed over grows elsewhere.
        outputs = ((req, 1 if req.route is Route.OUTGOING else req.max_new_tokens) for req in waited_for)
        longest = max((req.prompt_len + output for req, output in outputs), default=0)
        # A request that is alone must not run out of pages.
        if longest and memory.pool.pages_up(longest + 2) > tokens:
            return f"a request that runs may become {longest} tokens long"
        if not memory.pool.end.can_move(tokens):
            return "windows of requests that run need more than the pool would have for them"
        if at_once and memory.pool.end.is_held_behind(tokens):
            return "requests use pages at the pool's end"
        return None

    def _room(self, tokens: int) -> int:
        """Return the maximum length of a request that is alone in a pool of ``tokens`` tokens.

        That is less by two tokens, which may be computed once too often.
        """
        return tokens // self._memory.pool.page_size * self._memory.pool.page_size - 2

    def _is_limited(self, req: Req, tokens: int) -> bool:
        """Return whether the request came after the order to resize, so its output can be cut to fit ``tokens``.

        Such a request is not waited for. False for one that another instance has or will decode, and for one with a
        prompt that does not fit.
        """
        is_later = req.rid not in self._earlier and req.route is not Route.OUTGOING and not req.elsewhere
        return is_later and req.prompt_len < self._room(tokens)

    def _limit_outputs(self, tokens: int) -> None:
        for req in list(self._scheduler.reqs.values()) if tokens < self._before else ():
            if self._is_limited(req, tokens):
                self._scheduler.limit_output(req, self._room(tokens))

    def _free_outputs(self) -> None:
        for req in self._scheduler.reqs.values():
            if self._memory.headroom.may_become(req, len(req.token_ids) + 2):
                req.limit_output(self._before)

    def _problem(self, tokens: int) -> RefusedAnswer | None:
        worker, memory, options = self._scheduler.worker, self._memory, self._scheduler.options
        if self._order is not None:
            return RefusedAnswer(409, "a resize of the pool is under way; ask again when it is done")
        if not self._scheduler.handovers.may_resize:
            backend = options.disaggregation_transfer_backend
            text = f"{backend} has registered the pool's memory as it is; use --disaggregation-transfer-backend tcp"
            return RefusedAnswer(409, text)
        if worker.device != "cpu":
            return RefusedAnswer(409, f"a pool in {worker.device} memory can't be resized; use --device cpu")
        if options.nnodes > 1:
            return RefusedAnswer(409, "the pools of ranks on several hosts (--nnodes) can't be resized")
        if tokens < memory.pool.page_size:
            return RefusedAnswer(
                400, f"max_total_tokens: {tokens} is less than a page ({memory.pool.page_size} tokens)"
            )
        if tokens > memory.pool.end.most:
            advice = "start with a larger --max-total-tokens-limit: what is not used takes no memory"
            text = f"max_total_tokens: {tokens} is more than the {memory.pool.end.most} that are reserved; {advice}"
            return RefusedAnswer(400, text)
        more = (tokens - memory.pool.max_total_tokens) // memory.pool.page_size * worker.layout.page_bytes
        if more > 0 and more > (free := self._host().free):
            text = (
                f"that takes {more / GIB:.2f} GiB more, and {free / GIB:.2f} GiB are free; free memory or ask for less"
            )
            return RefusedAnswer(409, text)
        return None
