"""Compiles grammars for the scheduler before their requests start."""

from __future__ import annotations

from collections.abc import Callable

from ...messages.channel import SendsMessages
from ...messages.grammar import GrammarPrepared, PrepareGrammar
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

    def obey(self, command: PrepareGrammar) -> None:
        """Queue the grammar for compilation; never wait. The compiler's thread sends ``GrammarPrepared`` afterwards."""
        self._matchers.prepare(command.grammar, lambda: self._tell(command.number))

    def _tell(self, number: int) -> None:
        if self._sender is None:
            self._sender = self._make_sender()
        self._sender.send(GrammarPrepared(number))
