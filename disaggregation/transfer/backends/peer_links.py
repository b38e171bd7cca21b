"""The links with each peer of a backend, and the epochs that may not open one."""

from __future__ import annotations

from dataclasses import dataclass

from .link import IncomingLink, OutgoingLink

MAX_FENCED = 1 << 16
"""Maximum number of remembered epochs with links that went down. The oldest are forgotten, long after any use."""


@dataclass(eq=False)
class PeerLinks:
    """The links with one epoch."""

    outgoing: OutgoingLink | None = None
    incoming: IncomingLink | None = None
    reason: str | None = None
    """Why the links are going down. None before that."""
    admit_next: bool = False
    """Whether to admit the peer after ``LinkDown``."""
    connect_next: bytes | None = None
    """Metadata for connecting to the peer after ``LinkDown``. None: don't connect."""
    next_deadline: float | None = None
    """Latest time at which the ``LinkDown`` must come before ``admit_next`` and ``connect_next`` fail."""

    @property
    def has_next(self) -> bool:
        """Whether another link is to begin after the ``LinkDown``."""
        return self.admit_next or self.connect_next is not None

    def admit_later(self, deadline: float) -> None:
        """Have the peer admitted after its ``LinkDown``, if that comes until ``deadline``."""
        self.admit_next, self.next_deadline = True, deadline

    def connect_later(self, metadata: bytes, deadline: float) -> None:
        """Have the peer connected to, with ``metadata``, after its ``LinkDown``, if that comes until ``deadline``."""
        self.connect_next, self.next_deadline = metadata, deadline

    def drop_next(self) -> None:
        """Have nothing done after the ``LinkDown``: undo ``admit_later`` and ``connect_later``."""
        self.admit_next, self.connect_next, self.next_deadline = False, None, None


class FencedEpochs:
    """The last epochs with links that went down. Each is refused until it is admitted again."""

    def __init__(self) -> None:
        self._epochs: dict[str, None] = {}

    def __contains__(self, epoch: str) -> bool:
        return epoch in self._epochs

    def add(self, epoch: str) -> None:
        """Refuse links of an epoch from now on. Beyond ``MAX_FENCED`` epochs, the oldest is forgotten."""
        self._epochs[epoch] = None
        if len(self._epochs) > MAX_FENCED:
            del self._epochs[next(iter(self._epochs))]

    def discard(self, epoch: str) -> None:
        """Allow links of an epoch again. Unknown epochs are ignored."""
        self._epochs.pop(epoch, None)
