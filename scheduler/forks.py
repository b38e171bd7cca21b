"""Several answers to one prompt: it is computed once, and the others begin from the KV of the first.

The first is a request like any other. The others wait until its prompt is computed, or has arrived. Then they find all
but its last page in the prefix cache. They compute the rest themselves, as each samples a first token of its own. The
prompt's logprobs are computed once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .req import Req, ReqState, Route


class Forks:
    """Owner of the requests that wait for another one's prompt. ``reqs``: all live requests."""

    def __init__(self, reqs: Mapping[str, Req]) -> None:
        self._reqs = reqs
        self._waiting: dict[Req, list[Req]] = {}
        """Forks by the request that they wait for, which may have ended since the last ``release``."""

    def add(self, req: Req) -> bool:
        """Let a request wait until the prompt of the one that it is a fork of is computed, or has arrived.

        Return False if it need not wait; the caller then queues it. It shares the prompt's logprobs.
        """
        first = self._reqs.get(req.msg.fork_of)
        if first is None:
            return False
        if not _has_to_wait(first):
            req.share_scores(first)
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

        If the request that they waited for has ended without its prompt's KV, only one of them is enqueued. The others
        wait for that one.
        """
        for first in [first for first in self._waiting if not _has_to_wait(first)]:
            waiting = [req for req in self._waiting.pop(first) if not req.is_ended]
            if waiting and first.is_ended and not _has_left_kv(first):
                enqueue(waiting[0])
                if len(waiting) > 1:
                    self._waiting[waiting[0]] = waiting[1:]
                continue
            for req in waiting:
                req.share_scores(first)
                enqueue(req)


def _has_to_wait(first: Req) -> bool:
    # If the first has ended, or was retracted, the fork that computes the prompt next does it for the others.
    return not first.is_ended and first.state is not ReqState.RUNNING and not first.retractions


def _has_left_kv(first: Req) -> bool:
    """Return whether a request that has ended computed its whole prompt here, so that others can begin from its KV.

    It may have ended with its first token, before any other request saw it decode.
    """
    # The KV of an incoming request is cached once it has arrived. That may be later, or never.
    return first.route is Route.LOCAL and first.computed >= first.prompt_len and first.state is not ReqState.FAILED
