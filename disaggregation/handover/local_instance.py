"""The Hello of an instance, and the check whether two instances can exchange KV."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from ...mem_cache.kv_pages.page_order import can_exchange
from ...messages.handover import PROTOCOL_VERSION, Hello
from ...messages.worker import KVGroup, KVLayout, WorkerReady


def digest(metadata: bytes) -> str:
    """Return the SHA-256 of ``metadata`` in hexadecimal, which identifies it without revealing it."""
    return sha256(metadata).hexdigest()


class LocalInstance(NamedTuple):
    """Description of this instance for its peers."""

    epoch: str
    worker: WorkerReady
    backend: str

    def hello(self, peer: str, link: int, *, dialling: bool) -> Hello:
        """Make the Hello to the instance with the epoch ``peer``, for the link with number ``link``.

        It carries the transfer backend's metadata only if this instance dials.
        """
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
        """Return why the sender of ``hello`` and this instance can't exchange pages, or None if they can."""
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
            return f"{self._two(hello, hello.backend, self.backend)} differ in their transfer backend; use the same one"
        if hello.fingerprint != worker.fingerprint:
            return (
                f"{self._two(hello, hello.fingerprint, worker.fingerprint)} have other weights; "
                "use equal --model-path, --dtype, --quantization and --quantized-activations"
            )
        if not can_exchange(hello.layout, worker.layout):
            flags = "--page-size, --dtype and --kv-cache-dtype, and one file of channels where there are any"
            unlike = self._two(hello, *_unlike(hello.layout, worker.layout))
            if len(hello.layout.groups) != len(worker.layout.groups):
                return (
                    f"{unlike} lay out their KV in different ways: only one of them keeps what lies behind windows, as "
                    "it does with --tp-size and with --chunked-prefill-size -1; use one of these on both, or neither"
                )
            return f"{unlike} lay out their KV in different ways; use equal {flags}"
        return None

    def _two(self, hello: Hello, theirs: str, ours: str) -> str:
        """Return a text that names both instances with their values, because clients of either may read the message."""
        return f"instances {hello.sender} ({theirs}) and {self.epoch} ({ours})"


def _unlike(theirs: KVLayout, ours: KVLayout) -> tuple[str, str]:
    """Return two texts for an error message: the fields that differ, with the values of ``theirs``, and of ``ours``.

    If the layouts differ in their number of page groups, the texts name only these numbers.
    """
    if len(theirs.groups) != len(ours.groups):
        return f"{len(theirs.groups)} groups of pages", f"{len(ours.groups)} groups of pages"
    values = [("page_size", theirs.page_size, ours.page_size)]
    for one, other in zip(theirs.groups, ours.groups, strict=True):
        values += [(name, getattr(one, name), getattr(other, name)) for name in KVGroup.__struct_fields__]
    unlike = [(f"{name}={a}", f"{name}={b}") for name, a, b in values if a != b]
    first, second = (", ".join(texts) for texts in zip(*unlike, strict=True))
    return first, second
