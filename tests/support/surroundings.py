"""The environment of the tests, and whether a test has changed it for the processes that it starts.

Libraries set variables when a test imports or uses them. These stay in the process of the tests, and mean nothing to a
server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

OF_PYTEST = ("PYTEST_CURRENT_TEST", "PYTHONSAFEPATH")
"""Variables that change from test to test, or that some tests leave out."""


def surroundings(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of ``OF_PYTEST``."""
    return {name: value for name, value in env.items() if name not in OF_PYTEST}


ENVIRONMENT = surroundings(os.environ)
"""The environment before the first test."""
_at_start = ENVIRONMENT


def begin_test() -> None:
    """Note the environment before a test and its fixtures. What differs from here on, the test has changed."""
    global _at_start
    _at_start = surroundings(os.environ)


def is_unchanged(env: Mapping[str, str] | None) -> bool:
    """Return whether an environment (None: this process's) is the one in which the test began."""
    return surroundings(os.environ if env is None else env) == _at_start
