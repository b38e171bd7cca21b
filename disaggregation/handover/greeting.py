"""What two instances say of themselves first, and whether they can exchange KV."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from ...messages.handover import PROTOCOL_VERSION, Hello
from ...messages.worker import WorkerReady
from ..transfer.page_order import can_exchange


def digest(metadata: bytes) -> str:
    """Tells nothing of ``metadata`` to who doesn't have it."""
    return sha256(metadata).hexdigest()


class Greeting(NamedTuple):
    """This instance, as others come to know it."""

    epoch: str
    worker: WorkerReady
    backend: str

    def hello(self, peer: str, link: int, *, dialling: bool) -> Hello:
        """To ``peer``, by the link of that number."""
        return Hello(
            epoch=peer,
            sender=self.epoch,
            link=link,
            version=PROTOCOL_VERSION,
            fingerprint=self.worker.fingerprint,
            layout=self.worker.layout,
            backend=self.backend,
            metadata=self.worker.backend_metadata if dialling else b"",
        )

    def problem(self, hello: Hello) -> str | None:
        """Why its author and this instance can't exchange pages, None where they can."""
        worker = self.worker
        if hello.version != PROTOCOL_VERSION:
            return (
                f"protocol version {hello.version} there, {PROTOCOL_VERSION} here; run the same pdserve on both sides"
            )
        if hello.epoch != self.epoch:
            return "the registration is that of an earlier start of this instance; ask for it again"
        if hello.sender == self.epoch:
            return "this instance has that epoch itself"
        if hello.backend != self.backend:
            return f"transfer backend {hello.backend} there, {self.backend} here; start both with the same one"
        if hello.fingerprint != worker.fingerprint:
            return f"other model weights there ({hello.fingerprint}) than here ({worker.fingerprint})"
        if not can_exchange(hello.layout, worker.layout):
            flags = "--page-size, --dtype and --kv-cache-dtype"
            return f"KV layout {hello.layout} there, {worker.layout} here; use equal {flags}"
        return None
