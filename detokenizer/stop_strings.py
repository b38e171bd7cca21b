"""Finds stop strings in a text that arrives in pieces.

Text that may be the beginning of a stop string is held back until it is decided. The text ends before the stop string
that is complete first. If several are complete at the same character, it ends before the longest. So the result does
not depend on where the pieces are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """Text that is certainly before any stop string."""

    text: str
    matched: str | None = None
    """Stop string that was found, which ends the text."""


class StopMatcher:
    """Searches one request's text for its stop strings; after a match it is spent."""

    __slots__ = ("_held", "_patterns")

    def __init__(self, stop: Sequence[str]) -> None:
        """Prepare the search for ``stop``: at least one string, none of them empty."""
        # Longest first: if two end at the same character, the first one found is reported.
        self._patterns = [_Pattern(s) for s in sorted(set(stop), key=len, reverse=True)]
        self._held = ""

    def feed(self, piece: str, *, may_match: bool = True) -> Released:
        """Take the next piece of text, and return the text that is certain to come before any stop string.

        With ``may_match`` False, a stop string that is complete within this piece is passed over. One that begins in it
        and is complete in a later piece is found there.
        """
        found = None
        end = len(piece)
        for pattern in self._patterns:
            if not may_match:
                pattern.pass_over(piece)
                continue
            stops_at = pattern.feed(piece, end if found is None else end - 1)
            if stops_at is not None:
                found, end = pattern, stops_at
        text = self._held + piece[:end]
        if found is not None:
            self._held = ""
            return Released(text[: len(text) - len(found.text)], found.text)
        certain = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[certain:]
        return Released(text[:certain])

    def flush(self) -> str:
        """Return the text held back because it might begin a stop string. Call this once no more text follows."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth-Morris-Pratt search for one string: each character of the text is examined once, whatever the string.

    ``matched`` is the length of the longest end of the text so far that begins the string.
    """

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            self._fallback[i] = self._advance(self._fallback[i - 1], text[i])

    def feed(self, piece: str, end: int) -> int | None:
        """Read ``piece[:end]`` up to the end of the first match, and return its position; None without a match.

        A match may begin in an earlier piece.
        """
        if self.matched == 0 and self.text[0] not in piece:
            return None
        for i in range(end):
            self.matched = self._advance(self.matched, piece[i])
            if self.matched == len(self.text):
                return i + 1
        return None

    def pass_over(self, piece: str) -> None:
        """Read ``piece``, and report no match in it. A later match may overlap one that was passed over."""
        if self.matched == 0 and self.text[0] not in piece:
            return
        for character in piece:
            self.matched = self._advance(self.matched, character)
            if self.matched == len(self.text):
                self.matched = self._fallback[-1]

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.text[matched] == character else 0
