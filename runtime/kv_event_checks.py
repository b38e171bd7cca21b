"""Refuses options of the KV events that can't work."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from .options import ServerOptions


def kv_event_complaints(options: ServerOptions) -> Iterator[str]:
    """Yield a line for each wrong option, with what to write instead."""
    addresses = options.kv_events_endpoint, options.kv_events_replay_endpoint
    for flag, address in zip(("--kv-events-endpoint", "--kv-events-replay-endpoint"), addresses, strict=True):
        if address is not None and not _is_address(address):
            yield f"{flag} {address}: write it like tcp://127.0.0.1:5557, an address of this host"
    if options.kv_events_replay_endpoint is not None and options.kv_events_endpoint is None:
        yield "--kv-events-replay-endpoint replays what is published: add --kv-events-endpoint"
    if options.kv_events_endpoint is not None and options.disable_radix_cache:
        yield "--kv-events-endpoint tells of cached prefixes, --disable-radix-cache has none: drop one of the two"
    if options.kv_events_buffer < 1:
        yield f"--kv-events-buffer is {options.kv_events_buffer}: it must be 1 or more"


def _is_address(address: str) -> bool:
    try:
        url = urlsplit(address)
        return (url.scheme == "tcp" and url.port is not None and bool(url.hostname)) or url.scheme == "ipc"
    except ValueError:
        return False
