"""Whether the transfer backends can be loaded."""

from __future__ import annotations

from collections.abc import Iterator

from ...disaggregation.errors import BackendUnavailable
from ...disaggregation.transfer.backends.load import find_backend
from ...runtime.transfer_backends import BACKENDS
from .finding import Finding, ok


def look_at_backends() -> Iterator[Finding]:
    """Try to import every transfer backend, and yield which ones can be loaded and which are not installed."""
    usable, missing = [], []
    for name, spec in BACKENDS.items():
        try:
            find_backend(name)
        except BackendUnavailable:
            missing.append(f"{name}: {spec.needs}")
        else:
            usable.append(name)
    yield ok("backends", f"{', '.join(usable)} can be loaded (--disaggregation-transfer-backend)")
    for what in missing:
        yield ok("backends", f"not installed: {what}")
