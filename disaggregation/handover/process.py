"""The scheduler process of an instance that takes part in hand-overs."""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import sys

import zmq

from ...runtime.answer_keys import AnswerKeys
from ...runtime.child import start_child
from ...runtime.malloc import return_freed_memory
from ...scheduler.options import SchedulerOptions
from ...scheduler.process import SchedulerProcess
from ...scheduler.scheduler import Scheduler
from .kv_manager import KVManager
from .network import Network

OPTIONS = SchedulerOptions


def main() -> None:
    """Run the scheduler process of an instance that takes part in hand-overs, until it ends."""
    ctx = start_child(sys.argv, OPTIONS)
    return_freed_memory()

    host, port = ctx.options.host, ctx.options.disaggregation_control_port
    try:
        network = Network(ctx)
    except OSError as e:
        sys.exit(f"can't listen on {host}:{port}: {e.strerror}. Choose another --disaggregation-control-port.")

    def make_handovers(scheduler: Scheduler, poller: zmq.Poller) -> KVManager:
        network.wake(poller)
        return KVManager(ctx.epoch, scheduler, network, AnswerKeys(ctx.secret))

    SchedulerProcess(ctx, make_handovers).run()


if __name__ == "__main__":
    main()
