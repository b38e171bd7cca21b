"""Compiles grammars for the scheduler before their requests start."""

from __future__ import annotations

from collections.abc import Callable

from ...messages.channel import SendsMessages
from ...messages.grammar import GrammarPrepared, PrepareGrammar
from .matchers import MakesMatchers


class GrammarPreparation:
    """Answers ``PrepareGrammar`` from the compiler's thread."""

    def __init__(self, matchers: MakesMatchers, make_sender: Callable[[], SendsMessages]) -> None:
        """Compile with ``matchers``. ``make_sender`` returns a channel to the scheduler, used by its caller alone."""
        self._matchers = matchers
        self._make_sender = make_sender
        self._sender: SendsMessages | None = None

    def obey(self, command: PrepareGrammar) -> None:
        """Have the grammar compiled. Does not wait."""
        self._matchers.prepare(command.grammar, lambda: self._tell(command.number))

    def _tell(self, number: int) -> None:
        if self._sender is None:
            self._sender = self._make_sender()
        self._sender.send(GrammarPrepared(number))
