"""The detokenizer process: scheduler → here → HTTP.

Tokens become text. Errors and answers to questions are passed on unchanged, after the tokens that came before them. A
stop string is reported to the scheduler before HTTP hears of it. So the scheduler knows before a client can use the rid
again.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..messages.base import Message
from ..messages.channel import Receiver, Sender, SendsMessages, UndeclaredMessage
from ..messages.moves import ReqMoved
from ..messages.outputs import ReqError, TokenBatch
from ..messages.requests import StopReq
from ..messages.routes import ToDetokenizer
from ..messages.too_large import send_or_explain
from ..model_files.errors import ModelError
from ..model_files.options import ModelOptions
from ..model_files.text.errors import TextError
from ..model_files.text.load import load_tokenizer
from ..runtime.child import start_child
from ..runtime.malloc import return_freed_memory, trim
from ..runtime.process_options import ChildOptions
from .detokenizer import Detokenizer
from .request_decoder import make_decoder_factory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DetokenizerOptions(ModelOptions, ChildOptions):
    """Every option that this process reads."""


OPTIONS = DetokenizerOptions


class DetokenizerOutput(NamedTuple):
    """Messages that one frame resulted in, by receiver."""

    to_scheduler: list[StopReq]
    to_http: list[Message]


def route(detokenizer: Detokenizer, messages: Sequence[ToDetokenizer]) -> DetokenizerOutput:
    """Decode the messages of one frame, and return what to send to the scheduler and to HTTP; send nothing.

    The order is kept, and messages other than tokens stay as they are. An error or a migration drops its request's
    state.
    """
    routed = DetokenizerOutput([], [])
    for message in messages:
        if isinstance(message, TokenBatch):
            step = detokenizer.process(message)
            routed.to_scheduler.extend(step.stops)
            if step.batch.items:
                routed.to_http.append(step.batch)
            continue
        if isinstance(message, ReqError):
            detokenizer.forget(message.rid)
            logger.debug("ends with %d", message.status, extra={"rid": message.rid})
        elif isinstance(message, ReqMoved):
            detokenizer.forget(message.rid)  # text that is held back comes from where it goes on
        routed.to_http.append(message)
    return routed


def deliver(detokenizer: Detokenizer, routed: DetokenizerOutput, scheduler: SendsMessages, http: SendsMessages) -> None:
    """Send the messages of ``route``, those to the scheduler first.

    A request with text too large for a frame ends: its client gets an error, and the scheduler is told to stop it.
    """
    scheduler.send(*routed.to_scheduler)
    for rid in send_or_explain(http, routed.to_http):
        detokenizer.forget(rid)
        scheduler.send(StopReq(rid))


def main() -> None:
    """Run the detokenizer process until it is killed. Exits with a message if the tokenizer can't be loaded."""
    started = time.monotonic()
    ctx = start_child(sys.argv, OPTIONS)
    return_freed_memory()
    receiver: Receiver[ToDetokenizer] = Receiver(ctx.zmq_ctx, ctx.address("detokenizer"), ToDetokenizer)
    scheduler = Sender(ctx.zmq_ctx, ctx.address("scheduler"))
    http = Sender(ctx.zmq_ctx, ctx.address("http"))
    try:
        detokenizer = Detokenizer(make_decoder_factory(load_tokenizer(ctx.options)))
    except (TextError, ModelError) as e:
        sys.exit(f"detokenizer: {e}")
    trim()
    ctx.report_ready({"load_tokenizer": time.monotonic() - started})
    while True:
        try:
            messages = receiver.recv(-1)
        except UndeclaredMessage as e:
            logger.error("%s", e)
            continue
        deliver(detokenizer, route(detokenizer, messages), scheduler, http)


if __name__ == "__main__":
    main()
