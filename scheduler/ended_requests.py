"""The requests that ended last, so that a session can be saved after its answer.

The KV of such a request is found as long as no other request needs the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..messages.base import I32
from ..messages.outputs import TokenLogprob
from ..messages.requests import GenerateReq
from .req import Req, ReqState, Route

MAX_ENDED = 256
MAX_ENDED_TOKENS = 1 << 20
"""Tokens remembered of all ended requests (4 MiB), and maximum tokens of one session."""
LOGPROB_WEIGHT = 16


@dataclass(slots=True, frozen=True)
class KnownRequest:
    """A request, live or ended. ``token_ids``: prompt and output. ``computed``: number of tokens with KV."""

    msg: GenerateReq
    token_ids: I32
    computed: int
    max_new_tokens: int
    logprobs: list[TokenLogprob]
    input_logprobs: list[TokenLogprob] | None

    @classmethod
    def of(cls, req: Req) -> KnownRequest:
        """Copy the tokens, logprobs and lengths that a live request has now."""
        scores = list(req.input_logprobs) if req.input_logprobs is not None else None
        tokens = req.token_ids[: req.known_len].copy()
        return cls(req.msg, tokens, min(req.computed, req.known_len), req.max_new_tokens, list(req.logprobs), scores)

    @property
    def weight(self) -> int:
        """Size in tokens that counts against ``MAX_ENDED_TOKENS``: a token with logprobs counts several times."""
        wanted = self.msg.logprobs
        return len(self.token_ids) * (1 if wanted is None else LOGPROB_WEIGHT + wanted.top_num)


class EndedRequests:
    """Table of the requests that ended last, by rid. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, KnownRequest] = OrderedDict()
        self._tokens = 0

    def get(self, rid: str) -> KnownRequest | None:
        """Return what is remembered of the ended request ``rid``, or None."""
        return self._ended.get(rid)

    def remember(self, req: Req) -> None:
        """Remember a request that has ended, and forget the oldest ones above the limits.

        A request that failed, or that was computed for another instance, is not remembered.
        """
        if req.route is Route.OUTGOING or req.state not in (ReqState.FINISHED, ReqState.ABORTED):
            return
        self._forget(req.rid)
        known = self._ended[req.rid] = KnownRequest.of(req)
        self._tokens += known.weight
        while len(self._ended) > MAX_ENDED or self._tokens > MAX_ENDED_TOKENS:
            self._forget(next(iter(self._ended)))

    def _forget(self, rid: str) -> None:
        known = self._ended.pop(rid, None)
        if known is not None:
            self._tokens -= known.weight
