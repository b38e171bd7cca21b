"""Transfer backends that are installed here."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

ASK = """
import sys
from pdserve.disaggregation.errors import BackendUnavailable
from pdserve.disaggregation.transfer.backends.load import find_backend
try:
    find_backend(sys.argv[1])
except BackendUnavailable:
    sys.exit(3)
import os
os._exit(0)
"""


@cache
def is_missing(name: str) -> bool:
    """Asked of a process of its own: what these libraries do to the process that loads them stays there."""
    code = subprocess.run([sys.executable, "-c", ASK, name], check=False).returncode
    assert code in (0, 3), code
    return code == 3
