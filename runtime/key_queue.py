"""A queue in which API keys take turns."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyQueue(Generic[T]):
    """Items by key, handed out round robin: one item of each key, in the order in which that key added them."""

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}
        """Waiting items by key; the key that is next comes first. A key without items is not there."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def append(self, key: str, item: T) -> None:
        """Add ``item`` as the last one of ``key``."""
        self._items.setdefault(key, deque()).append(item)

    def pop(self) -> T:
        """Remove and return the oldest item of the next key, round robin. Raises ``KeyError`` if the queue is empty."""
        if not self._items:
            raise KeyError("the queue is empty")
        key = next(iter(self._items))
        items = self._items.pop(key)
        item = items.popleft()
        if items:
            self._items[key] = items
        return item

    def remove(self, key: str, item: T) -> None:
        """Remove ``item`` of ``key`` from the queue. Raises ``KeyError`` or ``ValueError`` if it is not there."""
        items = self._items[key]
        items.remove(item)
        if not items:
            del self._items[key]
