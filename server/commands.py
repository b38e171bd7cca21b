"""Parts that the commands of ``pdserve`` share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..runtime.exit_codes import EXIT_USAGE

Config = Annotated[
    Path | None,
    Parameter(help="YAML file with any of these options (page-size: 16); the command line wins over it."),
]
"""Type of the option ``--config`` of each command."""
BENCH_HELP = "Measure a server, this one or another, or the parts of this one."


def refuse(command: str, error: ValueError) -> int:
    """Print to standard error what is wrong with the options of ``command``, and return ``EXIT_USAGE``."""
    for line in str(error).splitlines():
        print(f"pdserve {command}: {line}", file=sys.stderr)
    return EXIT_USAGE
