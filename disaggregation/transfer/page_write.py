"""One write of pages to a peer, and the checks of the page numbers in it."""

from __future__ import annotations

from typing import NamedTuple

from ...mem_cache.kv_pages.page_group import LayerRange, PageGroup, Spans, neighbour_spans
from ...messages.base import I32, HandoverId, unpack_i32
from ..errors import BadPages


class PageWrite(NamedTuple):
    """A write of ``layers`` of our pages ``src`` to pages ``dst`` of the peer that ``handover.epoch`` names.

    With staging, ``src`` are slots. ``number`` counts the writes of a hand-over.
    """

    handover: HandoverId
    number: int
    src: I32
    dst: I32
    layers: LayerRange
    group: int = 0


def unpack_pages(packed: bytes, num_pages: int, what: str) -> I32:
    """Decode page numbers. Raises ``BadPages`` for malformed ones, page 0, or a page beyond the pool's ``num_pages``.

    ``what`` names the pages in the error.
    """
    if len(packed) % 4:
        raise BadPages(f"the {what} pages are not int32")
    pages = unpack_i32(packed)
    check_pages(pages, num_pages, what)
    return pages


def check_pages(pages: I32, num_pages: int, what: str) -> None:
    """Raise ``BadPages`` if a page is page 0 or not among a pool's ``num_pages`` pages. ``what`` names the pages."""
    if len(pages) and (int(pages.min()) < 1 or int(pages.max()) >= num_pages):
        raise BadPages(f"a {what} page lies outside of 1 … {num_pages - 1}")


def paired_spans(write: PageWrite, group: PageGroup) -> tuple[Spans, Spans]:
    """Return where the pages of ``write`` lie in our region and in the peer's, as two arrays of spans.

    Both have as many spans, of equal lengths in pairs. The peer's pages must be like ours.
    """
    if write.layers == group.whole():
        return neighbour_spans(write.src, write.dst, group.page_bytes)
    return group.spans(write.src, write.layers), group.spans(write.dst, write.layers)
