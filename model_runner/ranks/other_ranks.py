"""The other tensor-parallel ranks of a host, as the worker that leads them sees them."""

from __future__ import annotations

from typing import Protocol

from ...messages.memory import MemoryCommand, TrimPool
from ...messages.profiling import ProfileCommand


class OtherRanks(Protocol):
    """The ranks of this host that one leads: they do what it does."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the other ranks on this host, among all ranks of the instance."""
        ...

    def tell(self, command: MemoryCommand | TrimPool | ProfileCommand) -> None:
        """Send ``command`` to the ranks, which execute it after the steps sent before. ``answers`` waits for them."""
        ...

    def answers(self) -> list[str]:
        """Wait until every rank has answered the last command; return a line of text for each that failed."""
        ...


class NoOtherRanks:
    """The other ranks of a worker that computes the whole model."""

    numbers: tuple[int, ...] = ()

    def tell(self, command: MemoryCommand | TrimPool | ProfileCommand) -> None:
        """Do nothing: there are no other ranks."""

    def answers(self) -> list[str]:
        """Return an empty list at once: there are no other ranks to fail."""
        return []
