"""The request table: request row × position → slot.

Life of a row: free → ``alloc`` → its holder writes ``table[row, :kv_len]`` → ``free`` → free. A freed row is not wiped:
only positions below its holder's ``kv_len`` mean anything.
"""

from __future__ import annotations

import numpy as np

from ..messages.base import I32
from .errors import DoubleFree, InvalidFree


class ReqToTokenPool:
    """``table`` [max_reqs, context_len] int32; its memory is committed as rows are first written."""

    def __init__(self, max_reqs: int, context_len: int) -> None:
        if max_reqs < 1 or context_len < 1:
            raise ValueError(f"a request table needs rows and positions, not {max_reqs} × {context_len}")
        self.max_reqs = max_reqs
        self.context_len = context_len
        self.table: I32 = np.zeros((max_reqs, context_len), dtype=np.int32)
        self._free = list(range(max_reqs - 1, -1, -1))
        self._in_use = [False] * max_reqs

    def available_size(self) -> int:
        """Return the number of free rows."""
        return len(self._free)

    def alloc(self) -> int | None:
        """Take a row (the one freed last); return None if all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._in_use[row] = True
        return row

    def free(self, row: int) -> None:
        """Free ``row``. Raises ``DoubleFree`` if it is free, and ``InvalidFree`` if there is no such row."""
        if not 0 <= row < self.max_reqs:
            raise InvalidFree(f"there is no row {row} in a table of {self.max_reqs}")
        if not self._in_use[row]:
            raise DoubleFree(f"row {row} is free already")
        self._in_use[row] = False
        self._free.append(row)

    def rows_in_use(self) -> set[int]:
        """Return the numbers of the rows that are taken."""
        return {row for row, in_use in enumerate(self._in_use) if in_use}
