"""One attempt at a request, as the policy hears of it.

chosen ──sent()──▶ under way ──answer begins: began()──▶ answering ──answer complete──▶ ended(ANSWERED)
                      ├───────────────a leg failed───────────┴───▶ ended(FAILED), perhaps followed by another attempt
                      └───────────────cancelled──────────────┴───▶ ended(CANCELLED)
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from .facts import Facts
from .policies.base import Ending, Policy
from .targets import Target


class Attempt:
    """One attempt: its block reports to ``policy`` that it is sent and that it ends, each exactly once."""

    def __init__(self, policy: Policy, target: Target, facts: Facts) -> None:
        self._policy = policy
        self._target = target
        self._facts = facts
        self.sent_error = False
        """Whether the answer's stream had an error event. Set by the block."""
        self._has_begun = False

    def __enter__(self) -> Self:
        self._policy.sent(self._target, self._facts)
        return self

    def began(self) -> None:
        """Report to the policy that a successful answer begins. Further calls do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._policy.began(self._target, self._facts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            ending = Ending.CANCELLED
        else:
            ending = Ending.ANSWERED if error is None and not self.sent_error else Ending.FAILED
        self._policy.ended(self._target, self._facts, ending)
