"""Counts the log-probabilities that the answers of all running requests hold, alternatives included.

One takes some 250 bytes in this process until its answer is written. A single request has a limit of its own
(``--max-logprobs-per-request``); here all of them together have one. Beyond that, the request that holds the most is
ended, so that a few large requests do not keep out small ones.
"""

from __future__ import annotations

from typing import Protocol

from ..errors import ApiError

MAX_HELD = 1 << 22
"""Maximum number of log-probabilities in all: some 1 GiB."""


class Holder(Protocol):
    """An owner of answers, such as a ``Submission``."""

    logprobs: int

    @property
    def is_failed(self) -> bool: ...
    def fail(self, failure: ApiError) -> None: ...


class LogprobAccount:
    """Counts log-probabilities by holder. ``each``: maximum of one holder; None: only the total is limited."""

    def __init__(self, each: int | None = None, held: int = MAX_HELD) -> None:
        self._each = each
        self._most = max(held, each or 0)
        self._holders: set[Holder] = set()
        self.held = 0
        """Log-probabilities of all holders that have not been dropped."""

    def add(self, holder: Holder, count: int) -> None:
        """Add ``count`` log-probabilities to ``holder``. Fail it with a 413 if it exceeds the limit of one holder.

        If all living holders exceed the total limit, fail those that have the most with a 429, until the rest fits.
        """
        self._holders.add(holder)
        holder.logprobs += count
        self.held += count
        if self._each is not None and holder.logprobs > self._each:
            text = (
                f"the answers have come to {holder.logprobs} log-probabilities, the limit is {self._each} "
                "(--max-logprobs-per-request); send fewer prompts at a time, ask for fewer alternatives, or raise the "
                "option"
            )
            holder.fail(ApiError(413, text))
        while self.held > self._most and self._held_by_living > self._most:
            largest = max((h for h in self._holders if not h.is_failed), key=lambda h: h.logprobs)
            text = (
                f"running requests hold {self._held_by_living} log-probabilities, the limit is {self._most}, and this "
                f"one holds the most of them ({largest.logprobs}); try again later, or ask for fewer alternatives"
            )
            largest.fail(ApiError(429, text))

    @property
    def _held_by_living(self) -> int:
        return sum(holder.logprobs for holder in self._holders if not holder.is_failed)

    def drop(self, holder: Holder) -> None:
        """Forget ``holder``, so that its log-probabilities no longer count. Do nothing if it is unknown."""
        if holder in self._holders:
            self._holders.discard(holder)
            self.held -= holder.logprobs
