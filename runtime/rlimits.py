"""How many files and connections a process may have open."""

from __future__ import annotations

import resource


def allow_many_connections() -> None:
    """Raise the soft limit on open files to the hard one: each connection takes one, and a router's request three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
