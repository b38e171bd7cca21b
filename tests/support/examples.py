"""How many random examples a test draws: all in CI and with a quarter of the slow tests, two in five else."""

from __future__ import annotations

import os

IS_WHOLE = bool(os.environ.get("CI")) or os.environ.get("PDSERVE_EXAMPLES") == "all"


def examples(count: int) -> int:
    """Return the number of examples that this run draws of ``count``."""
    return count if IS_WHOLE else -(-count * 2 // 5)
