"""Chooses how peers read and write the pools: where they lie, through memory of the host, or by address."""

from __future__ import annotations

from ...mem_cache.kv_pages.page_group import PageGroup
from ...runtime.transfer_backends import BACKENDS
from ..device.base import Device
from ..options import WorkerOptions
from ..torch_import import note_torch
from .pools import Pools


def page_groups(pools: Pools, device: Device, options: WorkerOptions) -> list[PageGroup | None]:
    """Return the memory of ``pools`` that peers read and write, one ``PageGroup`` for each group of the layout.

    A group with pages of no bytes has None, as the first one if all layers have windows. A CPU's pools are used as they
    are, unless ``kv_staging_size`` is set. An accelerator's pages go through host memory, which is allocated here, or
    by device address if ``kv_staging_size`` is 0 or the transfer backend requires it.
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
