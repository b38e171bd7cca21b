"""Finds out where KV changes that should not (``--kv-debug``).

The worker hashes whole pages, layer by layer, at each transition of their life. This module remembers, by the page's
name (its hash over the tokens), what each held when it was last known to be right, and compares. Life of a question::

    hash ──▶ (with ``planned``: waits for the step) ──▶ HashPages ──▶ PagesHashed ──▶ remembered | compared, reported

What a step has computed is right by definition. Where it recomputes a page that is known, the two are compared as well
(``PREFILL``). KV that is found wrong elsewhere is condemned: no request finds it in the cache any more. Requests that
have it continue with it. Wrong KV of a hand-over is not used.

The table is bounded: forgotten pages are not compared. Nor are lossy tiers, by nature: what they bring back is
remembered as it came.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from ..mem_cache.base_prefix_cache import KVHold
from ..mem_cache.window_pages import Windows
from ..messages.base import I32, pack_i32
from ..messages.handover import MAX_HASH_BYTES
from ..messages.kv_debug import HASH_BYTES, HashPages, PagesHashed
from ..messages.metrics import Family, Labelled
from ..messages.worker import KVGroup, WorkerReady
from ..runtime.metrics import Metrics, counter, read
from .options import SchedulerOptions
from .outbox import Outbox
from .page_names import PageNames, make_page_names
from .req import Req, hold_of

log = logging.getLogger(__name__)

TABLE_BYTES = 64 << 20
MOST_LINES = 8
"""Maximum lines logged for one question: wrong pages are mostly wrong in every layer."""
MOST_NAMESPACES = 256
NAMES_BYTES = 128
"""Approximate bytes of a table entry beside its hashes."""

Row = tuple[bytes, ...]
"""Hashes of a page: of each group of the layout, layer by layer, part by part."""


class Place(StrEnum):
    """Event at which a page was hashed."""

    PREFILL = "prefill"
    TRANSFER = "transfer"
    HOST = "host"
    STORE = "store"
    RESTORE = "restore"
    REUSE = "reuse"


NOW = {
    Place.PREFILL: "now that it was computed again",
    Place.TRANSFER: "as it arrived",
    Place.HOST: "back from host memory",
    Place.STORE: "back from the store",
    Place.RESTORE: "as its session was restored",
    Place.REUSE: "as it was found in the cache",
}
BEFORE = {
    Place.PREFILL: "when it was computed",
    Place.TRANSFER: "when it had arrived",
    Place.HOST: "when it had come from host memory",
    Place.STORE: "when it had come from the store",
    Place.RESTORE: "when its session was saved",
    Place.REUSE: "when it was found in the cache first",
}


AT_SENDER = "at the instance that computed it"


class Known(NamedTuple):
    """Hashes of a page, and when it had them."""

    row: Row
    when: str


class Difference(NamedTuple):
    """Two hashes that should be equal."""

    layer: int
    part: str
    now: int
    before: int


@dataclass(slots=True, eq=False)
class _Question:
    """Pages of a request that the worker is asked to hash.

    ``first``: number of the first page within the request. ``pages``: full pages of the pool. ``brought``: names of
    those that the store has brought. ``theirs``: hashes at the instance that computed the pages, as far as it reported
    them. ``done``: called with what is wrong, and the time. Without it, wrong KV is condemned.
    """

    req: Req
    place: Place
    first: int
    names: list[bytes]
    pages: I32
    brought: frozenset[bytes] = frozenset()
    theirs: list[Row] = field(default_factory=list)
    done: Callable[[str, float], None] | None = None

    def place_of(self, name: bytes) -> Place:
        """Return where the KV of one page came from. The pages of a request may come from several tiers."""
        if self.req.restored and self.place in (Place.HOST, Place.REUSE):
            return Place.RESTORE
        return Place.STORE if name in self.brought else self.place


class _Glance(NamedTuple):
    """Pages to hash for a question from outside. ``tell`` gets the answer."""

    pages: I32
    tell: Callable[[PagesHashed], None]


class KVDebug:
    """Page hashes of the instance, and their comparison.

    ``windows``: window pages of the pool. ``send`` sends to the worker, in one order with its steps.
    """

    enabled = True

    def __init__(
        self,
        options: SchedulerOptions,
        worker: WorkerReady,
        windows: Windows,
        names: PageNames,
        send: Callable[[HashPages], None],
    ) -> None:
        self._names = names
        self._windows = windows
        self._send = send
        self._groups = worker.layout.groups
        self._is_lossy = options.hicache_host_dtype != "auto"
        self._row_bytes = [HASH_BYTES * group.num_layers * len(group.parts) for group in self._groups]
        self._most = max(1, TABLE_BYTES // (sum(self._row_bytes) + NAMES_BYTES))
        self._table: OrderedDict[bytes, Known] = OrderedDict()
        self._ids = itertools.count(1)
        self._newest = 0
        self._open: dict[int, _Question | _Glance] = {}
        """Unanswered questions, in the order of their numbers."""
        self._planned: list[int] = []
        """Numbers of the questions that wait for the step that is being planned."""
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self.namespaces: OrderedDict[str, None] = OrderedDict()
        """Namespaces of the last requests."""
        self.compared: Counter[Place] = Counter()
        self.mismatches: Counter[Place] = Counter()
        self._last = ""

    # --- questions ---

    def look(
        self, place: Place, req: Req, table: I32, end: int, *, planned: bool, brought: Iterable[bytes] = ()
    ) -> None:
        """Have the worker hash the request's whole pages before token ``end`` that were not hashed since it got its
        memory.

        ``table`` [rows, length]: slots of all rows. ``brought``: names of pages that the store has brought.
        ``planned``: the step that is being planned writes some of them, or copies before it do, so the question is sent
        after that step. Otherwise steps that were sent have written them, and the question is sent at once. Pages
        computed on KV that is not verified are skipped: they are not right by definition.
        """
        hold, size = hold_of(req), self._names.page_size
        first, last = hold.hashed // size, min(end, req.known_len) // size
        if last <= first or not (hold.verified or place is not Place.PREFILL):
            return
        hold.hashed = last * size
        pages = table[hold.row, first * size : last * size : size] // size
        names = self._names.of(req, last * size, first)
        self._ask(_Question(req, place, first, names, pages, frozenset(brought)), planned=planned)

    def landed(
        self, req: Req, hold: KVHold, first: int, pages: I32, theirs: bytes, done: Callable[[str, float], None]
    ) -> None:
        """Have the worker hash ``pages``, which a peer has written for the request, from its page ``first`` on.

        ``hold``: the request's memory. ``theirs``: the sender's hashes, as in ``TransferDone``. ``done`` is called
        later with what is wrong ("" for nothing), and the time.
        """
        last = first + len(pages)
        hold.hashed = max(hold.hashed, last * self._names.page_size)
        size = sum(self._row_bytes)
        # This comes from a peer: hashes of the wrong length are ignored.
        ends = range(size, len(theirs) + 1, size) if size and len(theirs) == size * len(pages) else ()
        rows = [self._split(theirs[end - size : end]) for end in ends]
        names = self._names.of(req, last * self._names.page_size, first)
        self._ask(_Question(req, Place.TRANSFER, first, names, pages, theirs=rows, done=done), planned=False)

    def _split(self, row: bytes) -> Row:
        ends = list(itertools.accumulate(self._row_bytes))
        return tuple(row[end - size : end] for end, size in zip(ends, self._row_bytes, strict=True))

    def hashes_of(self, req: Req, first: int, last: int) -> bytes:
        """Return the remembered hashes of the request's pages ``[first, last)``, packed as in ``TransferDone``.

        Unknown pages have zeros. Return b"" if they do not fit into a message.
        """
        return self.named_hashes(self._names.of(req, last * self._names.page_size, first))

    def named_hashes(self, names: Sequence[bytes]) -> bytes:
        """Return the remembered hashes of the pages of these names, packed as in ``TransferDone``.

        Unknown pages have zeros. Return b"" if they do not fit into a message.
        """
        none = bytes(sum(self._row_bytes))
        if len(none) * len(names) > MAX_HASH_BYTES:
            log.info("the hashes of %d pages do not fit into a message and are not sent", len(names))
            return b""
        known = [self._table.get(name) for name in names]
        return b"".join(none if page is None else b"".join(page.row) for page in known)

    def expect(self, names: Sequence[bytes], hashes: bytes) -> None:
        """Remember the page hashes of a session's snapshot, so that the pages are compared if they come back.

        ``hashes``: as ``named_hashes`` returns them. Hashes that this instance has seen itself take precedence.
        """
        size = sum(self._row_bytes)
        for i, name in enumerate(names[: len(hashes) // size if size else 0]):
            row = hashes[i * size : (i + 1) * size]
            if any(row) and name not in self._table:
                self._remember(name, Known(self._split(row), BEFORE[Place.RESTORE]))

    def glance(self, pages: I32, tell: Callable[[PagesHashed], None]) -> None:
        """Have the worker hash pages, after everything sent before, and ``tell`` its answer. Compare nothing."""
        self._ask(_Glance(pages, tell), planned=False)

    def _ask(self, question: _Question | _Glance, *, planned: bool) -> None:
        if isinstance(question, _Question):
            self.namespaces[question.req.msg.extra_key] = None
            self.namespaces.move_to_end(question.req.msg.extra_key)
            if len(self.namespaces) > MOST_NAMESPACES:
                self.namespaces.popitem(last=False)
        self._newest = next(self._ids)
        self._open[self._newest] = question
        if planned:
            self._planned.append(self._newest)
        else:
            self._tell(self._newest)

    def flush(self) -> None:
        """Send the waiting questions to the worker. Their step and the copies before it must have been sent."""
        for number in self._planned:
            self._tell(number)
        self._planned = []

    def _tell(self, number: int) -> None:
        pages = self._open[number].pages
        # The table as it is now: a window page that a request has left may be another's in the step that was sent.
        packed = [pack_i32(numbers) for numbers in (pages, *self._windows.behind(pages))]
        self._send(HashPages(number, packed))

    # --- pending questions ---

    @property
    def newest(self) -> int:
        """Number of the last question to the worker, answered or not."""
        return self._newest

    def is_past(self, number: int) -> bool:
        """Return whether all questions up to ``number`` are answered, so that the worker reads their pages no more."""
        return next(iter(self._open), number + 1) > number

    def when_past(self, number: int, call: Callable[[], None]) -> bool:
        """Return whether all questions up to ``number`` are answered; if not, ``call`` is called once they are."""
        if self.is_past(number):
            return True
        self._waiting.append((number, call))
        return False

    # --- answers ---

    def on_hashed(self, event: PagesHashed, now: float) -> Iterator[tuple[Req, int]]:
        """Compare the hashes from the worker with those remembered, or pass them on to the caller that asked.

        Yield each request with wrong KV, and the position in tokens from which on it is wrong. The caller condemns it.
        """
        question = self._open.pop(event.id)
        if isinstance(question, _Glance):
            question.tell(event)
        else:
            first_wrong = self._compare(question, event)
            if question.done is not None:
                question.done("" if first_wrong is None else "hashes differ", now)
            elif first_wrong is not None:
                yield question.req, first_wrong * self._names.page_size
        due = [call for number, call in self._waiting if self.is_past(number)]
        self._waiting = [(number, call) for number, call in self._waiting if not self.is_past(number)]
        for call in due:
            call()

    def _compare(self, question: _Question, event: PagesHashed) -> int | None:
        """Compare the pages' hashes with what is known of them, log differences, and remember new hashes.

        Return the number of the first wrong page in the request, or None. Recomputed differently is not wrong.
        """
        wrong: list[str] = []
        first_wrong: int | None = None
        for i, name in enumerate(question.names):
            place, row = question.place_of(name), self._row(event.hashes, i)
            known, differences = self._known(question, i), []
            if known is not None:
                self.compared[place] += 1
                differences = self._differences(row, known.row)
            if known is None or place is Place.PREFILL:
                self._remember(name, Known(row, BEFORE[place]))
            elif place is Place.TRANSFER:
                self._remember(name, known if differences else Known(row, BEFORE[place]))
            else:
                self._table.move_to_end(name)
            if known is not None and differences:
                self.mismatches[place] += len(differences)
                if first_wrong is None and place is not Place.PREFILL:
                    first_wrong = question.first + i
                wrong += [self._line(question.first + i, d, place, known.when) for d in differences]
        if wrong:
            self._report(question.req.rid, wrong, logging.WARNING if first_wrong is None else logging.ERROR)
        return first_wrong

    def _row(self, hashes: Sequence[bytes], index: int) -> Row:
        return tuple(
            packed[index * size : (index + 1) * size] for packed, size in zip(hashes, self._row_bytes, strict=True)
        )

    def _known(self, question: _Question, index: int) -> Known | None:
        """Return the sender's or remembered hashes that page ``index`` is compared with; None if it is not compared."""
        if question.place is Place.TRANSFER:
            theirs = question.theirs[index] if question.theirs else ()
            return Known(theirs, AT_SENDER) if any(any(part) for part in theirs) else None
        if question.place is Place.HOST and self._is_lossy:
            return None
        return self._table.get(question.names[index])

    def _remember(self, name: bytes, known: Known) -> None:
        self._table[name] = known
        self._table.move_to_end(name)
        if len(self._table) > self._most:
            self._table.popitem(last=False)

    def _differences(self, now: Row, before: Row) -> list[Difference]:
        found = []
        for group, a, b in zip(self._groups, now, before, strict=True):
            # Zeros: the page of the windowed layers was not there, then or now.
            if a != b and any(a) and any(b):
                found += _between(group, a, b)
        return found

    # --- reports ---

    def _line(self, page: int, found: Difference, place: Place, when: str) -> str:
        size = self._names.page_size
        return (
            f"page {page} (tokens {page * size} to {(page + 1) * size - 1}), layer {found.layer}, {found.part}: "
            f"{found.now:016x} {NOW[place]}, {found.before:016x} {when}"
        )

    def _report(self, rid: str, wrong: list[str], level: int) -> None:
        for line in wrong[:MOST_LINES]:
            log.log(level, "KV differs: %s", line, extra={"rid": rid})
        if len(wrong) > MOST_LINES:
            log.log(level, "KV differs in %d more places", len(wrong) - MOST_LINES, extra={"rid": rid})
        self._last = f"{rid}: {wrong[0]}"

    @property
    def problem(self) -> str:
        """Problem that an operator should look at, "" for none."""
        count = sum(self.mismatches.values()) - self.mismatches[Place.PREFILL]
        return f"--kv-debug has found {count} hashes of KV that differ; the last request: {self._last}" if count else ""

    def metrics(self) -> list[Family]:
        """Return the metrics of the comparisons: pages compared and hashes that differed."""
        return read(METRICS, self)

    def info(self) -> dict[str, Any]:
        """Return the ``kv_debug`` part of ``/server_info``, JSON-ready: counts of pages, and the last difference."""
        return {
            "remembered_pages": len(self._table),
            "compared_pages": _by_place(self.compared),
            "mismatches": _by_place(self.mismatches),
            "last": self._last,
        }


def _between(group: KVGroup, now: bytes, before: bytes) -> list[Difference]:
    a, b = np.frombuffer(now, dtype="<u8"), np.frombuffer(before, dtype="<u8")
    parts = group.parts
    return [
        Difference(group.layers[at // len(parts)], parts[at % len(parts)], int(a[at]), int(b[at]))
        for at in (a != b).nonzero()[0].tolist()
    ]


class NoDebug:
    """The ``KVDebug`` of an instance without ``--kv-debug``: nothing is hashed or compared."""

    enabled = False
    namespaces: tuple[str, ...] = ()
    newest = 0
    problem = ""

    def look(
        self, place: Place, req: Req, table: I32, end: int, *, planned: bool, brought: Iterable[bytes] = ()
    ) -> None:
        """Do nothing: no pages are hashed."""

    def landed(
        self, req: Req, hold: KVHold, first: int, pages: I32, theirs: bytes, done: Callable[[str, float], None]
    ) -> None:
        """Raise ``AssertionError``: without ``--kv-debug`` only the worker's transfer engine checks received pages."""
        raise AssertionError(f"hashes of {req.rid} were to be compared without --kv-debug")

    def hashes_of(self, req: Req, first: int, last: int) -> bytes:
        """Return b"": no hashes are remembered."""
        return b""

    def named_hashes(self, names: Sequence[bytes]) -> bytes:
        """Return b"": no hashes are remembered."""
        return b""

    def expect(self, names: Sequence[bytes], hashes: bytes) -> None:
        """Do nothing: pages that come back are not compared."""

    def glance(self, pages: I32, tell: Callable[[PagesHashed], None]) -> None:
        """Raise ``AssertionError``: questions for hashes are refused before."""
        raise AssertionError("pages were to be hashed without --kv-debug")

    def flush(self) -> None:
        """Do nothing: no question waits for a step."""

    def is_past(self, number: int) -> bool:
        """Return True: the worker hashes no pages, so it reads none for that."""
        return True

    def when_past(self, number: int, call: Callable[[], None]) -> bool:
        """Return True, and never call ``call``: the worker hashes no pages."""
        return True

    def on_hashed(self, event: PagesHashed, now: float) -> Iterator[tuple[Req, int]]:
        """Raise ``AssertionError``: the worker was asked for no hashes."""
        raise AssertionError(f"the worker sent hashes {event.id} without --kv-debug")

    def metrics(self) -> list[Family]:
        """Return []: nothing is compared."""
        return []

    def info(self) -> None:
        """Return None: ``/server_info`` shows that ``--kv-debug`` is off."""


Debug = KVDebug | NoDebug


def make_kv_debug(options: SchedulerOptions, worker: WorkerReady, windows: Windows, outbox: Outbox) -> Debug:
    """Make the hash checks of ``--kv-debug``, or checks that do nothing without it."""
    if not options.kv_debug:
        return NoDebug()
    return KVDebug(options, worker, windows, make_page_names(options, worker), outbox.to_worker)


def _by_place(counts: Counter[Place]) -> Labelled:
    return {place.value: counts[place] for place in Place}


METRICS: Metrics[KVDebug] = (
    counter(
        "pdserve_kv_debug_compared_pages_total",
        "Pages with compared hashes, by the place of the comparison.",
        lambda debug: _by_place(debug.compared),
        "place",
        note="Places: `prefill`, `transfer`, `host`, `store`, `restore`, `reuse`. With [`--kv-debug`](debugging.md).",
    ),
    counter(
        "pdserve_kv_debug_mismatches_total",
        "Hashes of a layer's keys or values in a page that were not what they had been.",
        lambda debug: _by_place(debug.mismatches),
        "place",
        note="Places: `prefill`, `transfer`, `host`, `store`, `restore`, `reuse`. With [`--kv-debug`](debugging.md).",
    ),
)
