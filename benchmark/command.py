"""What all commands of measurements have in common: where they print, and what they end with."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from ..runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from .errors import BenchError, BenchOptionsError

PIPE_COLUMNS = 150


def wide_console() -> Console:
    """Make a console on standard output for tables. It has ``PIPE_COLUMNS`` columns if that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def exit_code(name: str, measure: Callable[[], bool | None]) -> int:
    """Run ``measure``, print its benchmark errors to standard error after ``name``, and return the exit code.

    ``measure`` returns False after a failure that it has reported itself.
    """
    try:
        return EXIT_FAILED if measure() is False else 0
    except (BenchOptionsError, BenchError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return EXIT_USAGE if isinstance(e, BenchOptionsError) else EXIT_FAILED
