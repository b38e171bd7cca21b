"""An answer as it comes in, and the line about it that stands below."""

from __future__ import annotations

import time
from collections.abc import Callable

from .chunk import Chunk

SMALL_MS = 0.5
"""Phases shorter than this are not shown."""


class StreamedAnswer:
    """Collects chunks, with the times at which text came (``clock``, in seconds)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = ""
        self.stopped = False
        """Whether it was cut off by the user."""
        self._clock = clock
        self._asked_at = self._first_at = self._last_at = clock()
        self._last = Chunk()
        self._has_begun = False
        self._finish_reason: str | None = None

    def add(self, chunk: Chunk) -> str:
        """Record ``chunk``, and return the text that it adds to the answer; reasoning is not part of it."""
        if chunk.text or chunk.reasoning:
            self._last_at = self._clock()
            if not self._has_begun:
                self._first_at, self._has_begun = self._last_at, True
            self.text += chunk.text
        self._finish_reason = chunk.finish_reason or self._finish_reason
        if chunk.usage is not None:
            # The last chunk with counts has those of the whole answer.
            self._last = chunk
        return chunk.text

    def summary(self) -> str:
        """Describe the answer in one line: token counts, time to first token, tokens/s, its end, and its phases."""
        return ", ".join([*self._counts(), *self._speed(), *self._end(), *self._phases()])

    def _counts(self) -> list[str]:
        usage = self._last.usage
        if usage is None:
            return []
        details = usage.prompt_tokens_details
        cached = f" ({details.cached_tokens} cached)" if details is not None and details.cached_tokens else ""
        return [f"{usage.prompt_tokens} prompt tokens{cached}", f"{usage.completion_tokens} output tokens"]

    def _speed(self) -> list[str]:
        if not self._has_begun:
            return []
        found = [f"first after {1000 * (self._first_at - self._asked_at):.0f} ms"]
        seconds, usage = self._last_at - self._first_at, self._last.usage
        # The first token's time is not the decode's.
        if usage is not None and usage.completion_tokens > 1 and seconds > 0:
            found.append(f"{(usage.completion_tokens - 1) / seconds:.1f} tokens/s")
        return found

    def _end(self) -> list[str]:
        if self.stopped:
            return ["stopped"]
        return [f"finish reason {self._finish_reason}"] if self._finish_reason else []

    def _phases(self) -> list[str]:
        timing = self._last.own_timing
        if timing is None:
            return []
        is_pair = len({one.at for one in timing.phases}) > 1
        shown = [
            f"{one.phase} {one.ms:.0f}{f' ({one.at})' if is_pair else ''}"
            for one in timing.phases
            if one.ms >= SMALL_MS
        ]
        return [f"{timing.total_ms:.0f} ms: {' + '.join(shown)}"]
