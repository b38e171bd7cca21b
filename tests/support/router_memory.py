"""The memory that a router's own limits allow it to hold, for the limits that deployments give it."""

from __future__ import annotations

from pdserve.router.answer_relay import MAX_HELD_BYTES
from pdserve.router.options import RouterOptions
from pdserve.runtime.web.body import MAX_UPLOADS
from pdserve.runtime.web.client.response import MAX_BUFFERED
from pdserve.runtime.web.connections import MAX_HEAD_BYTES

BLOCK_BYTES = 450
"""Maximum bytes of a block in the table of prefixes (docs/security.md)."""
PROCESS_BYTES = 256 << 20
"""Bytes of the process itself (it starts with 60 MB), of its connections, and of a body that is parsed."""


def router_memory(options: RouterOptions) -> int:
    """Return the bytes that a router with ``options`` holds if all of its limits are reached at once."""
    bodies = options.max_held_body_bytes * 9 // 8  # small ones may exceed the limit by an eighth
    arriving = MAX_UPLOADS * options.max_body_bytes
    responses = int(options.responses_size * 1e6)
    prefixes = options.cache_table_blocks * BLOCK_BYTES
    streams = options.max_concurrent_requests * MAX_BUFFERED
    answers = MAX_HELD_BYTES + options.max_held_event_bytes + streams
    return bodies + arriving + answers + responses + prefixes + MAX_HEAD_BYTES + PROCESS_BYTES
