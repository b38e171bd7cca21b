"""KV pages in Redis or Valkey, which instances of many hosts may share.

Every page is a value of its own, framed like a file's. The server evicts values when memory is short
(``maxmemory-policy allkeys-lru`` is right). A server that refuses to keep more counts as full.

The client library ends every wait after a time-out, and reconnects by itself. It trusts the server. So any error that a
malformed answer causes counts as no answer (``_ask``), and answers are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import redis

from .base import PageStore, StoreFull, StoreMisconfigured, StoreRequest, StoreUnavailable, StoreUsage
from .frame import BadFrame, Framing

BATCH_BYTES = 16 << 20
"""Maximum bytes of one request to the server, which answers other clients between two of them."""


class RedisStore(PageStore):
    """``url``: ``redis://[user:password@]host:port/db``, or ``rediss://`` for TLS. ``timeout``: seconds of a wait."""

    def __init__(self, url: str, page_bytes: int, timeout: float, framing: Framing | None = None) -> None:
        super().__init__(page_bytes, framing)
        self._prefix = b"pdserve:kv:%d:" % self.framing.version
        try:
            # One try: whether it is worth another is the breaker's to say.
            self._client = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=None, health_check_interval=0
            )
        except ValueError as e:
            raise StoreMisconfigured(f"--hicache-storage-url: {e}") from e
        self._batch = max(1, BATCH_BYTES // page_bytes)
        self._bad = 0

    def exists(self, hashes: Sequence[bytes]) -> int:

        def ask() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for page_hash in hashes:
                pipeline.exists(self._prefix + page_hash)
            return pipeline.execute()

        found = self._ask(ask)
        return next((i for i, there in enumerate(found) if not there), min(len(found), len(hashes)))

    def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        for begin in range(0, len(hashes), self._batch):
            part = hashes[begin : begin + self._batch]
            values = self._ask(lambda: list(self._client.mget([self._prefix + page_hash for page_hash in part])))  # noqa: B023
            for i, page_hash in enumerate(part):
                value = values[i] if i < len(values) else None
                if value is None or not self._take(page_hash, value, into[begin + i]):
                    return begin + i
        return len(hashes)

    def set(self, hashes: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        for begin in range(0, len(hashes), self._batch):
            end = begin + self._batch
            pipeline = self._client.pipeline(transaction=False)
            for page_hash, page in zip(hashes[begin:end], pages[begin:end], strict=True):
                pipeline.set(self._prefix + page_hash, self.framing.header(page_hash, page) + bytes(page))
            self._ask(pipeline.execute)

    def remove(self, hashes: Sequence[bytes]) -> None:
        if hashes:
            self._ask(lambda: self._client.delete(*(self._prefix + page_hash for page_hash in hashes)))

    def probe(self) -> None:
        self._ask(self._client.ping)

    def keep(self, hashes: Sequence[bytes], until: float) -> int:
        """Return how many of the first pages are stored. ``until`` is ignored: the server chooses what it evicts."""
        return self.exists(hashes)

    def usage(self) -> StoreUsage:
        return StoreUsage(None, None, self._bad, 0)

    def close(self) -> None:
        self._client.close()

    def _take(self, page_hash: bytes, value: object, page: memoryview) -> bool:
        try:
            begin = self.framing.header_bytes
            if not isinstance(value, bytes) or len(value) != begin + page.nbytes:
                raise BadFrame("something else in the place of a page")
            view = memoryview(value)
            self.framing.check(view[:begin], page_hash, view[begin:])
        except BadFrame:
            self._bad += 1
            self.remove([page_hash])
            return False
        page[:] = view[begin:]
        return True

    def _ask(self, work: Callable[[], Any]) -> Any:
        """Call ``work``, which asks the server, and return its answer. Raises ``StoreFull``, ``StoreUnavailable``."""
        try:
            return work()
        except redis.OutOfMemoryError as e:
            raise StoreFull("Redis is full and evicts nothing; set its maxmemory-policy to allkeys-lru") from e
        except redis.RedisError as e:
            raise self._unavailable(e) from e
        except Exception as e:  # see the module; what it has yet to read must not be taken for the next answer
            self._client.connection_pool.disconnect()
            raise self._unavailable(e) from e

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        # What the library says may name the URL's password.
        pool = self._client.connection_pool.connection_kwargs
        return StoreUnavailable(f"Redis at {pool.get('host')}:{pool.get('port')}: {type(error).__name__}")


def open_redis_store(request: StoreRequest) -> RedisStore:
    """Make a store on the Redis server ``request.url``. It connects at the first use. Raises ``StoreMisconfigured``."""
    return RedisStore(request.url, request.page_bytes, request.timeout, request.framing)
