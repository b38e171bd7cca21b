"""One request inside the scheduler.

Lifecycle (docs/architecture.md)::

    local:     WAITING → PREFILLING → RUNNING → FINISHED
    outgoing:  BOOTSTRAPPING → WAITING → PREFILLING → SENDING → FINISHED
                     ▲                                  │ its memory was wanted before anybody asked for it
                     └──────────────────────────────────┘
    incoming:  BOOTSTRAPPING → PREALLOCATED → TRANSFERRING → RUNNING → FINISHED

An incoming request whose prompt is computed here after all, by choice (from PREALLOCATED, or before) or because its KV
won't come, goes on as a local one. A retracted request goes back from RUNNING to WAITING with its output kept, and is
from then on a local one: this instance computes prompt and output again. ``ABORTED`` and ``FAILED`` follow from any
state. ``MOVED``, it goes on elsewhere, follows from those of a request that waits or runs, where it comes in as an
incoming one that has output already; and from those of an outgoing one whose prompt the decode computes itself.

Positions count from the prompt's first token. Of a request's ``total_len`` tokens, the first ``computed`` have their
KV in the pool or written by a step that was already sent; ``pending`` tokens at the end were sampled by steps whose
result is not here yet, so the scheduler knows that they exist but not what they are.
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
from ..messages.worker import RowInit
from .fairness import Tenant
from .phases import PhaseClock


class ReqState(StrEnum):
    """Where a request stands."""

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
    """Where a request's two phases run."""

    LOCAL = "local"
    OUTGOING = "outgoing"
    INCOMING = "incoming"


LEGS: dict[Route, tuple[InstanceRole, InstanceRole]] = {
    Route.OUTGOING: ("prefill", "decode"),
    Route.INCOMING: ("decode", "decode"),
}
"""What this instance is to a request that is handed over, and which instance it waits for at first."""

BATCH_SECONDS = 0.1
"""By how much later each prompt of a batch counts as come than the one before it."""
MAX_BATCH_SECONDS = 600.0
"""And the last one than the first, however many they are."""


@dataclass(slots=True)
class ReqTimes:
    """``time.monotonic()`` of a request's turning points; 0 where it has not come to that yet.

    ``turn``: what first come, first served goes by. Prompts of a batch count as come one after the other, so that who
    comes behind a batch of thousands need not wait for them all. Who comes much later does not overtake them.
    """

    arrival: float
    turn: float
    ready: float = 0.0
    """When nothing but memory and its turn kept the request waiting (a hand-over's peer has turned up)."""
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    """When the newest token that was generated here became known."""


class Foreseen(NamedTuple):
    """When the first token was foreseen: ``ms`` behind ``at`` (``time.monotonic()``), ``raw_ms`` before corrections.

    ``prefill``: the epoch of the instance that computes the prompt, None: this one.
    """

    prefill: str | None
    ms: float
    raw_ms: float
    at: float


class Loading(NamedTuple):
    """A prefix that host memory has and the pool not yet: ``until`` how many tokens. ``is_hit``: a cache hit, not what
    the request had itself before.
    """

    until: int
    is_hit: bool


@dataclass(slots=True, eq=False)
class Req:
    """See the module. ``hold`` is the memory that the request has, None while it has none."""

    rid: str
    msg: GenerateReq
    route: Route
    state: ReqState
    prompt_len: int
    max_new_tokens: int
    token_ids: I32
    """Prompt, then known output; only the first ``known_len`` entries mean anything."""
    known_len: int
    times: ReqTimes
    phases: PhaseClock
    stop_ids: frozenset[int]
    pending: int = 0
    computed: int = 0
    hold: KVHold | None = None
    cached_tokens: int = 0
    cached_beyond: CachedBeyond | None = None
    """Those of them that came from other tiers (``tiers.py``); None: none did."""
    held: HeldTokens | None = None
    reused: int = 0
    """Tokens that it found in the prefix cache when it got the memory that it has."""
    retractions: int = 0
    started_over: bool = False
    """Whether its whole prompt was computed before, and then let go of."""
    announced: bool = False
    """Whether the detokenizer has been told of this request."""
    news_interval: int = 1
    """How many tokens the detokenizer is told at a time; see ``outbox.news_interval``."""
    untold: list[int] = field(default_factory=list)
    """The newest output tokens, of which the detokenizer has not been told yet."""
    untold_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of all output tokens, where they are wanted: who goes on elsewhere takes them along."""
    input_logprobs: list[TokenLogprob] | None = None
    """Of the prompt, where they are wanted. Forks have the list of the request that they are forks of."""
    scored: int = 0
    """First prompt position whose logprob no pass has been asked for yet; see ``to_score``."""
    timing: Timing = field(default_factory=Timing)
    page_hashes: list[bytes] = field(default_factory=list)
    """Names of its first whole pages, as far as they were asked for (``page_names.py``). Grows in place."""
    condemned: bool = False
    """Whether its logits were not finite."""
    uncached: int = 0
    """Tokens to be computed, as it seemed when the request began to wait for that."""
    foreseen: Foreseen | None = None
    """Until the first token is known."""
    loading: Loading | None = None
    """What host memory has of it and the pool not yet; None: nothing."""
    restored: bool = False
    """Whether it goes on from a session."""
    elsewhere: bool = False
    """Whether another instance has the request yet: it is moving here, or only its KV is. No client of this instance
    knows of it."""

    @staticmethod
    def create(
        msg: GenerateReq,
        route: Route,
        state: ReqState,
        max_new_tokens: int,
        news_interval: int,
        now: float = 0.0,
        role: InstanceRole = "unified",
    ) -> Req:
        """Make a fresh request; ``max_new_tokens`` may be less than the client asked for where the pool is small.

        ``role``: of this instance, for a request that is not handed over.
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
            times=ReqTimes(arrival=msg.arrival, turn=msg.arrival + min(msg.place * BATCH_SECONDS, MAX_BATCH_SECONDS)),
            stop_ids=frozenset(msg.stop_ids),
            news_interval=news_interval,
        )
        req._forget_scores()
        return req

    def _forget_scores(self) -> None:
        if self.wants_input_logprobs:
            first = TokenLogprob(int(self.token_ids[0]), None)
            self.input_logprobs, self.scored = [first] if self.logprob_start == 0 else [], 0

    def share_scores(self, first: Req) -> None:
        """Take the prompt's logprobs from ``first``, a request for the same, if all of them are there or on their way.

        Results come in order: they are complete before a pass that is planned now can give a token.
        """
        if self.input_logprobs is not None and first.input_logprobs is not None and first.to_score >= first.prompt_len:
            self.input_logprobs, self.scored = first.input_logprobs, self.prompt_len

    @property
    def tenant(self) -> Tenant:
        """Whose request it is."""
        return Tenant(self.msg.key_name, self.msg.user)

    @property
    def route_told(self) -> str:
        """Which leg it is, or was: a request that was handed over and retracted is computed here now."""
        return str(Route.INCOMING if self.timing.timeline is not None else self.route)

    @property
    def total_len(self) -> int:
        """Prompt and output tokens, those not yet known included."""
        return self.known_len + self.pending

    @property
    def most_output(self) -> int:
        """Output tokens that it may have where nothing limits them meanwhile: see ``limit_output``."""
        return len(self.token_ids) - self.prompt_len

    def limit_output(self, tokens: int) -> None:
        """Let it come to ``tokens`` at most, prompt included, but to one of output. A larger limit undoes a smaller."""
        self.max_new_tokens = max(1, min(self.most_output, tokens - self.prompt_len))

    @property
    def most_tokens(self) -> int:
        """Slots that it may come to need: its prompt, its output, and two more that may be computed once too often."""
        return self.prompt_len + self.max_new_tokens + 2

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return self.total_len - self.computed

    @property
    def to_load(self) -> int:
        """Tokens of those that host memory is about to bring."""
        return max(0, self.loading.until - self.computed) if self.loading is not None else 0

    @property
    def to_compute(self) -> int:
        """Tokens of those that are to be computed."""
        return self.remaining - self.to_load

    @property
    def output_len(self) -> int:
        """Known output tokens."""
        return self.known_len - self.prompt_len

    @property
    def wants_tokens(self) -> bool:
        """Whether one more token may be sampled, counting those on their way."""
        return self.total_len - self.prompt_len < self.max_new_tokens

    @property
    def has_news(self) -> bool:
        """Whether what is untold should go out, after a token that is not the last."""
        if len(self.untold) >= self.news_interval or (self.msg.stream and not self.announced):
            return True
        # Retracted while this token was on its way: the next one may be long in coming.
        return self.state is ReqState.WAITING

    @property
    def is_ended(self) -> bool:
        """Whether the request is over; results that still arrive for it mean nothing."""
        return self.state in ENDED

    @property
    def logprob_start(self) -> int:
        """First prompt position whose logprob is wanted, -1 for none."""
        return self.msg.logprobs.start_len if self.msg.logprobs is not None else -1

    @property
    def wants_input_logprobs(self) -> bool:
        """Whether prompt logprobs are wanted at all."""
        return 0 <= self.logprob_start < self.prompt_len

    @property
    def to_score(self) -> int:
        """First prompt position whose logprob a pass is yet to bring, ``prompt_len`` for none."""
        if not self.wants_input_logprobs or self.output_len:
            return self.prompt_len
        return max(1, self.logprob_start, self.scored)

    @property
    def longest_reusable_prefix(self) -> int:
        """Tokens that may come from the cache: one must be computed to sample; a scored position needs its logits."""
        limit, first = self.total_len - 1, self.to_score
        return min(limit, first - 1) if first < self.prompt_len else limit

    def known_tokens(self, length: int) -> I32:
        """The first ``length`` token ids, fewer where fewer are known."""
        return self.token_ids[: min(length, self.known_len)]

    def extend(self, output: I32) -> None:
        """Output that another instance has sampled."""
        self.token_ids[self.known_len : self.known_len + len(output)] = output
        self.known_len += len(output)

    def append(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """A sampled token has become known."""
        self.token_ids[self.known_len] = token_id
        self.known_len += 1
        self.untold.append(token_id)
        if logprob is not None:
            self.untold_logprobs.append(logprob)
            self.logprobs.append(logprob)

    def timing_at(self, now: float) -> Timing:
        """Bring ``timing`` up to ``now`` and return it."""
        phases, timing, times = self.phases, self.timing, self.times
        phases.upto(now)
        timing.tokenize_ms = phases.spent(Phase.TOKENIZE)
        timing.queue_ms = phases.spent(Phase.QUEUE)
        timing.prefill_ms = phases.spent(Phase.PREFILL)
        timing.transfer_ms = phases.spent(Phase.TRANSFER)
        timing.decode_ms = phases.spent(Phase.DECODE)
        timing.first_token_ms = max(0.0, times.first_token - times.arrival) * 1000 if times.first_token else 0.0
        timing.here, timing.phases = phases.here, phases.times()
        return timing

    def start_over(self, now: float) -> None:
        """Forget that anything was computed. Of a request whose output nobody knows yet."""
        self.state = ReqState.BOOTSTRAPPING
        self.phases.enter(Phase.QUEUE, now, at="decode")
        self.known_len, self.computed = self.prompt_len, 0
        # A name may cover output that is forgotten, and a hold that has gone keeps the old list.
        self.page_hashes = []
        self.untold, self.untold_logprobs, self.logprobs = [], [], []
        self._forget_scores()
        self.times.first_token = 0.0
        self.started_over = True

    def row_init(self, row: int) -> RowInit:
        """What the worker's sampler must know as the request takes ``row``."""
        sampling = self.msg.sampling
        return RowInit(
            row=row,
            prompt_len=self.prompt_len,
            sampling=sampling,
            stop_ids=self.msg.stop_ids,
            logprobs=self.msg.logprobs.top_num if self.msg.logprobs is not None else None,
            history=self.known_tokens(self.known_len).tobytes() if sampling.has_penalties else None,
            rid=self.rid,
        )
