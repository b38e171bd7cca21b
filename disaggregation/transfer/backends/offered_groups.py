"""The page groups of the two ends of a link: what is offered, and checks that reads and writes fit both."""

from __future__ import annotations

from collections.abc import Sequence

from ....mem_cache.kv_pages.page_group import PageGroup
from ....mem_cache.kv_pages.region import RegionError
from ...errors import BadMetadata, BadPages
from ..page_write import PageWrite, check_pages
from .handshake import Offer, OfferedGroup


def offered(groups: Sequence[PageGroup]) -> list[OfferedGroup]:
    """Return the description of our page groups that an offer to peers carries."""
    return [OfferedGroup(group.num_pages, group.page_bytes, group.num_layers) for group in groups]


def check_no_devices(groups: Sequence[PageGroup], backend: str) -> None:
    """Raise ``RegionError`` if a pool is in device memory that ``backend`` would have to reach directly."""
    if any(group.direct is not None for group in groups):
        raise RegionError(
            f"the {backend} backend does not reach the memory of a GPU: have KV pass through the host's "
            "(leave out --kv-staging-size 0), or use the nixl or cuda_ipc backend"
        )


def check_regions(groups: Sequence[PageGroup]) -> None:
    """Raise ``RegionError`` if a group's region does not consist of whole pages."""
    for group in groups:
        nbytes, page_bytes = group.region.nbytes, group.page_bytes
        if page_bytes <= 0 or nbytes % page_bytes or page_bytes % group.num_layers:
            raise RegionError(f"the KV region of {nbytes} bytes is not made of pages of {page_bytes} bytes")


def check_offer(offer: Offer, groups: Sequence[PageGroup]) -> None:
    """Raise ``BadMetadata`` if the peer's page groups differ from ours in bytes or layers of a page."""
    ours = [(group.page_bytes, group.num_layers) for group in groups]
    theirs = [(group.page_bytes, group.num_layers) for group in offer.groups]
    if ours != theirs:
        raise BadMetadata(f"peer {offer.epoch} has pages of other bytes and layers, {theirs} where ours are {ours}")


def check_write(pages: PageWrite, groups: Sequence[PageGroup], offer: Offer) -> None:
    """Raise ``BadPages`` if a write names no pages, not as many here as there, or pages or layers that a pool lacks."""
    if len(pages.src) != len(pages.dst) or not len(pages.src):
        raise BadPages(f"{len(pages.src)} pages here for {len(pages.dst)} of peer {offer.epoch}")
    if not 0 <= pages.group < len(groups):
        raise BadPages(f"there is no page group {pages.group}")
    group = groups[pages.group]
    if not 0 <= pages.layers.begin < pages.layers.end <= group.num_layers:
        raise BadPages(f"a page has {group.num_layers} layers, none of {pages.layers.begin} … {pages.layers.end}")
    check_pages(pages.src, group.num_sources, "source")
    check_pages(pages.dst, offer.groups[pages.group].num_pages, "destination")
