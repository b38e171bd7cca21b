"""What all commands of measurements have in common: where they print, and what they end with."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from ..runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from .errors import BenchError, BenchOptionsError

PIPE_COLUMNS = 150


def wide_console() -> Console:
    """Make a console for tables. A pipe has no width, and 80 columns would cut them."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def exit_code(name: str, measure: Callable[[], bool | None]) -> int:
    """Run ``measure``, which returns False after a failure that it has reported. Report other failures."""
    try:
        return EXIT_FAILED if measure() is False else 0
    except (BenchOptionsError, BenchError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return EXIT_USAGE if isinstance(e, BenchOptionsError) else EXIT_FAILED
