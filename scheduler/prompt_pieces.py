"""The prompt pieces of a step that is being planned: how long each is, and what room is left after it."""

from __future__ import annotations

from .kv_memory import KVMemory
from .req import Req, ReqState, Route, hold_of
from .step_budget import StepAllowance, StepBudget
from .step_builder import StepBuilder


class PromptPieces:
    """Adds pieces to ``builder`` while ``allowance`` lasts. ``prefilled``: requests that got one, in order.

    ``holds_last``: leave the last token of each prompt to a later step (``joint_start.py``).
    """

    def __init__(self, builder: StepBuilder, allowance: StepAllowance, budget: StepBudget, memory: KVMemory) -> None:
        self._builder = builder
        self.allowance = allowance
        self._budget = budget
        self._memory = memory
        self.prefilled: list[Req] = []
        self.holds_last = False

    @property
    def may_begin(self) -> bool:
        """Whether the step has room for a piece of a prompt that has not begun.

        One token is enough for the step's first piece; later ones need a page. A prompt that begins takes its memory
        and leaves the queue. If it got no piece in return, the next one could begin, and so all of the queue, whatever
        its order.
        """
        page = self._memory.pool.page_size
        fits = self._budget.fitting(self.allowance, self._builder.shape, 0, page)
        return fits >= page or (fits > 0 and not self.prefilled)

    def go_on(self, req: Req) -> None:
        """Add the next piece of a prompt that has begun. If not one token fits in time, close the step for prompts."""
        self.allowance.add_copies(self._memory.tiers.copies.new_ms())
        fits = self._fitting(req)
        if fits <= 0 and self.allowance.is_timed:
            # Later prompts may well be cheaper, as this one is deep in its prompt; they would starve it.
            self.allowance.close()
        self._add(req, fits)

    def begin(self, req: Req) -> bool:
        """Add the first piece of a prompt that has just got its memory. Return whether it got one.

        It does not if there is no allowance, or if a prefix is loaded first.
        """
        self.allowance.add_copies(self._memory.tiers.copies.new_ms())
        if req.loading is not None:
            return False
        self._add(req, self._fitting(req))
        return bool(self.prefilled) and self.prefilled[-1] is req

    def _fitting(self, req: Req) -> int:
        return self._budget.fitting(self.allowance, self._builder.shape, req.computed, req.remaining)

    def _add(self, req: Req, fits: int) -> None:
        """Add the request's next piece to the step; none if the step has no room for one.

        ``fits``: how many tokens the step has room for. A longer rest is cut, or waits if it must not be cut and is not
        the first.
        """
        length = req.remaining - self.holds_last
        if length > fits:
            if self._budget.may_cut:
                length = self._piece(req, fits)
            elif self.prefilled:
                return
        if length <= 0:
            return
        pool, hold = self._memory.pool, hold_of(req)
        length = min(length, pool.windows.writable_len(hold.window, req.computed))
        pool.move_window(hold, req.computed, req.computed + length)
        slots = self._memory.pool.slots(req, req.computed, req.computed + length)
        self._builder.add_chunk(req, length, slots)
        self.allowance.take(length)
        self.prefilled.append(req)
        if req.remaining <= 1 and req.pending:
            req.state = ReqState.RUNNING if req.route is not Route.OUTGOING else ReqState.SENDING

    def _piece(self, req: Req, fits: int) -> int:
        """Return how much to compute now of a prompt that is longer than what ``fits``.

        A piece ends on a page border, because whole pages can be shared, and pushed to a peer, at once. But a time
        limit allows any number of tokens, often few. Then the piece ends where it must rather than give up more than a
        quarter. And a scrap of less than a page, beside other pieces, is not worth its cost.
        """
        page = self._memory.pool.page_size
        whole_pages = (req.computed + fits) // page * page - req.computed
        if whole_pages >= (fits * 3 / 4 if self.allowance.is_timed else 1):
            return whole_pages
        return fits if fits >= page or not self.prefilled else 0
