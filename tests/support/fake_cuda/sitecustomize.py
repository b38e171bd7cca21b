"""Gives ``cuda_ipc`` a driver for memory of the host in the place of NVIDIA's (``support/fake_cuda_driver.py``).

Every Python process with this folder in its path imports this file.
"""

from __future__ import annotations

import sys
from types import ModuleType

DRIVER = "pdserve.disaggregation.transfer.backends.cuda_driver"


class Driver(ModuleType):
    """Is imported when it is asked for something: most processes never do."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        from support import fake_cuda_driver

        return getattr(fake_cuda_driver, name)


sys.modules[DRIVER] = Driver(DRIVER)
