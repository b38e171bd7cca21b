"""Compiles grammars for the scheduler before their requests start, and drops them when it says so.

The scheduler decides which grammars are kept, because it knows the requests that will need them again.
"""

from __future__ import annotations

from collections.abc import Callable

from ...messages.channel import SendsMessages
from ...messages.grammar import ForgetGrammar, Grammar, GrammarPrepared, PrepareGrammar
from .matchers import MakesMatchers


class GrammarPreparation:
    """Answers ``PrepareGrammar`` from the compiler's thread."""

    def __init__(self, matchers: MakesMatchers, make_sender: Callable[[], SendsMessages]) -> None:
        """Compile with ``matchers``, and answer by a channel to the scheduler, which ``make_sender`` makes.

        Only the compiler's thread calls ``make_sender`` and uses the channel.
        """
        self._matchers = matchers
        self._make_sender = make_sender
        self._sender: SendsMessages | None = None
        self._kept: dict[int, Grammar] = {}
        """Grammars by number, until they are to be forgotten."""

    def obey(self, command: PrepareGrammar | ForgetGrammar) -> None:
        """Queue a grammar for compilation, or drop a compiled one; never wait.

        The compiler's thread sends ``GrammarPrepared`` afterwards.
        """
        if isinstance(command, ForgetGrammar):
            self._matchers.forget(self._kept.pop(command.number))
            return
        self._kept[command.number] = command.grammar
        self._matchers.prepare(command.grammar, lambda nbytes: self._tell(command.number, nbytes))

    def _tell(self, number: int, nbytes: int) -> None:
        if self._sender is None:
            self._sender = self._make_sender()
        self._sender.send(GrammarPrepared(number, nbytes))
