"""One ``pdserve`` command in a process that a fork server made: ``main`` is the command line with one change.

The processes of an instance are forks of this process, as they are under ``pdserve up``.
"""

from __future__ import annotations

import os
import sys

from pdserve.router import process as _router  # noqa: F401 - the fork server imports it for all routers
from pdserve.runtime.fork_server import ForkServer
from pdserve.server import cli, instance


def main() -> None:
    """Run ``pdserve ARGUMENTS``, and exit with its code."""
    # The fork server found this module by the first folder. The command does without.
    first, *others = os.environ.pop("PYTHONPATH").split(os.pathsep)
    sys.path.remove(first)
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    if sys.argv[1] == "server":
        run_instance, fork_server = instance.run_instance, ForkServer.fork()
        instance.run_instance = lambda options: run_instance(options, fork_server)
    cli.main()
