"""What a request can be sent to, and what a policy chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .instance import Instance


class Pair(NamedTuple):
    """A prefill and a decode that serve one request together."""

    prefill: Instance
    decode: Instance


Target = Pair | Instance
"""A pair, or one instance that serves the whole request."""


class Offer(NamedTuple):
    """The instances that can serve one request.

    The fleet has left out unhealthy instances, those with an open circuit breaker, and those of earlier attempts,
    unless there are no others. Each sequence is in the order of the router's options. At least one target is possible:
    a pair, a worker, or a prefill alone.
    """

    prefills: Sequence[Instance] = ()
    decodes: Sequence[Instance] = ()
    """Empty if there are no prefills. Also empty if a prompt alone is computed; then a prefill serves without one."""
    workers: Sequence[Instance] = ()


def legs(target: Target) -> tuple[Instance, ...]:
    """Return the instances that serve a request at ``target``: the prefill and the decode of a pair, or the one."""
    return tuple(target) if isinstance(target, Pair) else (target,)
