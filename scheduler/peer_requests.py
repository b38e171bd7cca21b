"""What hand-overs and migrations do with requests: one of their phases runs on a peer."""

from __future__ import annotations

from ..messages.moves import ReqMoved
from ..messages.outputs import Phase, TokenLogprob
from .req import Req, ReqState, Route
from .runs_requests import RunsRequests


class PeerRequests:
    """Moves requests between the states of their hand-overs, and from and to other instances."""

    def __init__(self, scheduler: RunsRequests) -> None:
        self._scheduler = scheduler

    # --- hand-overs ---

    def may_compute_ahead(self, req: Req) -> bool:
        """Return whether an outgoing request may compute its prompt before the peer asks for the KV.

        It may while nothing else waits or runs, so it delays no other request. If it has to start over, its prompt is
        cached.
        """
        busy = len(self._scheduler.planner.waiting) or self._scheduler.planner.running
        return not (busy or self._scheduler.options.disable_radix_cache or req.wants_input_logprobs)

    def take_back(self, req: Req) -> None:
        """Remove an outgoing request without memory from the queue: its peer does not want its KV for now.

        It is bootstrapping again, until the peer asks once more. It then waits as if it had waited all the time.
        """
        self._scheduler.planner.suspend(req)
        self._scheduler.tiers.store.forget(req.rid)
        req.state = ReqState.BOOTSTRAPPING
        req.times.ready = 0.0
        req.phases.enter(Phase.QUEUE, self._scheduler.now, at="decode")

    def start_over(self, req: Req) -> None:
        """Release a request's memory and reset it to the state before its prefill.

        What it computed of its prompt stays cached.
        """
        self._scheduler.planner.forget(req.rid)
        self._scheduler.memory.finish(req)
        req.start_over(self._scheduler.now)

    def take_first_token(self, req: Req, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Append an incoming request's first token, which comes ahead of its KV, and send it on. It may end the
        request.
        """
        req.append(token, logprob)
        # The KV of the whole prompt will be here. It is cached for others, if it arrives, even if the request ends now.
        req.computed = req.prompt_len
        self._scheduler.on_newest_token(req, token, now)

    def start_landed(self, req: Req, now: float) -> None:
        """Start decoding an incoming request: its KV has arrived and was verified."""
        req.computed = req.prompt_len
        self._scheduler.planner.start_landed(req, now)

    def recompute(self, req: Req, now: float) -> None:
        """Queue an incoming request for its prompt to be computed here, since its KV will not come. Its memory is
        released.

        What is cached of it need not be computed.
        """
        self._scheduler.planner.suspend(req)
        if req.hold is not None:
            self._scheduler.memory.finish(req)
        req.route, req.computed = Route.LOCAL, 0
        self._scheduler.enqueue(req, now)

    def compute_here(self, req: Req, now: float) -> None:
        """Compute an incoming request's prompt here after all, in the memory that was taken for its KV. It is not
        queued.
        """
        req.route = Route.LOCAL
        req.times.ready = now
        self._scheduler.planner.begin(req, now)

    # --- migration ---

    def hold_back(self, req: Req) -> None:
        """Plan no more steps of a request, so that it can migrate. Its memory stays.

        Steps under way still add tokens; ``req.pending`` is 0 when they are done.
        """
        self._scheduler.forks.forget(req)
        self._scheduler.planner.suspend(req)

    def go_on(self, req: Req) -> None:
        """Plan steps again for a request that ``hold_back`` stopped. Do nothing if it has ended meanwhile."""
        if req.is_ended:
            return
        self._scheduler.planner.go_on(req)
        if req.hold is None:
            self._scheduler.grammars.queued(req)

    def leave_moved(self, req: Req, where: ReqMoved) -> None:
        """End a request here that continues on another instance. Its client gets all pending output, then the new
        location.
        """
        self._scheduler.send_output(req)
        self._scheduler.leave(req, ReqState.MOVED)
        self._scheduler.outbox.answer(where)

    def start_moved(self, req: Req, now: float) -> None:
        """Continue a request that migrated here or is resumed, and send its output so far.

        It decodes on if it has memory and slots suffice. Otherwise its memory is released, and it is queued to compute
        what is not cached.
        """
        req.elsewhere = False
        req.pending_output = req.token_ids[req.prompt_len : req.known_len].tolist()
        req.pending_logprobs = list(req.logprobs)
        if req.hold is not None and self._scheduler.memory.extend(req):
            self._scheduler.planner.start_landed(req, now)
        else:
            self.recompute(req, now)
        self._scheduler.send_output(req)
