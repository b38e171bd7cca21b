"""Whether the transfer backends can be loaded."""

from __future__ import annotations

from collections.abc import Iterator

from ...disaggregation.errors import BackendUnavailable
from ...disaggregation.transfer.backends.registry import BACKENDS, NEEDS, find_backend
from .finding import Finding, ok


def look_at_backends() -> Iterator[Finding]:
    """Imports each that is registered."""
    usable, missing = [], []
    for name in BACKENDS:
        try:
            find_backend(name)
        except BackendUnavailable:
            missing.append(f"{name}: {NEEDS[name]}")
        else:
            usable.append(name)
    yield ok("backends", f"{', '.join(usable)} can be loaded (--disaggregation-transfer-backend)")
    for what in missing:
        yield ok("backends", f"not installed: {what}")
