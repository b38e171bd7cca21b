"""The other tensor-parallel ranks of a host, as the worker that leads them sees them."""

from __future__ import annotations

from typing import Protocol

from ...messages.memory import MemoryCommand, TrimPool
from ...messages.profiling import ProfileCommand


class OtherRanks(Protocol):
    """The ranks of this host that one leads: they do what it does."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of these ranks."""
        ...

    def tell(self, command: MemoryCommand | TrimPool | ProfileCommand) -> None:
        """Have the ranks execute ``command``, after the steps that they have got. ``answers`` waits for them."""
        ...

    def answers(self) -> list[str]:
        """Wait for the ranks; return why some could not obey. Empty: all have done it."""
        ...


class NoOtherRanks:
    """The other ranks of a worker that computes the whole model."""

    numbers: tuple[int, ...] = ()

    def tell(self, command: MemoryCommand | TrimPool | ProfileCommand) -> None:
        """Do nothing."""

    def answers(self) -> list[str]:
        """Return no problem."""
        return []
