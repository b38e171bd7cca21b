"""The page groups of the two ends of a link: what is offered, and checks that reads and writes fit both."""

from __future__ import annotations

from collections.abc import Sequence

from ....mem_cache.kv_pages.page_group import PageGroup
from ....mem_cache.kv_pages.region import RegionError
from ...errors import BadMetadata, BadPages
from ..page_write import PageWrite, check_pages
from .handshake import Offer, OfferedGroup


def offered(groups: Sequence[PageGroup]) -> list[OfferedGroup]:
    """Return the description of our groups for peers."""
    return [OfferedGroup(group.num_pages, group.page_bytes, group.num_layers) for group in groups]


def check_no_devices(groups: Sequence[PageGroup], backend: str) -> None:
    """Raise ``RegionError`` for a pool on a device, which ``backend`` does not reach."""
    if any(group.direct is not None for group in groups):
        raise RegionError(
            f"the {backend} backend does not reach the memory of a GPU: have KV pass through the host's "
            "(leave out --kv-staging-size 0), or use the nixl or cuda_ipc backend"
        )


def check_regions(groups: Sequence[PageGroup]) -> None:
    """Raise ``RegionError`` for a group with a region that is not made of whole pages."""
    for group in groups:
        nbytes, page_bytes = group.region.nbytes, group.page_bytes
        if page_bytes <= 0 or nbytes % page_bytes or page_bytes % group.num_layers:
            raise RegionError(f"the KV region of {nbytes} bytes is not made of pages of {page_bytes} bytes")


def check_offer(offer: Offer, groups: Sequence[PageGroup]) -> None:
    """Raise ``BadMetadata`` if the peer's pages differ from ours in bytes or layers."""
    ours = [(group.page_bytes, group.num_layers) for group in groups]
    theirs = [(group.page_bytes, group.num_layers) for group in offer.groups]
    if ours != theirs:
        raise BadMetadata(f"peer {offer.epoch} has pages of other bytes and layers, {theirs} where ours are {ours}")


def check_write(pages: PageWrite, groups: Sequence[PageGroup], offer: Offer) -> None:
    """Raise ``BadPages`` for no pages, unequal numbers of them, or any that our pool or the peer's does not have."""
    if len(pages.src) != len(pages.dst) or not len(pages.src):
        raise BadPages(f"{len(pages.src)} pages here for {len(pages.dst)} of peer {offer.epoch}")
    if not 0 <= pages.group < len(groups):
        raise BadPages(f"there is no page group {pages.group}")
    group = groups[pages.group]
    if not 0 <= pages.layers.begin < pages.layers.end <= group.num_layers:
        raise BadPages(f"a page has {group.num_layers} layers, none of {pages.layers.begin} … {pages.layers.end}")
    check_pages(pages.src, group.num_sources, "source")
    check_pages(pages.dst, offer.groups[pages.group].num_pages, "destination")
