"""What programs are told in an error's ``code`` of why a request was not taken in."""

from __future__ import annotations

RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
"""With 429: the instance has too much to do for any request of this kind, whatever its API key."""
KEY_LIMIT_EXCEEDED = "key_limit_exceeded"
"""With 429: the API key has all that one key may have here, while there is room for others.

It says nothing about the instance's load.
"""
ADMIN_KEY = "(admin)"
"""Name of the admin's key, which no user can have. All requests over a router with a single key have it."""
OVERLOADED = "overloaded"
"""With 503: the instance has too much to do. One other instance may be tried; this one stays in rotation."""
BATCH_TOO_LARGE = "batch_too_large"
"""With 413: the batch has more answers than an instance queues and runs. No instance will take it."""
DRAINING = "draining"
STARTING = "starting"
UNAVAILABLE = "unavailable"
"""The instance has given its memory back, or takes it again."""
INSTANCE_FAILED = "instance_failed"
"""With 503: a process of the instance died while it had the request, which may be the cause."""
ABOUT_INSTANCE = frozenset((DRAINING, STARTING, UNAVAILABLE))
"""With 503: any request would be refused now, so a router leaves the instance alone for a while."""


def too_many(key: str, *, has_room_for_others: bool) -> str:
    """Return the ``code`` of a 429 to a request of the API key named ``key``.

    ``has_room_for_others``: whether a key that holds nothing would be admitted. Without keys, or with only the admin's,
    all clients share one name. Then a full share is the instance's load.
    """
    is_one_client = key not in ("", ADMIN_KEY)
    return KEY_LIMIT_EXCEEDED if is_one_client and has_room_for_others else RATE_LIMIT_EXCEEDED
