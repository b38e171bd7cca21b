"""The names of a request's pages: hashes that chain over its tokens (``mem_cache/page_hash.py``)."""

from __future__ import annotations

from typing import NamedTuple

from ..mem_cache.page_hash import prompt_hashes
from .req import Req


class PageNames(NamedTuple):
    """``seed``: of this model's pages. There is one kind of them in an instance, which requests remember."""

    seed: bytes
    page_size: int

    def of(self, req: Req, limit: int) -> list[bytes]:
        """Of the request's whole pages within its first ``limit`` tokens, which are known."""
        pages = limit // self.page_size
        if len(req.page_hashes) < pages:
            known = req.token_ids[: req.known_len // self.page_size * self.page_size]
            req.page_hashes = prompt_hashes(self.seed, known, self.page_size, req.msg.extra_key)
        return req.page_hashes[:pages]
