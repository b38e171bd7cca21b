"""What every child process of an instance does first: title, logging, death with the parent, its options."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import setproctitle
import zmq

from ..messages.channel import Sender, ipc_address
from ..messages.control import Ready
from .hardening import harden, prctl
from .logs import configure_logging
from .process_options import ChildOptions
from .ranks import is_worker
from .signals import leave_signals_to_parent

PR_SET_PDEATHSIG = 1

Options = TypeVar("Options", bound=ChildOptions, covariant=True)


class ChildSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The supervisor's instructions to a child: a JSON file in the run directory. Its path is the child's argument.

    Arguments and environment would be the wrong place: options contain the API key and the secret, and every user of
    the host can read arguments.
    """

    name: str
    run_dir: str
    epoch: str
    parent_pid: int
    options: Any
    """Options of the server; a mapping when read. A child takes those of its sections."""
    secret: str
    """What the processes of one instance know each other by where a socket is open to others."""


@dataclass(frozen=True)
class ChildContext(Generic[Options]):
    """A child's surroundings."""

    name: str
    run_dir: Path
    epoch: str
    options: Options
    secret: str
    zmq_ctx: zmq.Context[Any]

    def address(self, channel: str) -> str:
        """Return the ZMQ address (``ipc://…``) of the instance's channel of this name."""
        return ipc_address(self.run_dir, channel)

    def report_ready(self, info: dict[str, float] | None = None) -> None:
        """Tell the supervisor that this process can serve.

        ``info``: seconds that parts of its start took, for the log.
        """
        # On a busy machine, to connect can take longer than senders usually linger. A supervisor that never hears of
        # this process ends the instance at its startup timeout, though it serves. When it is gone, so is this process.
        sender = Sender(self.zmq_ctx, self.address("supervisor"), linger_ms=-1)
        sender.send(Ready(name=self.name, info=info or {}))
        sender.close()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; exit at once if it already has."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent process is gone")


def start_child(argv: list[str], options_type: type[Options]) -> ChildContext[Options]:
    """Set up this process as a child of the supervisor, and return what it needs to run.

    ``argv[1]`` is the path of its ``ChildSpec``, which is deleted because it has keys. The process gets its title, its
    log and its protection of memory. It dies with its parent, and ignores the signals that the parent acts on.
    ``options_type`` has the sections of options that the process reads. Call it first in ``main``.
    """
    path = Path(argv[1])
    spec = msgspec.json.decode(path.read_bytes(), type=ChildSpec)
    path.unlink()  # it holds keys
    die_with_parent(spec.parent_pid)
    leave_signals_to_parent()
    options = msgspec.convert(spec.options, options_type)
    harden(allow_dumps=options.allow_core_dumps, shares_descriptors=is_worker(spec.name))
    process = f"{options.disaggregation_mode}:{options.port} {spec.name}"
    setproctitle.setproctitle(f"pdserve {process}")
    configure_logging(process, options.log_level, options.log_format)
    return ChildContext(spec.name, Path(spec.run_dir), spec.epoch, options, spec.secret, zmq.Context())
