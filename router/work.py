"""Counts of the work that a router has given to instances, each kept as long as the work lasts."""

from __future__ import annotations

from typing import Self

from .instance import Instance

MAX_ANSWERS = 64
"""Maximum number of answers that one request counts as: few of a larger batch run at a time, and most may end early."""


def believed_tokens(instance: Instance, tokens: int, count: int) -> int:
    """Return how many of the ``tokens`` of ``count`` prompts count at ``instance``.

    They are the client's to choose, or a guess. At most as many count as the instance reports that prompts may have.
    """
    pace = instance.report.pace
    return min(tokens, count * pace.max_tokens) if pace is not None and pace.max_tokens else tokens


class Answering:
    """Count of requests that decode at an instance, or at the one that they migrate to.

    They count until ``done`` is called or the block ends.
    """

    def __init__(self, instance: Instance, count: int = 1) -> None:
        self.instance = instance
        self._count = min(count, MAX_ANSWERS)
        self._is_counted = False

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self) -> None:
        """Count these requests no longer, since their instance has ended the answer. Further calls do nothing."""
        if self._is_counted:
            self.instance.answers -= self._count
            self._is_counted = False

    def move(self, to: Instance) -> None:
        """Count these requests in ``answers`` of ``to`` from now on, and no longer in that of the instance before."""
        self.done()
        self.instance = to
        self._begin()

    def _begin(self) -> None:
        self.instance.answers += self._count
        self._is_counted = True


class Computing:
    """Count of prompts that wait at an instance, from now until ``done`` is called or a block of it ends.

    They are counted at once, so the next choice sees them. A prompt that the instance declines is no longer counted
    anywhere, though the decode computes it.
    """

    def __init__(self, instance: Instance, tokens: int, count: int = 1, *, for_decode: bool = False) -> None:
        """Count ``count`` prompts of ``tokens`` tokens in all.

        ``for_decode``: their KV goes to another instance, which decodes.
        """
        self._instance = instance
        self._tokens = believed_tokens(instance, tokens, count)
        self._for_decode = for_decode
        self._count = count
        self._add(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self, *_: object) -> None:
        """Count the prompts no longer. Further calls do nothing."""
        if self._count:
            self._add(-1)
            self._count = 0

    def _add(self, sign: int) -> None:
        self._instance.prompt_tokens += sign * self._tokens
        if self._for_decode:
            self._instance.handed_over_tokens += sign * self._tokens
            self._instance.handed_over += sign * self._count
