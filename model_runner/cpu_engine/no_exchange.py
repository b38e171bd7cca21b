"""The null object of the exchange between ranks: for a C++ engine alone, or for a torch model."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.ranks import RankPlace


class NoExchange:
    """The exchange of a rank that has no sums in common with others. See ``NativeRanks``."""

    fd: int | None = None
    handle: int | None = None
    most_tokens: int | None = None


class NoRoom:
    """No room for an exchange. See ``ExchangeRoom``."""

    def make(self, place: RankPlace, fd: int | None = None, carry: Callable[..., None] | None = None) -> NoExchange:
        """Return an exchange for a rank that has no others: it shares no memory. The arguments are ignored."""
        return NoExchange()


NO_ROOM = NoRoom()
"""Room of a torch model, or of the only rank."""
