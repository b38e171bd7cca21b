"""One request inside the scheduler.

Lifecycle::

    local:     WAITING → PREFILLING → RUNNING → FINISHED
    outgoing:  BOOTSTRAPPING → WAITING → PREFILLING → SENDING → FINISHED
                     ▲                                  │ its memory was needed before its peer asked for the KV
                     └──────────────────────────────────┘
    incoming:  BOOTSTRAPPING → PREALLOCATED → TRANSFERRING → RUNNING → FINISHED

- An incoming request becomes a local one if its prompt is computed here after all. That is by choice (from
  PREALLOCATED, or before), or because its KV will not come.
- A retracted request goes back from RUNNING or PREFILLING to WAITING and keeps its output. It is a local request from
  then on: this instance computes prompt and output again. An outgoing request is never retracted.
- ``ABORTED`` and ``FAILED`` follow from any state.
- ``MOVED`` means that the request continues elsewhere. It follows from the states of a request that waits or runs. The
  target adds the request as an incoming one that has output already.
- ``MOVED`` also follows from the states of an outgoing request if the decode instance computes the prompt itself.

Positions count from the prompt's first token. Of a request's ``total_len`` tokens, the first ``computed`` have their KV
in the pool, or written by a step that was already sent. The ``pending`` tokens at the end were sampled by steps without
a result yet: the scheduler knows that they exist, but not their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from ..mem_cache.base_prefix_cache import KVHold
from ..messages.base import I32, unpack_i32
from ..messages.outputs import CachedBeyond, HeldTokens, InstanceRole, Phase, Timing, TokenLogprob
from ..messages.requests import GenerateReq
from .fairness import Tenant
from .phases import PhaseClock


class ReqState(StrEnum):
    """State of a request; the module shows the transitions."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING = "waiting"
    PREALLOCATED = "preallocated"
    TRANSFERRING = "transferring"
    PREFILLING = "prefilling"
    SENDING = "sending"
    RUNNING = "running"
    FINISHED = "finished"
    MOVED = "moved"
    ABORTED = "aborted"
    FAILED = "failed"


ENDED = frozenset({ReqState.FINISHED, ReqState.MOVED, ReqState.ABORTED, ReqState.FAILED})


class Route(StrEnum):
    """Route of a request: where its two phases run."""

    LOCAL = "local"
    OUTGOING = "outgoing"
    INCOMING = "incoming"


LEGS: dict[Route, tuple[InstanceRole, InstanceRole]] = {
    Route.OUTGOING: ("prefill", "decode"),
    Route.INCOMING: ("decode", "decode"),
}
"""This instance's role for a request that is handed over, and the instance that it waits for at first."""

BATCH_SECONDS = 0.1
"""Added to the arrival of each further prompt of a batch, for the order of first come, first served."""
MAX_BATCH_SECONDS = 600.0
"""Maximum that is added to the arrival of a batch's last prompts."""


@dataclass(slots=True)
class ReqTimes:
    """``time.monotonic()`` of a request's transitions; 0 if it has not come to one yet.

    ``fcfs_time``: the time that first come, first served sorts by. Prompts of a batch count as arriving one after the
    other. So a request after a batch of thousands need not wait for all of them. One that arrives much later does not
    overtake them.
    """

    arrival: float
    fcfs_time: float
    ready: float = 0.0
    """Time since when only memory and the queue have kept the request waiting: its hand-over's peer has connected."""
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    """When the newest token that was generated here became known."""


class FirstTokenEstimate(NamedTuple):
    """Estimate of the first token's time: ``ms`` after ``at`` (``time.monotonic()``); ``raw_ms`` is not corrected.

    ``prefill``: epoch of the instance that computes the prompt; None means this instance.
    """

    prefill: str | None
    ms: float
    raw_ms: float
    at: float


class Loading(NamedTuple):
    """A prefix that is in host memory and not yet in the pool, up to ``until`` tokens.

    ``is_hit``: whether it counts as a cache hit, as opposed to KV that the request had itself before.
    """

    until: int
    is_hit: bool


@dataclass(slots=True, eq=False, weakref_slot=True)
class Req:
    """A request and its progress. ``hold`` is its memory, None while it has none."""

    rid: str
    msg: GenerateReq
    route: Route
    state: ReqState
    prompt_len: int
    max_new_tokens: int
    token_ids: I32
    """Prompt, then known output; only the first ``known_len`` entries are valid."""
    known_len: int
    times: ReqTimes
    phases: PhaseClock
    stop_ids: frozenset[int]
    tenant: Tenant
    """API key and user that sent the request."""
    pending: int = 0
    computed: int = 0
    hold: KVHold | None = None
    cached_tokens: int = 0
    cached_beyond: CachedBeyond | None = None
    """Part of ``cached_tokens`` that came from other tiers (``tiers.py``); None if none did."""
    held: HeldTokens | None = None
    reused: int = 0
    """Tokens found in the prefix cache when the request got its present memory."""
    retractions: int = 0
    started_over: bool = False
    """Whether its whole prompt was computed before and then released."""
    announced: bool = False
    """Whether the detokenizer knows this request."""
    send_interval: int = 1
    """Tokens sent to the detokenizer at a time; see ``outbox.send_interval``."""
    pending_output: list[int] = field(default_factory=list)
    """Pending output: the newest tokens, not yet sent to the detokenizer."""
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Logprobs of all output tokens, if they are wanted. A migrated request takes them along."""
    input_logprobs: list[TokenLogprob] | None = None
    """Logprobs of the prompt, if they are wanted. Forks share the list of the request that they fork."""
    readout: bytes = b""
    """Vector (float32) read from the pass over the prompt, once that is known."""
    scored: int = 0
    """First prompt position with a logprob that no pass has been asked for yet; see ``to_score``."""
    timing: Timing = field(default_factory=Timing)
    page_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the first whole pages, as far as they were needed (``page_names.py``). Grows in place."""
    condemned: bool = False
    """Whether its logits were not finite."""
    lane: int | None = None
    """Lane that it waited in when it was taken out of the queue for a while (``WaitingQueue.lane_of``)."""
    uncached: int = 0
    """Tokens to be computed, estimated when the request began to wait for its computation."""
    first_token_estimate: FirstTokenEstimate | None = None
    """Estimate of the first token's time, set until that token is known."""
    loading: Loading | None = None
    """Prefix that is in host memory and not yet in the pool; None if there is none."""
    restored: bool = False
    """Whether it continues a session."""
    failed_with: int = 0
    """HTTP status that its client got when it failed here; 0 if it has not failed."""
    elsewhere: bool = False
    """Whether another instance still has the request: it is migrating here, or only its KV is.

    No client of this instance knows such a request.
    """

    @staticmethod
    def create(
        msg: GenerateReq,
        route: Route,
        state: ReqState,
        max_new_tokens: int,
        send_interval: int,
        now: float = 0.0,
        role: InstanceRole = "unified",
    ) -> Req:
        """Create a request. ``max_new_tokens`` may be less than the client asked for if the pool is small.

        ``send_interval``: output tokens that are collected before they are sent. ``now``: ``time.monotonic()``.
        ``role``: this instance's role, used for a request that is not handed over.
        """
        prompt = unpack_i32(msg.input_ids)
        token_ids = np.empty(len(prompt) + max_new_tokens, dtype=np.int32)
        token_ids[: len(prompt)] = prompt
        req = Req(
            rid=msg.rid,
            msg=msg,
            route=route,
            state=state,
            prompt_len=len(prompt),
            max_new_tokens=max_new_tokens,
            token_ids=token_ids,
            known_len=len(prompt),
            phases=PhaseClock(
                msg.arrival, now, *LEGS.get(route if msg.bootstrap is not None else Route.LOCAL, (role,))
            ),
            times=ReqTimes(
                arrival=msg.arrival, fcfs_time=msg.arrival + min(msg.place * BATCH_SECONDS, MAX_BATCH_SECONDS)
            ),
            stop_ids=frozenset(msg.stop_ids),
            tenant=Tenant(msg.key_name, msg.user),
            send_interval=send_interval,
        )
        req._forget_scores()
        return req

    def _forget_scores(self) -> None:
        if self.wants_input_logprobs:
            first = TokenLogprob(int(self.token_ids[0]), None)
            self.input_logprobs, self.scored = [first] if self._logprob_start == 0 else [], 0

    def share_scores(self, first: Req) -> None:
        """Share the list of the prompt's logprobs with ``first``, a request for the same prompt.

        Do so only if both want them, and ``first`` has all of them or waits for the last ones. Results come in order:
        the logprobs are complete before a pass that is planned now can yield a token.
        """
        if self.input_logprobs is not None and first.input_logprobs is not None and first.to_score >= first.prompt_len:
            self.input_logprobs, self.scored = first.input_logprobs, self.prompt_len

    @property
    def reported_route(self) -> str:
        """Route reported to the client: the one of its hand-over, even if it was retracted and is computed here now."""
        return str(Route.INCOMING if self.timing.timeline is not None else self.route)

    @property
    def total_len(self) -> int:
        """Prompt and output tokens, including those that are not known yet."""
        return self.known_len + self.pending

    @property
    def _most_output(self) -> int:
        """Maximum output tokens unless ``limit_output`` sets fewer."""
        return len(self.token_ids) - self.prompt_len

    def limit_output(self, tokens: int) -> None:
        """Limit prompt and output together to ``tokens``, but allow one token of output.

        A larger limit undoes a smaller one.
        """
        self.max_new_tokens = max(1, min(self._most_output, tokens - self.prompt_len))

    @property
    def most_tokens(self) -> int:
        """Slots it may need: prompt, output, and two more that may be computed once too often."""
        return self.prompt_len + self.max_new_tokens + 2

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled, prefix to be loaded included; 1 while decoding."""
        return self.total_len - self.computed

    @property
    def to_load(self) -> int:
        """Remaining tokens with KV in host memory that is still to be loaded into the pool."""
        return max(0, self.loading.until - self.computed) if self.loading is not None else 0

    @property
    def to_compute(self) -> int:
        """Remaining tokens that a forward pass has to compute, without those to be loaded from host memory."""
        return self.remaining - self.to_load

    @property
    def output_len(self) -> int:
        """Known output tokens."""
        return self.known_len - self.prompt_len

    @property
    def wants_tokens(self) -> bool:
        """Whether one more token may be sampled; tokens that steps under way sample are counted."""
        return self.total_len - self.prompt_len < self.max_new_tokens

    @property
    def has_output_to_send(self) -> bool:
        """Whether pending output should be sent now, after a token that is not the last."""
        if len(self.pending_output) >= self.send_interval or (self.msg.stream and not self.announced):
            return True
        # The request was retracted while this token was under way: the next one may take long.
        return self.state is ReqState.WAITING

    @property
    def is_ended(self) -> bool:
        """Whether the request has ended; results that still arrive for it are ignored."""
        return self.state in ENDED

    @property
    def _logprob_start(self) -> int:
        """First prompt position with a logprob that is wanted, -1 for none."""
        return self.msg.logprobs.start_len if self.msg.logprobs is not None else -1

    @property
    def wants_input_logprobs(self) -> bool:
        """Whether prompt logprobs are wanted at all."""
        return 0 <= self._logprob_start < self.prompt_len

    @property
    def to_score(self) -> int:
        """First prompt position with a logprob that is still to be computed, ``prompt_len`` for none."""
        if not self.wants_input_logprobs or self.output_len:
            return self.prompt_len
        return max(1, self._logprob_start, self.scored)

    @property
    def longest_reusable_prefix(self) -> int:
        """Tokens that may come from the cache.

        One must be computed to sample, and a scored position needs its logits. A readout may need all of them.
        """
        if self.msg.readout.needs_every_token:
            return 0
        limit, first = self.total_len - 1, self.to_score
        return min(limit, first - 1) if first < self.prompt_len else limit

    def known_tokens(self, length: int) -> I32:
        """Return the first ``length`` token ids, or fewer if fewer are known."""
        return self.token_ids[: min(length, self.known_len)]

    def extend(self, output: I32) -> None:
        """Append output that another instance has sampled. It is not queued for the client."""
        self.token_ids[self.known_len : self.known_len + len(output)] = output
        self.known_len += len(output)

    def append(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Append a sampled token that has become known, with its logprob, and queue both for the client."""
        self.token_ids[self.known_len] = token_id
        self.known_len += 1
        self.pending_output.append(token_id)
        if logprob is not None:
            self.pending_logprobs.append(logprob)
            self.logprobs.append(logprob)

    def start_over(self, now: float) -> None:
        """Reset the request to the state before any computation, and drop its output. Its memory must be released.

        Only valid while its output is not known outside the scheduler.
        """
        self.state = ReqState.BOOTSTRAPPING
        self.phases.enter(Phase.QUEUE, now, at="decode")
        self.known_len, self.computed = self.prompt_len, 0
        # A hash may cover output that is reset, and a released hold keeps the old list.
        self.page_hashes = []
        self.pending_output, self.pending_logprobs, self.logprobs = [], [], []
        self._forget_scores()
        self.times.first_token = 0.0
        self.started_over = True


def hold_of(req: Req) -> KVHold:
    """Return the request's memory. Raises ``AssertionError`` if it has none."""
    if req.hold is None:
        raise AssertionError(f"request {req.rid} ({req.state}) holds no KV memory")
    return req.hold
