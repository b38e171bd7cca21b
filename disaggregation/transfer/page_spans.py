"""From page numbers to pieces of memory."""

from __future__ import annotations

import numpy as np

from ...messages.base import I32, unpack_i32
from ..errors import BadSpans
from .backends.base import Spans


def unpack_pages(packed: bytes, num_pages: int, what: str) -> I32:
    """Page numbers; raises ``BadSpans`` for one that no request can hold (page 0 is for padding)."""
    if len(packed) % 4:
        raise BadSpans(f"the {what} pages are not int32")
    pages = unpack_i32(packed)
    if len(pages) and (int(pages.min()) < 1 or int(pages.max()) >= num_pages):
        raise BadSpans(f"a {what} page lies outside of 1 … {num_pages - 1}")
    return pages


def page_spans(src: I32, dst: I32, page_bytes: int) -> tuple[Spans, Spans]:
    """Spans of pages ``src`` here and ``dst`` there; pages that are neighbours on both sides become one span."""
    if len(src) == 0:
        return np.empty((0, 2), np.int64), np.empty((0, 2), np.int64)
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(src)]))) * page_bytes
    local = np.stack((src[starts].astype(np.int64) * page_bytes, lengths), axis=1)
    remote = np.stack((dst[starts].astype(np.int64) * page_bytes, lengths), axis=1)
    return local, remote
