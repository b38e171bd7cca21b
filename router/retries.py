"""Decisions after a failed attempt: whether the request is retried, and which instance the failure counts against."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import InstanceCrashedError, InstanceUnreachableError, RouterError
from .instance import Instance
from .targets import Target, legs

RETRIES_AFTER_LOAD = 1
"""Retries of a request after an instance refused it for load, or because of its key's share.

More would multiply the load that is the cause.
"""


class RetryBudget:
    """Number of times that one request may still be sent again.

    ``retries`` limits all of them. ``after_crash`` limits those after an instance took the request and died, which the
    request may have caused. An attempt that could not connect costs nothing; the retry window limits it.
    """

    def __init__(self, retries: int, after_crash: int) -> None:
        self._retries = retries
        self._after_crash = after_crash
        self._after_load = RETRIES_AFTER_LOAD

    def take(self, error: RouterError) -> bool:
        """Return whether the request may be sent again after ``error``, and take that retry from the budget.

        Errors that are not ``retryable`` give False. A retry after a connection that was refused costs nothing.
        """
        if not error.retryable:
            return False
        if isinstance(error, InstanceUnreachableError):
            return True
        self._retries -= 1
        left = self._retries
        if isinstance(error, InstanceCrashedError):
            self._after_crash -= 1
            left = min(left, self._after_crash)
        if error.is_load or error.is_key_limit:
            self._after_load -= 1
            left = min(left, self._after_load)
        return left >= 0


def blamed(error: RouterError, target: Target) -> set[Instance]:
    """Return the instances of ``target`` that the next attempt should avoid after ``error``; the set may be empty."""
    if error.blames_no_instance:
        return set()
    at_fault = {instance for instance in legs(target) if instance.url == error.url}
    return at_fault if at_fault and not error.blames_peer else set(legs(target))


def charge(error: RouterError, at_fault: Iterable[Instance], begun_at: float) -> None:
    """Count a failed attempt, sent at ``begun_at``, against the instances ``at_fault``.

    If the instance sent ``Retry-After``, its circuit breaker opens for that time. Otherwise its breaker counts the
    failure. Load (429) does not count there. But both failures and load count in ``recent_failures``, which is load for
    some time. Errors of the client, limits of its API key, and failures that health checks see as well, count nowhere.
    """
    is_failure = error.status >= 500 and not error.shows_health
    for instance in at_fault:
        if is_failure or error.is_load:
            instance.recent_failures.add()
        if error.retry_after is not None:
            instance.breaker.ask(error.retry_after)
        elif is_failure and not error.is_load:
            instance.breaker.failed(begun_at)
