"""Membership of an instance in a router's fleet.

    added ──▶ JOINING ──a health check passes──▶ READY

    JOINING, READY ──cordoned──▶ CORDONED ──readmitted──▶ READY, or JOINING if no health check has passed yet
    JOINING, READY, CORDONED ──drained──▶ DRAINING ──no request left, or its time is over──▶ GONE
    DRAINING ──cordoned or readmitted──▶ as above
    any but GONE ──removed──▶ GONE

GONE is final: an instance that is added again is a new member. Whether a member is healthy is another question
(``HealthState``): a READY one may be down for a while.
"""

from __future__ import annotations

from enum import StrEnum


class MemberState(StrEnum):
    """Membership of an instance, as admins see it."""

    JOINING = "joining"
    """No health check has passed yet. It gets requests as soon as one does."""
    READY = "ready"
    """It gets requests while it is healthy."""
    CORDONED = "cordoned"
    """It gets no new requests, and finishes those that it has."""
    DRAINING = "draining"
    """Like CORDONED, and it is removed when it has finished them."""
    GONE = "gone"
    """It was removed: the router neither checks nor asks it."""


class Source(StrEnum):
    """What added an instance to a fleet."""

    OPTION = "option"
    """An option of the command line."""
    API = "api"
    """``POST /workers``."""
    FILE = "file"
    """The file of ``--members-file``. The instance is drained when it vanishes from it."""
