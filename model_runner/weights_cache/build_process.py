"""The process that packs a model's weights and exits: what that needs stays out of the worker, which maps the result.

It reads a ``PackOrder`` from its standard input and writes a ``PackAnswer`` to its standard output.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import msgspec
import setproctitle

from ...model_files.errors import InvalidWeights, ModelError
from ...runtime.child import die_with_parent
from ...runtime.hardening import harden
from ...runtime.logs import configure_logging
from ...runtime.python import python_command
from ...runtime.signals import leave_signals_to_parent
from ..cpu_engine.build import BuildError
from .request import PackOrder, PackRequest

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, or of a limit on its use. Memory may still have room for the weights."""
MODULE = "pdserve.model_runner.weights_cache.build_process"


class PackAnswer(msgspec.Struct, frozen=True):
    """The end of packing."""

    error: str = ""
    """Why it failed; "": it did not."""
    errno: int = 0
    """Number of the system's error, such as that of a full disk; 0: another error."""


@dataclass(frozen=True)
class BuilderProcess:
    """Packs models in processes of their own."""

    threads: int
    timeout: float
    """Seconds that packing may take."""
    floating: Callable[[], AbstractContextManager[None]]
    """Within it processes are started, which are not to inherit the thread's cores."""

    def build(self, request: PackRequest, fd: int) -> None:
        """Pack the model into the empty file ``fd`` in a child process, and wait for it.

        Raises ``ModelError`` if that fails or takes longer than ``timeout``, and ``OSError`` for a full disk.
        """
        part, options = request.shard, request.options
        rank, size = (0, 1) if part is None else (part.rank, part.size)
        order = PackOrder(
            *(asdict(options), request.dtype, request.kv_dtype, request.node, rank, size),
            *(self.threads, fd, os.getpid()),
        )
        command = python_command("-m", "pdserve.runtime.start", MODULE)
        with self.floating():
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,))
        with process:
            try:
                output, _ = process.communicate(msgspec.json.encode(order), self.timeout)
            except subprocess.TimeoutExpired as e:
                raise InvalidWeights(
                    f"the weights were not packed within {self.timeout:.0f} s; raise --startup-timeout"
                ) from e
            finally:
                # Does nothing to a process that has ended.
                process.kill()
        _check(process.returncode, output)


def _check(code: int, output: bytes) -> None:
    """Raise the error with which the packing process ended, if any. ``code``: its exit code. ``output``: its answer."""
    if code < 0:
        raise InvalidWeights(
            f"the process that packs the weights was ended by signal {-code} ({signal.strsignal(-code)}); if the host "
            "was out of memory, free some: packing takes as much as the weights"
        )
    try:
        answer = msgspec.json.decode(output.splitlines()[-1], type=PackAnswer)
    except (IndexError, msgspec.MsgspecError) as e:
        raise InvalidWeights(f"the process that packs the weights ended with code {code}; see its log above") from e
    if answer.errno:
        raise OSError(answer.errno, answer.error)
    if answer.error:
        raise InvalidWeights(answer.error)


def main() -> None:
    """Pack the model of the ``PackOrder`` on standard input into the open file that the order names.

    Write a ``PackAnswer`` to standard output. It says why packing failed; the exit code does not.
    """
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=PackOrder)
    die_with_parent(order.parent)
    leave_signals_to_parent()
    answer = _build(order)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    sys.stdout.flush()


def _build(order: PackOrder) -> PackAnswer:
    try:
        request = order.read()
        options = request.options
        harden(allow_dumps=options.allow_core_dumps)
        process = f"{options.disaggregation_mode}:{options.port} weights"
        setproctitle.setproctitle(f"pdserve {process}")
        configure_logging(process, options.log_level, options.log_format)
        # Imported here: it imports the readers of weights.
        from .build import build

        build(request, request.name().key, order.fd, order.threads)
    except OSError as e:
        return PackAnswer(str(e.strerror), e.errno) if e.errno in FULL else PackAnswer(str(e))
    except (ModelError, BuildError, ValueError) as e:
        return PackAnswer(str(e))
    except MemoryError:
        return PackAnswer("there is not enough memory to load and pack the weights; free some, or choose another model")
    return PackAnswer()


if __name__ == "__main__":
    main()
