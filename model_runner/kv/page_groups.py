"""Chooses how peers read and write the pools: where they lie, through memory of the host, or by address."""

from __future__ import annotations

from ...mem_cache.kv_pages.page_group import PageGroup
from ...runtime.transfer_backends import BACKENDS
from ..device.base import Device
from ..options import WorkerOptions
from ..torch_import import note_torch
from .pools import Pools


def page_groups(pools: Pools, device: Device, options: WorkerOptions) -> list[PageGroup | None]:
    """Return what peers may read and write of ``pools``: the pages of each group of the layout, None for one without
    bytes. On a device they pass through memory of the host, unless ``kv_staging_size`` is 0, or the backend knows no
    other: then they are ``direct``.
    """
    size, layout, kind = options.kv_staging_size, pools.layout, device.kind
    stays_on_devices = BACKENDS[options.disaggregation_transfer_backend].stays_on_devices
    if kind == "cpu" and not size and not stays_on_devices:
        return [
            PageGroup.of(group, region) if region is not None else None
            for group, region in zip(layout.groups, pools.regions, strict=True)
        ]
    note_torch("KV that is staged on its way to peers, or read by address")
    from .staging import direct_groups, staged_groups

    if stays_on_devices or size == 0:
        return direct_groups(layout, pools.by_group, device)
    return staged_groups(layout, pools.by_group, device, size)
