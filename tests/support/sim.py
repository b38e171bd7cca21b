"""An instance without processes: the real scheduler over a simulated worker with KV that can be checked.

The simulated model writes to each slot a hash of the token and of the slot before it, and samples from the last one's
hash. So a token comes out right only if every slot of its prefix holds what it should. A page handed to two owners, a
stale table row or a skipped chunk gives an output that differs from ``reference_output``.

With a window it has another layer, with pages that are freed. That layer keeps the same hash of a token. Every computed
token checks that all it sees there was written for just its prefix.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from msgspec import UnsetType

from pdserve.messages.base import Message, pack_i32, unpack_i32
from pdserve.messages.channel import FrameTooLarge, encode
from pdserve.messages.kv_debug import HashPages, PagesHashed
from pdserve.messages.outputs import ReqError, ReqTokens, TokenBatch, TokenLogprob
from pdserve.messages.readout import NO_READOUT
from pdserve.messages.requests import Bootstrap, GenerateReq, LogprobOptions, StopReq
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import ForwardStep, KVLayout, SlotDelta, StepResult, WorkerReady
from pdserve.model_runner.kv.page_hasher import PageHasher
from pdserve.scheduler.features.sessions import SessionFeature
from pdserve.scheduler.handlers import Handlers
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.scheduler import Scheduler
from pdserve.server.options import ServerOptions

from .layouts import uniform_layout

VOCAB = 97
MASK = (1 << 61) - 1


def mix(before: int, token: int) -> int:
    """Return the next state of the hash chain."""
    return (before * 6364136223846793005 + token * 1442695040888963407 + 1442695040888963407) & MASK


def chain(tokens) -> int:
    """Return the KV of the last of ``tokens``."""
    state = 0
    for token in tokens:
        state = mix(state, int(token))
    return state


def sample_from(state: int) -> int:
    """Return the next token after a prefix."""
    return (state >> 7) % VOCAB


def logprob_of(token: int) -> TokenLogprob:
    """Return the simulated model's log probability of a token that it chose."""
    return TokenLogprob(token, -token / 8)


def reference_output(prompt, max_new_tokens: int, stop_ids=()) -> list[int]:
    """Return the simulated model's output, computed without any of the machinery under test."""
    state = chain(prompt)
    output: list[int] = []
    while len(output) < max_new_tokens:
        token = sample_from(state)
        output.append(token)
        if token in stop_ids:
            break
        state = mix(state, token)
    return output


def make_options(**changes) -> ServerOptions:
    """Make options with small pools, so that everything that can run short does."""
    defaults = {"page_size": 4, "max_total_tokens": 256, "max_running_requests": 8, "chunked_prefill_size": 16}
    defaults |= {"disaggregation_threshold": "always"}
    return ServerOptions(**(defaults | changes))


class SimWindow(NamedTuple):
    """How far the windowed layer sees, and how many tokens its pool holds; 0: there is none."""

    window: int = 0
    tokens: int = 0


NO_WINDOW = SimWindow()


def make_worker_ready(
    options: ServerOptions, context_length: int = 512, measured=(), window: SimWindow = NO_WINDOW, host_pages: int = 0
) -> WorkerReady:
    """Return what a worker of the simulated model reports when it is ready."""
    layout = uniform_layout(options.page_size, 1, 1, 1, "int64", options.page_size * 8, window=window.window)
    return WorkerReady(
        fingerprint="sim",
        vocab_size=VOCAB,
        context_length=context_length,
        max_total_tokens=options.max_total_tokens or 256,
        limit_tokens=options.max_total_tokens_limit or 0,
        layout=layout,
        device="cpu",
        attention_backend="sim",
        weights_dtype="float32",
        backend_metadata=b"",
        load_seconds={},
        measured=list(measured),
        max_window_tokens=window.tokens,
        host_pages=host_pages,
    )


def make_generate(
    rid: str,
    prompt,
    *,
    max_new_tokens=8,
    stop_ids=(),
    stop=(),
    room=None,
    trusted=False,
    logprobs=None,
    stream=True,
    return_prompt=False,
    place=0,
    fork_of="",
    readout=NO_READOUT,
    **sampling,
) -> GenerateReq:
    """Make a request as the tokenizer sends it. It streams, so with the default interval each token is sent at once."""
    return GenerateReq(
        rid=rid,
        input_ids=pack_i32(np.asarray(prompt)),
        sampling=SamplingParams(seed=1, max_new_tokens=max_new_tokens, temperature=0.0, stop=stop, **sampling),
        stop_ids=tuple(stop_ids),
        arrival=0.0,
        logprobs=LogprobOptions(*logprobs) if logprobs is not None else None,
        bootstrap=Bootstrap("p", 1, room, trusted=trusted) if room is not None else None,
        stream=stream,
        return_prompt=return_prompt,
        place=place,
        fork_of=fork_of,
        readout=readout,
    )


class Sent:
    """A channel's sending end that keeps what was sent. ``limit``: bytes of a message, None: any."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.limit: int | None = None

    def send(self, *messages: Message) -> None:
        """Keep; refuse as ``Sender`` does."""
        if self.limit is not None:
            sizes = [len(encode([message])) for message in messages]
            too_long = [m for m, size in zip(messages, sizes, strict=True) if size > self.limit]
            if too_long:
                raise FrameTooLarge(too_long, max(sizes), self.limit)
        self.messages.extend(messages)


class WindowedLayer:
    """What the layer with a window keeps: ``kv`` by window slot, and ``page_of``, which leads there from a page."""

    def __init__(self, window: SimWindow, page_size: int, num_pages: int) -> None:
        self.window = window.window
        self.page_size = page_size
        self.kv = np.zeros(window.tokens + page_size, dtype=np.int64)
        self.page_of = np.zeros(num_pages + 1, dtype=np.int32)

    def apply(self, changes: np.ndarray) -> None:
        """Apply a step's pairs of a page and its window page."""
        pages, window_pages = changes.reshape(-1, 2).T
        assert len(set(pages.tolist())) == len(pages), "a page's window page changes twice in one step"
        self.page_of[pages] = window_pages
        attached = self.page_of[self.page_of > 0]
        assert len(set(attached.tolist())) == len(attached), "two pages share a window page"

    def slots(self, slots: np.ndarray) -> np.ndarray:
        """Return the layer's slots of these tokens. They are below ``page_size`` for tokens without one."""
        pages = self.page_of[slots // self.page_size]
        return np.where(pages > 0, pages * self.page_size + slots % self.page_size, 0)

    def check(self, row: np.ndarray, kv: np.ndarray, position: int) -> None:
        """Check that the token at ``position`` sees what was written for its own prefix. ``kv``: contents of the full
        layer.
        """
        seen = row[max(0, position + 1 - self.window) : position + 1]
        slots = self.slots(seen)
        assert (slots > 0).all(), f"position {position} sees a token whose window page is gone"
        assert np.array_equal(self.kv[slots], kv[seen]), f"position {position} sees another's token in its window"


class SimWorker:
    """Runs steps on hashes instead of tensors."""

    def __init__(self, options: ServerOptions, context_length: int = 512, window: SimWindow = NO_WINDOW) -> None:
        self.page_size = options.page_size
        tokens = options.max_total_tokens_limit or options.max_total_tokens or 256
        self.kv = np.zeros(tokens + options.page_size, dtype=np.int64)
        num_pages = len(self.kv) // options.page_size
        self.windowed = WindowedLayer(window, options.page_size, num_pages) if window.window else None
        self.table = np.zeros((options.max_running_requests, context_length + 2), dtype=np.int32)
        self.last = np.zeros(options.max_running_requests, dtype=np.int32)
        self.wants_logprobs: dict[int, bool] = {}

    def pools(self) -> list[np.ndarray]:
        """Return the KV of each group of the layout, by slot."""
        return [self.kv] if self.windowed is None else [self.kv, self.windowed.kv]

    def hashed(self, message: HashPages, layout: KVLayout) -> PagesHashed:
        """Do what ``PoolHasher`` does."""
        hashes = []
        for group, (pages, pool) in enumerate(zip(message.pages, self.pools(), strict=True)):
            held = pool.view(np.uint8).reshape(-1, self.page_size * 8)
            hashes.append(PageHasher(layout, group).hash_all(pages, held.__getitem__))
        return PagesHashed(message.id, hashes)

    def run(self, step: ForwardStep) -> StepResult:
        """Run one forward pass."""
        self.wants_logprobs |= {row.row: row.logprobs is not None for row in step.new_rows}
        for delta in step.slot_deltas:
            slots = unpack_i32(delta.slots)
            self.table[delta.row, delta.start : delta.start + len(slots)] = slots
        if not isinstance(step.window_pages, UnsetType):
            assert self.windowed is not None, "a step gives window pages to a model without windows"
            self.windowed.apply(unpack_i32(step.window_pages))
        rows, starts, q_lens = unpack_i32(step.rows), unpack_i32(step.starts), unpack_i32(step.q_lens)
        ids, slots = unpack_i32(step.input_ids).copy(), unpack_i32(step.out_cache_loc)
        assert len(set(slots.tolist())) == len(slots), "a step writes one slot twice"
        assert (slots >= self.page_size).all(), "a step writes to the padding page"
        at = 0
        sampled = []
        logprobs: list[TokenLogprob | None] = []
        for b, row in enumerate(rows):
            start, q_len = int(starts[b]), int(q_lens[b])
            if unpack_i32(step.use_last)[b]:
                ids[at] = self.last[row]
            for i in range(q_len):
                assert (slots[at + i] - start - i) % self.page_size == 0, (
                    "a token is written to another's place in a page"
                )
                self.table[row, start + i] = slots[at + i]
                before = int(self.kv[self.table[row, start + i - 1]]) if start + i else 0
                self.kv[slots[at + i]] = mix(before, int(ids[at + i]))
            self._look_behind(int(row), start, slots[at : at + q_len])
            at += q_len
            if unpack_i32(step.sample)[b]:
                self.last[row] = sample_from(int(self.kv[slots[at - 1]]))
                sampled.append(int(self.last[row]))
                logprobs.append(logprob_of(sampled[-1]) if self.wants_logprobs[int(row)] else None)
        assert at == len(slots) == len(ids)
        scored = [[logprob_of(t) for t in unpack_i32(spec.targets).tolist()] for spec in step.input_logprobs]
        vectors = [np.float32([rows[spec.entry], 0.5]).tobytes() for spec in step.readouts if spec.is_last]
        return StepResult(step.step_id, pack_i32(sampled), 0.1, logprobs if any(logprobs) else None, scored, vectors)

    def _look_behind(self, row: int, start: int, slots: np.ndarray) -> None:
        """Write an entry's tokens in the windowed layer, then let each look at those that it sees: all at once, as a
        pass does.
        """
        if self.windowed is None:
            return
        there = self.windowed.slots(slots)
        assert (there > 0).all(), "a token is written that has no window page"
        self.windowed.kv[there] = self.kv[slots]
        for position in range(start, start + len(slots)):
            self.windowed.check(self.table[row], self.kv, position)


class SimInstance:
    """Scheduler, worker and what the client saw. ``turn`` is one turn of the loop."""

    def __init__(
        self,
        options: ServerOptions | None = None,
        context_length: int = 512,
        measured=(),
        window: SimWindow = NO_WINDOW,
        host_pages: int = 0,
    ) -> None:
        self.options = options or make_options()
        self.to_worker, self.to_detokenizer, self.to_transfer = Sent(), Sent(), Sent()
        self.outbox = Outbox(self.to_worker, self.to_detokenizer, self.to_transfer)
        ready = make_worker_ready(self.options, context_length, measured, window, host_pages)
        self.scheduler = Scheduler(self.options, ready, self.outbox)
        self.sessions = SessionFeature(self.scheduler)
        self.worker = SimWorker(self.options, context_length, window)
        self.tokens: dict[str, list[int]] = {}
        self.items: dict[str, list[ReqTokens]] = {}
        self.ends: dict[str, ReqTokens | ReqError] = {}
        self.answers: list[Message] = []
        """To HTTP, that are no request's."""
        self.now = 1.0

    def submit(self, *args, **kwargs) -> None:
        """Take a request in."""
        self.scheduler.arrivals.admit(make_generate(*args, **kwargs), self.now)

    def tell(self, message: Message) -> None:
        """Pass a message about sessions to their feature."""
        Handlers(self.outbox, self.sessions).handle(message, self.now)

    def plan(self) -> None:
        """Let the scheduler plan, and read what it says."""
        self.now += 0.001
        self.scheduler.run_steps(self.now)
        self._flush()
        self.scheduler.catch_up()
        self._read()

    def _flush(self) -> None:
        for rid in self.outbox.flush():
            self.scheduler.stop(StopReq(rid))

    def work(self) -> bool:
        """Let the worker do its oldest message, and look at pages before that; False when it has none."""
        if not self.to_worker.messages:
            return False
        message = self.to_worker.messages.popleft()
        while isinstance(message, HashPages) and self.to_worker.messages:
            self._hash(message)
            message = self.to_worker.messages.popleft()
        if isinstance(message, ForwardStep):
            self.scheduler.on_step_result(self.worker.run(message), self.now)
            for push in message.pushes:
                self.on_command(push)
        elif isinstance(message, HashPages):
            self._hash(message)
        else:
            self.on_command(message)
        self._flush()
        self._read()
        return True

    def _hash(self, message: HashPages) -> None:
        self.scheduler.memory.on_hashed(self.worker.hashed(message, self.scheduler.worker.layout), self.now)

    def on_command(self, message: Message) -> None:
        """Refuse a transfer command, because a plain instance sends none."""
        raise AssertionError(f"unexpected {message}")

    def run_until_idle(self, turns: int = 10_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(turns):
            self.plan()
            self.scheduler.check_invariants()
            if not self.work() and self.scheduler.is_idle:
                return
        raise AssertionError(f"not idle after {turns} turns: {self.scheduler.reqs}")

    def _read(self) -> None:
        while self.to_detokenizer.messages:
            message = self.to_detokenizer.messages.popleft()
            if isinstance(message, ReqError):
                assert message.rid not in self.ends, f"{message.rid} ended twice"
                self.ends[message.rid] = message
            elif isinstance(message, TokenBatch):
                for item in message.items:
                    assert item.rid not in self.ends, f"{item.rid} goes on after its end"
                    self.tokens.setdefault(item.rid, []).extend(item.token_ids)
                    self.items.setdefault(item.rid, []).append(item)
                    if item.finish is not None:
                        self.ends[item.rid] = item
            else:
                self.answers.append(message)


__all__ = ["SimInstance", "SimWorker", "SlotDelta", "make_generate", "make_options", "reference_output"]
