"""The process that renders a model's chat template within limits, because its author is unknown.

Each message that it gets may take ``RenderLimits.cpu_seconds`` of its time: after that the kernel ends it (SIGPROF).
Memory that it may not have is a ``MemoryError``, which refuses the conversation. It ends when the other end is closed.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import signal
import socket

import setproctitle

from ...messages.conversation import Conversation
from ...runtime.hardening import harden
from ...runtime.signals import leave_signals_to_parent
from ..limited_process import limit_process, start_clock
from .chat_template import ChatTemplates
from .errors import PromptError, TokenizerLoadError
from .rendering import BrokenStream, Frames, Rendered, TemplateSource


def serve(frames: Frames) -> None:
    """Take the templates, compile them, and answer each conversation that comes with its text or an error.

    Raises ``BrokenStream`` when the other end is closed. Returns if the templates can't be compiled.
    """
    given = frames.receive(TemplateSource)
    limit_process(given.limits.memory_bytes)
    start_clock(given.limits.cpu_seconds)
    try:
        template = ChatTemplates(given.sources, given.special_tokens)
    except TokenizerLoadError as e:
        frames.send(Rendered(error=str(e)))
        return
    frames.send(Rendered())
    while True:
        # Before the message is read: what is left of the last one's time may be next to nothing. Waiting takes none.
        start_clock(given.limits.cpu_seconds)
        frames.send(render(template, frames.receive(Conversation)))


def render(template: ChatTemplates, chat: Conversation) -> Rendered:
    """Render ``chat``, and return its text or the error that refuses it; never raises ``PromptError``."""
    try:
        return Rendered(template.render(chat).encode(errors="surrogatepass"))
    except PromptError as e:
        return Rendered(error=str(e).encode(errors="replace").decode(), field=e.field)


def main() -> None:
    """Serve on the socket that is standard input, until its other end is closed."""
    harden(allow_dumps=False)
    leave_signals_to_parent()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    setproctitle.setproctitle("pdserve chat template")
    try:
        serve(Frames(socket.socket(fileno=0)))
    except (BrokenStream, OSError):
        return  # the tokenizer is gone


if __name__ == "__main__":
    main()
