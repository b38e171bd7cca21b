"""Saves the state of requests, and continues them from it.

A snapshot takes nothing from a request. It records what is known of it, as a migration would (``messages/moves.py``),
and has the pages that it fills put into the store. An ended request is remembered for a while, so that a conversation
can be saved after its answer. A resumed request is like a migrated one that brings no KV. What pool, host and store
have of its tokens is found by hash, and the rest is computed. So it cannot decode from a wrong page.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
import numpy as np

from ...mem_cache.page_hash import prompt_hashes
from ...messages.base import I32, unpack_i32
from ...messages.moves import RunningRequest, problem_of
from ...messages.outputs import ReqError
from ...messages.question import RefusedAnswer
from ...messages.sessions import ReleaseReq, ResumeReq, SessionState, SnapshotReq, SnapshotResult
from ...messages.worker import WorkerReady
from ..arrivals import Arrivals
from ..ended_requests import MAX_ENDED_TOKENS, EndedRequests, KnownRequest
from ..feature import Feature
from ..handlers import answers, receives
from ..kept_pages import Kept
from ..kv_debug import Place
from ..kv_memory import KVMemory
from ..options import SchedulerOptions
from ..outbox import Outbox
from ..page_names import make_page_names
from ..peer_requests import PeerRequests
from ..refusals import BAD_REQUEST, Refusal
from ..req import Req, Route
from ..tiers import Tiers

log = logging.getLogger(__name__)

NO_STORE = (
    "this instance has no KV store, so the KV will be recomputed; start it with --enable-hierarchical-cache "
    "--hicache-storage-backend file|redis --hicache-storage-url …"
)


class ServesSessions(Protocol):
    """Interface to the scheduler."""

    options: SchedulerOptions
    worker: WorkerReady
    tiers: Tiers
    memory: KVMemory
    outbox: Outbox
    reqs: dict[str, Req]
    arrivals: Arrivals
    peer_requests: PeerRequests
    ended_requests: EndedRequests


class SessionFeature(Feature):
    """Snapshots and resumed requests."""

    def __init__(self, scheduler: ServesSessions) -> None:
        self._scheduler = scheduler
        self._outbox = scheduler.outbox
        self._worker = scheduler.worker
        self._seed = make_page_names(scheduler.options, scheduler.worker).seed

    # --- snapshots ---

    @answers(SnapshotReq)
    def snapshot(self, ask: SnapshotReq, now: float) -> SnapshotResult | RefusedAnswer | None:
        """Return a request's state, live or lately ended. With a KV store, return None and answer when its KV is
        stored.

        Refuse with 404 an unknown request, with 409 one that can't be saved here, and with 413 one that is too long.
        """
        req = self._scheduler.reqs.get(ask.rid)
        known = KnownRequest.of(req) if req is not None else self._scheduler.ended_requests.get(ask.rid)
        # A rid may be reused by the next request, of another key, which may have been refused before it came here.
        if known is None or ask.key_name not in (None, known.msg.key_name):
            text = f"no request {ask.rid!r} runs here, or has ended lately"
            return RefusedAnswer(404, text)
        if req is not None and req.route is Route.OUTGOING:
            text = f"request {ask.rid!r} is computed for another instance; ask that one, which answers it"
            return RefusedAnswer(409, text)
        if known.msg.readout.is_wanted:
            text = f"request {ask.rid!r} reads a vector from its prompt, and has no answer that could go on"
            return RefusedAnswer(409, text)
        if known.weight > MAX_ENDED_TOKENS:
            text = "the request has more tokens or logprobs than a session holds; ask for fewer top_logprobs"
            return RefusedAnswer(413, text)
        state = self._state(known, with_output=ask.with_output)
        problem = problem_of(state.running, self._worker.vocab_size)
        if problem is not None:
            return RefusedAnswer(409, f"the request can't be saved: {problem}")
        return self._save(ask, state, known, req, now)

    def _state(self, known: KnownRequest, *, with_output: bool) -> SessionState:
        msg = known.msg
        output = known.token_ids[msg.prompt_len :] if with_output else np.empty(0, dtype=np.int32)
        request = msgspec.structs.replace(msg, bootstrap=None, fork_of="", place=0, arrival=0.0)
        return SessionState(
            running=RunningRequest(request, output.tobytes(), known.max_new_tokens, 0.0),
            fingerprint=self._worker.fingerprint,
            kv_seed=self._seed,
            logprobs=known.logprobs if with_output else [],
            input_logprobs=known.input_logprobs if len(output) else None,
        )

    def _save(
        self, ask: SnapshotReq, state: SessionState, known: KnownRequest, req: Req | None, now: float
    ) -> SnapshotResult | None:
        """Answer with ``state``: at once without a KV store or KV to save, otherwise when the store has the KV (return
        None).

        ``known``: tokens of the request. ``req``: the request itself if it is live.
        """
        tiers, memory = self._scheduler.tiers, self._scheduler.memory
        page_size = memory.pool.page_size
        tokens = known.token_ids if ask.with_output else known.token_ids[: known.msg.prompt_len]
        wanted = min(len(tokens), known.computed) // page_size * page_size
        names = prompt_hashes(self._seed, tokens[:wanted], page_size, known.msg.extra_key)
        if req is not None and req.hold is not None:
            memory.look(req, req.computed, Place.PREFILL, planned=False)
        if not tiers.store.enabled:
            return SnapshotResult(self._with_hashes(state, names), NO_STORE)
        pages = memory.pages_with_kv(req, tokens[:wanted], known.msg.extra_key)
        hashes = names.copy()
        count = len(pages)
        if req is None or req.hold is None:  # host memory may have what the pool no longer has
            count += len(tiers.host.match(hashes[count:]))
        del hashes[count:]
        short = "" if len(hashes) * page_size == wanted else "the memory was needed before the KV was saved"
        page_bytes = self._worker.layout.page_bytes

        def result(kept: Kept) -> SnapshotResult:
            message = kept.problem or short
            whole, nbytes = self._with_hashes(state, names), kept.pages * page_bytes
            return SnapshotResult(whole, message, kept.pages * page_size, nbytes)

        if not hashes:
            return result(Kept(0))
        tiers.save(hashes, pages)
        tiers.store.kept.want(hashes, ask.keep_until, now, lambda kept: self._outbox.reply(ask, result(kept)))
        return None

    def _with_hashes(self, state: SessionState, names: list[bytes]) -> SessionState:
        """Return the state with those KV hashes of the pages ``names`` that are known, if ``--kv-debug`` is on."""
        return msgspec.structs.replace(state, kv_hashes=self._scheduler.memory.debug.named_hashes(names))

    def _expect(self, state: SessionState, tokens: I32) -> None:
        """Let ``--kv-debug`` compare the pages of the session's first ``tokens`` with the saved hashes, if they come
        back.
        """
        memory = self._scheduler.memory
        if state.kv_hashes and state.kv_seed == self._seed:
            key = state.running.request.extra_key
            memory.debug.expect(prompt_hashes(self._seed, tokens, memory.pool.page_size, key), state.kv_hashes)

    @receives(ReleaseReq)
    def release(self, message: ReleaseReq, now: float) -> None:
        """Let the KV store drop the pages of a deleted session, without the first ``message.shared`` tokens."""
        tiers, page_size = self._scheduler.tiers, self._scheduler.memory.pool.page_size
        tokens = unpack_i32(message.token_ids)
        if len(tokens) >= page_size:
            hashes = prompt_hashes(self._seed, tokens, page_size, message.extra_key)[message.shared // page_size :]
            if hashes:
                tiers.store.kept.release(hashes)

    # --- resuming ---

    @receives(ResumeReq)
    def resume(self, message: ResumeReq, now: float) -> None:
        """Continue a request from the saved state of a session; what has no KV here is computed again.

        If that is refused, send the client a ``ReqError`` with the reason.
        """
        state = message.state
        request, output = state.running.request, unpack_i32(state.running.output)
        refusal = self._refusal(state) or self._scheduler.arrivals.refusal(request)
        if refusal is not None:
            self._outbox.error(ReqError(request.rid, *refusal))
            return
        req = self._scheduler.arrivals.admit_moved(request, output, state.running.max_new_tokens)
        if isinstance(req, str):
            self._outbox.error(ReqError(request.rid, 409, f"the session can't resume here: {req}", BAD_REQUEST))
            return
        req.restored = True
        self._expect(state, req.known_tokens(req.known_len))
        if req.msg.logprobs is not None:
            req.logprobs = list(state.logprobs)
        if req.wants_input_logprobs and req.output_len:
            req.input_logprobs = state.input_logprobs
        self._scheduler.tiers.store.insist(req.rid)
        log.info("resumed after %d output tokens", req.output_len, extra={"rid": req.rid})
        self._scheduler.peer_requests.start_moved(req, now)

    def _refusal(self, state: SessionState) -> Refusal | None:
        if state.fingerprint != self._worker.fingerprint:
            text = (
                "the session is another model's, or that of another checkpoint, type or quantization of this one "
                f"(fingerprint {state.fingerprint[:16]}, here {self._worker.fingerprint[:16]}); restore it where it "
                "was made, or make it anew"
            )
            return Refusal(409, text, BAD_REQUEST)
        wanted = state.output_len if state.running.request.logprobs is not None else 0
        problem = problem_of(state.running, self._worker.vocab_size)
        if problem is None and not state.is_open:
            problem = "its answer has ended; send what comes next as a prompt that begins with its tokens"
        if problem is None and len(state.logprobs) != wanted:
            problem = "its logprobs are not those of its output"
        return Refusal(409, f"the session can't resume: {problem}", BAD_REQUEST) if problem is not None else None
