"""The process that checks clients' grammars within limits, because a grammar may be made to explode.

Each grammar may take ``CheckLimits.cpu_seconds`` of its time: after that the kernel ends it (SIGPROF). Memory beyond
the limit ends it, too. It ends when the other end of its socket is closed.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import signal
import socket

import setproctitle
from llguidance import LLMatcher, LLTokenizer

from ...messages.grammar import Grammar
from ...runtime.hardening import harden
from ...runtime.signals import leave_signals_to_parent
from ..limited_process import limit_process, start_clock
from ..text.rendering import BrokenStream
from .errors import GrammarError
from .frames import CheckLimits, GrammarVerdict, Lines
from .lowering import lower

MAX_ERROR_CHARACTERS = 500
BYTES = LLTokenizer("byte")
"""A vocabulary of single bytes. Whether a grammar can be used does not depend on the model's."""
REASONS = {"NoExtensionBias": "no text matches it"}
"""Reasons in place of the library's words."""


def check(grammar: Grammar) -> GrammarVerdict:
    """Return a verdict: whether llguidance can use ``grammar``, and if it cannot, why."""
    try:
        matcher = LLMatcher(BYTES, lower(grammar), log_level=0)
        # The lexer is only built for a mask.
        matcher.compute_bitmask()
        # The library's own state follows the reason.
        error = matcher.get_error().partition("\n<state>")[0]
        error = REASONS.get(error, error)
    except GrammarError as e:
        error = str(e)
    except MemoryError:
        error = "it takes too much memory"
    return GrammarVerdict(error[:MAX_ERROR_CHARACTERS])


def serve(lines: Lines) -> None:
    """Take the limits, then check each grammar that comes and answer with a verdict.

    Raises ``BrokenStream`` when the other end is closed.
    """
    limits = lines.receive(CheckLimits)
    limit_process(limits.memory_bytes)
    while True:
        # Set before the message is read: what the last one has left may be next to nothing. Waiting takes none.
        start_clock(limits.cpu_seconds)
        lines.send(check(lines.receive(Grammar)))


def main() -> None:
    """Serve on the socket that is standard input, until its other end is closed."""
    harden(allow_dumps=False)
    leave_signals_to_parent()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    setproctitle.setproctitle("pdserve grammar check")
    try:
        serve(Lines(socket.socket(fileno=0)))
    except (BrokenStream, OSError):
        return  # the tokenizer is gone


if __name__ == "__main__":
    main()
