"""Reasons for which the instance admits no request at all for a while."""

from __future__ import annotations

from collections.abc import Callable

from .refusals import Refusal


class AdmissionGate:
    """Asks each part of the instance that can close it, in the order in which they joined."""

    def __init__(self) -> None:
        self._reasons: list[Callable[[], Refusal | None]] = []

    def add(self, reason: Callable[[], Refusal | None]) -> None:
        """Register ``reason``, which is asked at each admission: all requests are refused if it returns a refusal."""
        self._reasons.append(reason)

    def refusal(self) -> Refusal | None:
        """Return the first refusal of the registered reasons, which holds for every request; None while all are
        admitted.
        """
        return next((refusal for reason in self._reasons if (refusal := reason()) is not None), None)
