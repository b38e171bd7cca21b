"""Responses that are kept, by their owner and id: in memory, and as files if there is a folder.

Life of a response: put when it has ended ─▶ read at any time ─▶ dropped: deleted by its owner, or the oldest when there
is no room. An owner is an API key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec

MAX_PER_OWNER = 4096
"""Maximum number of responses of one owner."""
MAX_RESPONSES = 1 << 16
"""Maximum number of responses of all owners."""
OVERHEAD_BYTES = 1024
"""Estimate of what a response takes in memory beside its texts."""


class KeptResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A response and the conversation that led to it."""

    owner: str
    id: str
    response: bytes
    """The response as JSON."""
    items: bytes
    """Items of the conversation before its output, JSON without the brackets of a list."""

    @property
    def nbytes(self) -> int:
        """Estimate of its size in memory, in bytes."""
        return len(self.response) + len(self.items) + OVERHEAD_BYTES


class _ResponseOutput(msgspec.Struct):
    """The part of a response that continues the conversation."""

    output: list[msgspec.Raw] = []


def output_of(response: bytes) -> list[msgspec.Raw]:
    """Return the items of a response's output, as JSON. ``response``: one that this server has written."""
    return msgspec.json.decode(response, type=_ResponseOutput).output


class Files(Protocol):
    """Where responses are kept across restarts."""

    def load(self) -> Iterable[KeptResponse]:
        """Return the responses that were kept before, the oldest first."""

    def write(self, kept: KeptResponse) -> None:
        """Keep a response, soon. Never raises."""

    def remove(self, kept: KeptResponse) -> None:
        """Remove a response, after what was written before. Never raises."""

    def close(self) -> None:
        """Wait until all is written."""


class NoFiles:
    """Keeps nothing."""

    def load(self) -> Iterable[KeptResponse]:
        """Return no responses."""
        return ()

    def write(self, kept: KeptResponse) -> None:
        """Do nothing."""

    def remove(self, kept: KeptResponse) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class StoreLimits(NamedTuple):
    """Limits on kept responses, in bytes: of all of them (``total``), and of one owner's (``quota``)."""

    total: int
    quota: int


class _Owned:
    """Responses of one owner, the oldest first."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, KeptResponse] = OrderedDict()
        self.nbytes = 0


class ResponseStore:
    """The responses that one server keeps."""

    def __init__(self, limits: StoreLimits, files: Files) -> None:
        self._limits = limits
        self._files = files
        self._owners: dict[str, _Owned] = {}
        self.nbytes = 0
        """Size of all responses, in bytes."""
        self._held: Counter[str] = Counter()
        """Bytes of running requests' inputs, by owner."""
        self.count = 0
        for kept in files.load():
            (self._add if self._fits(kept) else files.remove)(kept)

    @property
    def keeps(self) -> bool:
        """Whether the store may keep responses: its limit is not 0."""
        return self._limits.total > 0

    def get(self, owner: str, response_id: str) -> KeptResponse | None:
        """Return a response of ``owner``; None if it is not kept."""
        owned = self._owners.get(owner)
        return owned.by_id.get(response_id) if owned is not None else None

    def put(self, kept: KeptResponse) -> bool:
        """Keep a response in place of an older one with its id. Return whether there is room for it at all.

        The owner's oldest ones make room, and the oldest of the owner with the most bytes.
        """
        self.delete(kept.owner, kept.id)
        if not self._fits(kept):
            return False
        self._add(kept)
        self._files.write(kept)
        return True

    def delete(self, owner: str, response_id: str) -> bool:
        """Drop a response of ``owner``. Return whether it was kept."""
        kept = self.get(owner, response_id)
        if kept is None:
            return False
        self._drop(kept)
        return True

    def has_room(self, owner: str, nbytes: int) -> bool:
        """Return whether the input of a running request can be held until its response is put.

        Running requests have limits of their own, as large as those of kept responses.
        """
        limits = self._limits
        held = self._held[owner] + nbytes + OVERHEAD_BYTES
        return held <= limits.quota and self._held.total() + nbytes + OVERHEAD_BYTES <= limits.total

    @contextmanager
    def hold(self, owner: str, nbytes: int) -> Iterator[None]:
        """Count the input of a running request of ``owner`` until the block ends."""
        self._held[owner] += nbytes
        try:
            yield
        finally:
            self._held[owner] -= nbytes
            if not self._held[owner]:
                del self._held[owner]

    def close(self) -> None:
        """Wait until all is written to files. Nothing may be put afterwards."""
        self._files.close()

    def _fits(self, kept: KeptResponse) -> bool:
        """Return whether there is room for a response if all others are dropped."""
        return kept.nbytes <= min(self._limits)

    def _add(self, kept: KeptResponse) -> None:
        owned = self._owners.setdefault(kept.owner, _Owned())
        owned.by_id[kept.id] = kept
        self._count(owned, kept.nbytes, 1)
        while owned.nbytes > self._limits.quota or len(owned.by_id) > MAX_PER_OWNER:
            self._drop(next(iter(owned.by_id.values())))
        while self.nbytes > self._limits.total or self.count > MAX_RESPONSES:
            largest = max(self._owners.values(), key=lambda one: one.nbytes)
            self._drop(next(iter(largest.by_id.values())))

    def _drop(self, kept: KeptResponse) -> None:
        owned = self._owners[kept.owner]
        del owned.by_id[kept.id]
        self._count(owned, -kept.nbytes, -1)
        if not owned.by_id:
            del self._owners[kept.owner]
        self._files.remove(kept)

    def _count(self, owned: _Owned, nbytes: int, number: int) -> None:
        owned.nbytes += nbytes
        self.nbytes += nbytes
        self.count += number
