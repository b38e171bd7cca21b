"""Waiting requests with a grammar that the worker still compiles.

A large schema takes hundreds of milliseconds, and steps must not wait for it. So a request is parked as it is queued,
and tried when its grammar is compiled. One with a peer's KV is not parked: its peer has to compile the same grammar.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ..messages.grammar import Grammar, GrammarPrepared, PrepareGrammar
from .handlers import receives
from .req import Req
from .waiting import WaitingQueue

READY = 48
"""Grammars that are known to be compiled; fewer than the worker remembers."""


class PreparedGrammars:
    """Owner of the requests that are parked for their grammar."""

    def __init__(self, waiting: WaitingQueue, send: Callable[[PrepareGrammar], None]) -> None:
        self._waiting = waiting
        self._send = send
        self._ready: OrderedDict[Grammar, None] = OrderedDict()
        self._asked: dict[int, Grammar] = {}
        """Grammars that are being compiled, by number."""
        self._parked: dict[Grammar, list[Req]] = {}
        """Requests by a grammar that is being compiled."""
        self._number = 0

    def is_ready(self, grammar: Grammar | None) -> bool:
        """Return whether a request with ``grammar`` can start. If not, the worker compiles it."""
        if grammar is None:
            return True
        if grammar in self._ready:
            self._ready.move_to_end(grammar)
            return True
        if grammar not in self._parked:
            self._number += 1
            self._asked[self._number] = grammar
            self._parked[grammar] = []
            self._send(PrepareGrammar(self._number, grammar))
        return False

    def queued(self, req: Req) -> None:
        """Park a request that has just been queued until its grammar is compiled."""
        grammar = req.msg.sampling.grammar
        if grammar is not None and not self.is_ready(grammar):
            self._waiting.park(req)
            self._parked[grammar].append(req)

    @receives(GrammarPrepared)
    def on_prepared(self, event: GrammarPrepared, now: float) -> None:
        """Try the requests with the grammar that is compiled."""
        grammar = self._asked.pop(event.number)
        self._ready[grammar] = None
        if len(self._ready) > READY:
            self._ready.popitem(last=False)
        for req in self._parked.pop(grammar):
            self._waiting.give_back(req)
