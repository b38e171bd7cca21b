"""What ranks with a GPU each can't do, and say before they load."""

from __future__ import annotations

import logging

from ...model_files.errors import UnsupportedModel
from ...runtime.ranks import RankPlace
from ..options import WorkerOptions

log = logging.getLogger(__name__)


def refuse_on_devices(options: WorkerOptions, place: RankPlace) -> None:
    """Raise ``UnsupportedModel`` for options that can't be combined with ranks on a GPU each.

    These are several hosts, and all that handles whole KV pages, as each rank's pool has only its own heads. Rank 0
    warns that NCCL has not been tried.
    """
    asked = f"--tp-size {place.size} on GPUs"
    if place.nodes > 1:
        raise UnsupportedModel(f"{asked} of several hosts (--nnodes {options.nnodes}) is not there: give it one host's")
    if options.hands_over:
        raise UnsupportedModel(
            f"{asked} leaves each GPU its own heads of the KV, and a hand-over takes whole pages from one place: give "
            "an instance that exchanges KV one GPU (--tp-size 1), or have it serve whole requests (--handover off)"
        )
    for flag, is_given, what in (
        ("--enable-hierarchical-cache", options.enable_hierarchical_cache, "tiers keep"),
        ("--kv-debug", options.kv_debug, "hashes are of"),
    ):
        if is_given:
            raise UnsupportedModel(
                f"{asked} leaves each GPU its own heads of the KV, and {what} whole pages: leave out {flag}"
            )
    if place.rank == 0:
        log.warning("%s: sums go by NCCL, which has not been tried on GPUs yet (docs/gpu.md)", asked)
