"""A KV pool that becomes smaller, and larger again, while it is used.

A host's pool is address space whose memory is taken page by page. So it is made as large as it may ever become, and of
that the scheduler hands out the first pages: fewer, when it is told so, and the worker lets the memory of the others
go; or more again. Nothing moves. What is cached at the end is evicted; requests that have pages there are waited for.
"""

from __future__ import annotations

import logging
import math

from ..messages.memory import ResizeReq, ResizeResult, TrimPool
from .scheduler import Scheduler

log = logging.getLogger(__name__)


class PoolResize:
    """Called from the scheduler's loop; one order at a time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._most = scheduler.memory.max_total_tokens
        self._order: ResizeReq | None = None
        self._until = math.inf

    def seconds_left(self, now: float) -> float:
        """Until ``advance`` has to be called, infinity for never."""
        return max(0.0, self._until - now)

    def ask(self, order: ResizeReq, now: float) -> None:
        """Do it, now or as soon as it can be, or say why not."""
        problem = self._problem(order.max_total_tokens)
        if problem is not None:
            self._answer(order, *problem)
            return
        self._order, self._until = order, now + order.wait_s
        self.advance(now)

    def advance(self, now: float) -> None:
        """Try again what could not be done before."""
        order, scheduler = self._order, self._scheduler
        if order is None:
            return
        longest = max((req.prompt_len + req.max_new_tokens for req in scheduler.reqs.values()), default=0)
        before, why = scheduler.memory.max_total_tokens, f"a request that runs may become {longest} tokens long"
        # One that is alone must not run out of pages.
        fits = not longest or scheduler.memory.pages_up(longest + 2) <= order.max_total_tokens
        if fits or order.max_total_tokens >= before:
            why = "requests use pages at the pool's end"
            if scheduler.memory.resize(order.max_total_tokens):
                self._done(order, before)
                return
        if now >= self._until:
            self._order, self._until = None, math.inf
            self._answer(order, 409, f"{why}; try again later, or give it time (wait_s)")

    def _done(self, order: ResizeReq, before: int) -> None:
        scheduler, self._order, self._until = self._scheduler, None, math.inf
        tokens = scheduler.memory.max_total_tokens
        if tokens != before:
            if scheduler.tiers is not None:
                # In the worker's order: pages are saved before their memory goes.
                scheduler.outbox.all_to_worker(scheduler.tiers.take_before())
            scheduler.outbox.to_worker(TrimPool(tokens // scheduler.memory.page_size + 1))
            log.info("the KV pool is of %d tokens, and was of %d", tokens, before)
        scheduler.outbox.answer(ResizeResult(order.id, 200, tokens, before))

    def _problem(self, tokens: int) -> tuple[int, str] | None:
        worker, memory = self._scheduler.worker, self._scheduler.memory
        if self._order is not None:
            return 409, "the pool is about to have another size; ask again when that is over"
        if self._scheduler.handovers is not None:
            return 409, "peers know the pool of an instance that exchanges KV as it is; it can't be resized"
        if worker.device != "cpu":
            return 409, f"a pool in {worker.device} memory can't be resized; use --device cpu"
        if self._scheduler.options.tp_size > 1:
            return 409, "a pool that the ranks of --tp-size share can't be resized"
        if worker.layout.window_group is not None:
            return 409, "the pools of a model whose layers have windows can't be resized"
        if tokens < memory.page_size:
            return 400, f"max_total_tokens: {tokens} is less than a page ({memory.page_size} tokens)"
        if tokens > self._most:
            advice = "start with a larger --max-total-tokens and make it smaller: what is not used takes no memory"
            return 400, f"max_total_tokens: {tokens} is more than the {self._most} that it began with; {advice}"
        return None

    def _answer(self, order: ResizeReq, status: int, message: str) -> None:
        tokens = self._scheduler.memory.max_total_tokens
        self._scheduler.outbox.answer(ResizeResult(order.id, status, tokens, tokens, message))
