"""The second tier's memory: whole KV pages outside the pool, copied to and from it between steps.

On a CPU the pool is host memory already. What this adds is a file's: mapped, and without a name from the beginning, so
that nothing is left behind whatever is killed. The system keeps as much of it in memory as it has no better use for.
All of its blocks are reserved at the start, since a disk that is full later would end the process (SIGBUS).
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...messages.base import I32
from ...messages.tiers import PageCopy
from ..errors import NotEnoughMemory
from .page_codec import PageCodec

Bytes = npt.NDArray[np.uint8]
COPIES = tuple(PageCopy)


class HostPool:
    """``num_pages`` pages in a file of ``folder`` (None: where the system keeps temporary ones). A page has a part for
    each group of the layout, one behind the other, as its one of ``codecs`` makes it.
    """

    def __init__(self, num_pages: int, codecs: Sequence[PageCodec], folder: Path | None) -> None:
        self.num_pages, self._codecs = num_pages, codecs
        ends = list(itertools.accumulate((codec.nbytes for codec in codecs), initial=0))
        self.page_bytes = ends[-1]
        self._parts = [slice(*part) for part in itertools.pairwise(ends)]
        self._memory = _map_file(num_pages * self.page_bytes, folder)
        self._pages: Bytes = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_pages, self.page_bytes)

    def page(self, page: int) -> memoryview:
        """Return the bytes of one page in this tier, as a writable view."""
        return memoryview(self._memory)[page * self.page_bytes : (page + 1) * self.page_bytes]

    def copy(self, pools: Sequence[Bytes], copies: I32) -> None:
        """Copy pages between the KV pool and this pool, one after another, converting them by the group's codec.

        ``copies`` [N, 3]: a ``PageCopy``'s number (group and direction), a page of the KV pool, and a page here.
        ``pools``: bytes [pages, page_bytes] of each group's KV pool.
        """
        for number, pool_page, host_page in copies.tolist():
            what = COPIES[number]
            page, kept = pools[what.group][pool_page], self._pages[host_page, self._parts[what.group]]
            if what.to_pool:
                self._codecs[what.group].decode(kept, page)
            else:
                self._codecs[what.group].encode(page, kept)


def _map_file(nbytes: int, folder: Path | None) -> mmap.mmap:
    """Reserve ``nbytes`` on disk in an unnamed file in ``folder`` (None: the system's temporary folder), and map it.

    Raises ``NotEnoughMemory``.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="pdserve-hicache-") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as e:
        where = folder or Path(tempfile.gettempdir())
        raise NotEnoughMemory(
            f"no file of {nbytes / 2**30:.2f} GiB in {where} for the second KV tier: {e.strerror or e}; set a smaller "
            "--hicache-size, or another --hicache-folder"
        ) from e
