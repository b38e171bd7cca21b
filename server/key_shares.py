"""How API keys share a limited amount."""

from __future__ import annotations

from collections import Counter

from ..messages.error_codes import too_many


class KeyShares:
    """What each key holds of ``most`` in all. A key may hold as much as it leaves free.

    One key alone gets half and two get a third each: whatever some keys hold, there is room for another one. See
    Choudhury and Hahne, "Dynamic queue length thresholds", 1998.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        """Sum of what all keys hold."""
        self._of: Counter[str] = Counter()

    def of(self, key: str) -> int:
        """Return the amount that ``key`` holds now; 0 for an unknown key."""
        return self._of[key]

    def has_room(self, key: str, amount: int) -> bool:
        """Return whether ``key`` may take ``amount`` more: it must then hold no more than is still free.

        Takes nothing.
        """
        return self._of[key] + amount <= self.most - self.held - amount

    def has_room_for_others(self, amount: int) -> bool:
        """Return whether a key that holds nothing may take ``amount``. Takes nothing."""
        return amount <= self.most - self.held - amount

    def refusal_code(self, key: str, amount: int) -> str:
        """Return the error code of a 429 to ``key``, which has no room for ``amount`` more."""
        return too_many(key, has_room_for_others=self.has_room_for_others(amount))

    def take(self, key: str, amount: int) -> None:
        """Add ``amount`` to what ``key`` holds, without a check of the limit."""
        self._of[key] += amount
        self.held += amount

    def give_back(self, key: str, amount: int) -> None:
        """Subtract ``amount`` from what ``key`` holds. A key that then holds nothing is forgotten."""
        self.held -= amount
        self._of[key] -= amount
        if not self._of[key]:
            del self._of[key]
