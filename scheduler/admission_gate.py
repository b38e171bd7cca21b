"""Reasons for which the instance admits no request at all for a while."""

from __future__ import annotations

from collections.abc import Callable

from .refusals import Refusal


class AdmissionGate:
    """Asks each part of the instance that can close it, in the order in which they joined."""

    def __init__(self) -> None:
        self._reasons: list[Callable[[], Refusal | None]] = []

    def add(self, reason: Callable[[], Refusal | None]) -> None:
        """Close the gate as long as ``reason`` returns a refusal."""
        self._reasons.append(reason)

    def refusal(self) -> Refusal | None:
        """Return the refusal of every request, or None while the gate is open."""
        return next((refusal for reason in self._reasons if (refusal := reason()) is not None), None)
