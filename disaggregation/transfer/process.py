"""The model worker process of an instance that takes part in hand-overs: its transfer engine, beside the steps.

The engine has a thread of its own, which reports through a channel end of its own. Commands about KV that peers send
come by another channel than steps, and wait for no step.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import logging
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from ...messages.channel import Receiver, Sender, UndeclaredMessage
from ...messages.routes import ToTransfer
from ...messages.worker import ReceiveCommand, TransferEvent
from ...model_runner.options import WorkerOptions
from ...model_runner.process import run
from ...runtime.child import ChildContext, start_child
from ..errors import TransferError

if TYPE_CHECKING:
    from ...model_runner.engines.loaded import LoadedModel
    from .engine import TransferEngine

log = logging.getLogger(__name__)
OPTIONS = WorkerOptions


def main() -> NoReturn:
    """Run the model worker process, with a transfer engine, until it ends."""
    ctx = start_child(sys.argv, OPTIONS)
    run(ctx, lambda model: start_engine(ctx, model))


def start_engine(ctx: ChildContext[WorkerOptions], model: LoadedModel) -> TransferEngine:
    """Open the model's pools to peers, and start the transfer engine and the thread that takes its commands.

    Ends the process if the backend can't be used here.
    """
    # The model is loaded by now, so these imports delay nothing.
    from ...model_runner.kv.page_groups import page_groups
    from .engine import TransferEngine

    options = ctx.options
    # Made here, used by the engine's thread alone.
    sender = Sender(ctx.zmq_ctx, ctx.address("worker_events"))

    def emit(event: TransferEvent) -> None:
        sender.send(event)

    try:
        engine = TransferEngine(
            options.disaggregation_transfer_backend,
            page_groups(model.pools, model.device, options),
            ctx.epoch,
            options.host,
            emit,
            layout=model.pools.layout,
            port=options.disaggregation_data_port,
            advertise_host=options.advertise_host,
        ).start()
    except TransferError as e:
        sys.exit(f"model worker: {e}")
    threading.Thread(target=_obey, args=(ctx, engine), name="transfer-commands", daemon=True).start()
    return engine


def _obey(ctx: ChildContext[WorkerOptions], engine: TransferEngine) -> None:
    """Pass commands that must not wait for a step on to ``engine``, for ever. A failure ends the process."""
    from .engine import end_process

    try:
        receiver: Receiver[ReceiveCommand] = Receiver(ctx.zmq_ctx, ctx.address("transfer"), ToTransfer)
        while True:
            try:
                commands = receiver.recv(-1)
            except UndeclaredMessage as e:
                log.error("%s", e)
                continue
            for command in commands:
                engine.submit(command)
    except BaseException as e:  # noqa: BLE001
        # Whatever it is, this thread is over; a worker that obeys no grant must not look healthy.
        end_process(e)


if __name__ == "__main__":
    main()
