"""What programs are told in an error's ``code`` of why a request was not taken in."""

from __future__ import annotations

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
