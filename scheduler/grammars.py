"""Waiting requests with a grammar that the worker still compiles.

A large schema takes hundreds of milliseconds, and steps must not wait for it. So a request is parked as it is queued,
and tried when its grammar is compiled. One with a peer's KV is not parked: its peer has to compile the same grammar.

A grammar is wanted → asked for → compiled → forgotten. The worker keeps it until it is told to forget it, and would
compile a forgotten one in its step. So none of a living request is forgotten, as it may be retracted and start again.
The others are forgotten, the longest unused first, while there are more than ``READY`` grammars or all take more than
``MAX_UNUSED_BYTES``. Few are asked for at a time, API keys take turns, and none is asked for while those of living
requests fill the limits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..messages.grammar import ForgetGrammar, Grammar, GrammarPrepared, PrepareGrammar
from ..messages.requests import GenerateReq
from ..runtime.key_queue import KeyQueue
from .handlers import receives
from .req import Req
from .waiting import WaitingQueue

AT_ONCE = 2
"""Grammars that the worker is asked for at a time: one is compiled, and the next one is there."""
READY = 48
"""Compiled grammars that unused ones add up to, or that waiting requests are to start with."""
MAX_BYTES = 1 << 28
"""Memory of compiled grammars, as estimated, beyond which no more are compiled. Those being compiled may exceed it."""
MAX_UNUSED_BYTES = 1 << 26
"""Memory of all compiled grammars, as estimated, beyond which those of no living request are forgotten."""


class Compiled(NamedTuple):
    """A grammar that the worker has compiled."""

    number: int
    nbytes: int


class PreparedGrammars:
    """Owner of the requests that are parked for their grammar."""

    def __init__(
        self,
        living: Mapping[str, Req],
        waiting: WaitingQueue,
        send: Callable[[PrepareGrammar | ForgetGrammar], None],
    ) -> None:
        self._living = living
        self._waiting = waiting
        self._send = send
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        """Grammars that the worker keeps, the longest unused first."""
        self._wanted: KeyQueue[Grammar] = KeyQueue()
        """Grammars that the worker has not been asked for."""
        self._asked: dict[int, Grammar] = {}
        """Grammars that are being compiled, by number."""
        self._parked: dict[Grammar, list[Req]] = {}
        """Requests by a grammar that is wanted or being compiled."""
        self._number = 0

    def is_ready(self, msg: GenerateReq) -> bool:
        """Return whether a request can start: it has no grammar, or the worker has compiled its grammar.

        If not, have the grammar compiled soon, unless that was asked for before.
        """
        grammar = msg.sampling.grammar
        if grammar is None:
            return True
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return True
        if grammar not in self._parked:
            self._parked[grammar] = []
            self._wanted.append(msg.key_name, grammar)
            self.ask()
        return False

    def queued(self, req: Req) -> None:
        """Keep a request that was just queued from being tried until its grammar is compiled, if that is not the case
        yet.
        """
        if not self.is_ready(req.msg):
            self._waiting.park(req)
            grammar = req.msg.sampling.grammar
            assert grammar is not None, "a request without a grammar is ready"
            self._parked[grammar].append(req)

    def ask(self) -> None:
        """Ask the worker to compile the next wanted grammars, at most ``AT_ONCE`` at a time.

        Ask for none that would make it forget a grammar with which a waiting request is to start.
        """
        while len(self._asked) < AT_ONCE and self._wanted and self._has_room():
            self._number += 1
            grammar = self._asked[self._number] = self._wanted.pop()
            self._send(PrepareGrammar(self._number, grammar))

    def _has_room(self) -> bool:
        """Return whether one more grammar may be compiled now.

        It may not if those of living requests fill ``MAX_BYTES`` in the worker. Nor may it if waiting requests have
        ``READY`` compiled ones to start with.
        """
        used = self._used()
        if sum(one.nbytes for grammar, one in self._compiled.items() if grammar in used) >= MAX_BYTES:
            return False
        needed: set[Grammar] = set()
        for req in self._waiting.values():
            grammar = req.msg.sampling.grammar
            if grammar is not None and grammar not in self._parked:
                needed.add(grammar)
                if len(needed) == READY:
                    return False
        return True

    def _used(self) -> set[Grammar | None]:
        return {req.msg.sampling.grammar for req in self._living.values()}

    def _forget(self) -> None:
        """Have the worker forget compiled grammars that no living request has, least recently used first.

        Stop when at most ``READY`` grammars are left, and ``MAX_BYTES`` are not exceeded.
        """
        used, nbytes = self._used(), sum(one.nbytes for one in self._compiled.values())
        for grammar in [grammar for grammar in self._compiled if grammar not in used]:
            if len(self._compiled) <= READY and nbytes <= MAX_UNUSED_BYTES:
                return
            forgotten = self._compiled.pop(grammar)
            nbytes -= forgotten.nbytes
            self._send(ForgetGrammar(forgotten.number))

    @receives(GrammarPrepared)
    def on_prepared(self, event: GrammarPrepared, now: float) -> None:
        """Let the requests that waited for the compiled grammar compete for memory again, and ask for the next
        grammars.
        """
        grammar = self._asked.pop(event.number)
        self._compiled[grammar] = Compiled(event.number, event.nbytes)
        self._forget()
        for req in self._parked.pop(grammar):
            self._waiting.give_back(req)
        self.ask()
