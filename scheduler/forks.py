"""Several answers to one prompt: it is computed once, and the others begin from the KV of the first.

The first is a request like any other. The others wait until its prompt is computed, or has arrived. Then they find all
but its last page in the prefix cache. They compute the rest themselves, as each samples a first token of its own. The
prompt's logprobs are computed once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .req import Req, ReqState


class Forks:
    """Owner of the requests that wait for another one's prompt. ``reqs``: all live requests."""

    def __init__(self, reqs: Mapping[str, Req]) -> None:
        self._reqs = reqs
        self._waiting: dict[str, list[Req]] = {}

    def add(self, req: Req) -> bool:
        """Let a request wait until the prompt of the one that it is a fork of is computed, or has arrived.

        Return False if it need not wait; the caller then queues it. It shares the prompt's logprobs.
        """
        first = req.msg.fork_of
        if not self._has_to_wait(first):
            self._share_scores(req, first)
            return False
        self._waiting.setdefault(first, []).append(req)
        return True

    def forget(self, req: Req) -> None:
        """Let a request wait no longer: it has ended, or is handled elsewhere."""
        for waiting in self._waiting.values():
            if req in waiting:
                waiting.remove(req)

    def release(self, enqueue: Callable[[Req], None]) -> None:
        """Call ``enqueue`` with each fork that need not wait any longer.

        If the request that they waited for has ended early, only one of them is enqueued, and the others wait for that
        one.
        """
        for first in [first for first in self._waiting if not self._has_to_wait(first)]:
            waiting = [req for req in self._waiting.pop(first) if not req.is_ended]
            if first not in self._reqs and waiting:
                # The first ended before the others could begin from it: the next one computes the prompt for them.
                enqueue(waiting[0])
                if len(waiting) > 1:
                    self._waiting[waiting[0].rid] = waiting[1:]
                continue
            for req in waiting:
                self._share_scores(req, first)
                enqueue(req)

    def _share_scores(self, req: Req, first: str) -> None:
        if first in self._reqs:
            req.share_scores(self._reqs[first])

    def _has_to_wait(self, first: str) -> bool:
        req = self._reqs.get(first)
        # If the first has ended, or was retracted, the fork that computes the prompt next does it for the others.
        return req is not None and req.state is not ReqState.RUNNING and not req.retractions
