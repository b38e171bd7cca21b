"""KV pages in Redis or Valkey, which instances of many hosts may share.

Every page is a value of its own, framed like a file's. What goes when memory is short is the server's to decide
(``maxmemory-policy allkeys-lru`` suits); a server that refuses to keep more counts as full. The client library ends
every wait after a time-out, and connects again by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis

from .base import PageStore, StoreFull, StoreMisconfigured, StoreUnavailable, StoreUsage
from .frame import HEADER_BYTES, VERSION, BadFrame, check, header

PREFIX = f"pdserve:kv:{VERSION}:".encode()
BATCH_BYTES = 16 << 20
"""Of one request to the server: it answers others in between."""


class RedisStore(PageStore):
    """``url``: ``redis://[user:password@]host:port/db``, or ``rediss://`` for TLS. ``timeout``: seconds of a wait."""

    def __init__(self, url: str, page_bytes: int, timeout: float) -> None:
        super().__init__(page_bytes)
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
        """See the base class."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for page_hash in hashes:
                pipeline.exists(PREFIX + page_hash)
            found = pipeline.execute()
        except redis.RedisError as e:
            raise self._unavailable(e) from e
        return next((i for i, there in enumerate(found) if not there), len(hashes))

    def get(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """See the base class."""
        for begin in range(0, len(hashes), self._batch):
            part = hashes[begin : begin + self._batch]
            try:
                values = self._client.mget([PREFIX + page_hash for page_hash in part])
            except redis.RedisError as e:
                raise self._unavailable(e) from e
            for i, (page_hash, value) in enumerate(zip(part, values, strict=True), begin):
                if value is None or not self._take(page_hash, value, into[i]):
                    return i
        return len(hashes)

    def set(self, hashes: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        """See the base class."""
        for begin in range(0, len(hashes), self._batch):
            pipeline = self._client.pipeline(transaction=False)
            for page_hash, page in zip(
                hashes[begin : begin + self._batch], pages[begin : begin + self._batch], strict=True
            ):
                pipeline.set(PREFIX + page_hash, header(page_hash, page) + bytes(page))
            try:
                pipeline.execute()
            except redis.OutOfMemoryError as e:
                raise StoreFull("Redis is full and evicts nothing; set its maxmemory-policy to allkeys-lru") from e
            except redis.RedisError as e:
                raise self._unavailable(e) from e

    def remove(self, hashes: Sequence[bytes]) -> None:
        """See the base class."""
        try:
            if hashes:
                self._client.delete(*(PREFIX + page_hash for page_hash in hashes))
        except redis.RedisError as e:
            raise self._unavailable(e) from e

    def probe(self) -> None:
        """See the base class."""
        try:
            self._client.ping()
        except redis.RedisError as e:
            raise self._unavailable(e) from e

    def keep(self, hashes: Sequence[bytes], until: float) -> int:
        """See the base class: what goes is the server's to choose."""
        return self.exists(hashes)

    def usage(self) -> StoreUsage:
        """See the base class."""
        return StoreUsage(None, None, self._bad, 0)

    def close(self) -> None:
        """See the base class."""
        self._client.close()

    def _take(self, page_hash: bytes, value: bytes | str, page: memoryview) -> bool:
        assert isinstance(value, bytes)  # the client was not asked to decode
        view = memoryview(value)
        try:
            if len(value) != HEADER_BYTES + page.nbytes:
                raise BadFrame(f"{len(value)} bytes in the place of a page")
            check(view[:HEADER_BYTES], page_hash, view[HEADER_BYTES:])
        except BadFrame:
            self._bad += 1
            try:
                self._client.delete(PREFIX + page_hash)
            except redis.RedisError as e:
                raise self._unavailable(e) from e
            return False
        page[:] = view[HEADER_BYTES:]
        return True

    def _unavailable(self, error: redis.RedisError) -> StoreUnavailable:
        # What the library says may name the URL's password.
        pool = self._client.connection_pool.connection_kwargs
        return StoreUnavailable(f"Redis at {pool.get('host')}:{pool.get('port')}: {type(error).__name__}")
