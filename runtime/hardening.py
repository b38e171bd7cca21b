"""Protection of a process's memory, with its keys and prompts, and of its files from other users.

- ``umask 077``: only the server's user can read the files and folders that it makes.
- ``RLIMIT_CORE`` 1 byte: the kernel writes no core dump, and, unlike with 0, hands none to a program that
  ``core_pattern`` names. Children inherit both.
- ``PR_SET_DUMPABLE`` 0: no other process of the same user attaches to this one, or reads its memory, environment and
  descriptors in ``/proc``. The kernel also dumps no core, whatever the limit. A forked process inherits it; executing
  a program resets it, so each process sets it for itself. Signals, pidfds, ``SCM_RIGHTS``, ``SO_PEERCRED`` and a
  process's own ``/proc/self`` work as before.
"""

from __future__ import annotations

import ctypes
import os
import resource

PR_SET_DUMPABLE = 4
CORE_BYTES = 1


def prctl(option: int, value: int) -> None:
    """Call ``prctl(2)``. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def harden(*, allow_dumps: bool, shares_descriptors: bool = False) -> None:
    """Make new files private and, unless ``allow_dumps``, keep this process's memory out of core dumps.

    It is called before a process reads keys or opens files. With ``shares_descriptors``, the process stays open to
    other processes of its user, as model workers must. Ranks map each other's memory through ``/proc/PID/fd``, and
    transfer libraries read and write it directly.
    """
    os.umask(0o077)
    if not allow_dumps:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        limit = CORE_BYTES if hard == resource.RLIM_INFINITY else min(hard, CORE_BYTES)
        resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
    # A process that a fork server made is closed to others until here.
    prctl(PR_SET_DUMPABLE, allow_dumps or shares_descriptors)
