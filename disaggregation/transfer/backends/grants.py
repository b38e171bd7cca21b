"""Write permissions: which hand-over may write which pages of this instance's pool."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....messages.base import I32

NOBODY = 0


class Writer(NamedTuple):
    """Identity of a hand-over that writes. Each attempt of a peer counts as another writer."""

    peer: str
    room: int
    attempt: int


class _Grant(NamedTuple):
    number: int
    pages: I32


class Grants:
    """Grants of a pool's pages. A page has at most one writer."""

    def __init__(self, num_pages: int) -> None:
        self._writers: npt.NDArray[np.int64] = np.zeros(num_pages, dtype=np.int64)
        self._grants: dict[Writer, _Grant] = {}
        self._last = NOBODY

    def grant(self, writer: Writer, pages: I32) -> None:
        """Allow ``writer`` to write ``pages`` besides what it may write already. Other writers may not write them any
        more.
        """
        known = self._grants.get(writer)
        if known is None:
            self._last += 1
            known = _Grant(self._last, pages)
        else:
            known = _Grant(known.number, np.concatenate((known.pages, pages)))
        self._grants[writer] = known
        self._writers[pages] = known.number

    def revoke(self, writer: Writer) -> I32:
        """Withdraw all grants of ``writer``, and return the pages that it could write until now.

        Pages that were granted to another writer meanwhile are left out.
        """
        number, pages = self._grants.pop(writer, _Grant(NOBODY, np.empty(0, np.int32)))
        mine: I32 = pages[self._writers[pages] == number]
        self._writers[mine] = NOBODY
        return mine

    def covers(self, writer: Writer, pages: npt.NDArray[np.integer]) -> bool:
        """Return whether ``writer`` may write all of ``pages``. The pages must exist in the pool."""
        grant = self._grants.get(writer)
        return grant is not None and bool((self._writers[pages] == grant.number).all())
