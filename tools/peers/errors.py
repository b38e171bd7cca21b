"""What can go wrong while peers are installed, started or compared."""

from __future__ import annotations


class PeerError(Exception):
    """Base of this folder's errors; the message says which peer and, where there is a log, its last lines."""


class InstallFailed(PeerError):
    """A peer could not be installed or built."""


class PeerDied(PeerError):
    """A server ended, or did not become ready in time."""


class CaseFailed(PeerError):
    """A load generator run ended with an error, or requests of it failed."""


class ResultsError(PeerError):
    """A folder of results can't be used: it is none, or was measured on another machine."""
