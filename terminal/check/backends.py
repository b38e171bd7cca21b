"""Whether the transfer backends can be loaded."""

from __future__ import annotations

from collections.abc import Iterator

from ...disaggregation.transfer.backends.registry import BACKENDS, find_backend
from .finding import Finding, ok, warning


def look_at_backends() -> Iterator[Finding]:
    """Imports each that is registered."""
    usable = []
    for name in BACKENDS:
        try:
            find_backend(name)
        except ImportError as e:
            advice = "Install what it needs, or use another (--disaggregation-transfer-backend)."
            yield warning("backends", f"{name} can't be loaded: {e}", advice)
        else:
            usable.append(name)
    yield ok("backends", f"{', '.join(usable)} can be loaded (--disaggregation-transfer-backend)")
