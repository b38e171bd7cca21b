"""How long-lived processes treat signals.

A signal that was ignored when a process started stays ignored: that is what ``nohup`` and a shell's ``&`` ask for.

Inside an instance, only the supervisor acts on signals from outside. They often reach all of its processes at once.
Ctrl-C and a closed terminal signal the process group, and systemd signals every process of the service. The supervisor
ends its processes with ``STOP`` (or ``FAILED``), which no other program sends.

``pdserve up`` ends its routers and instances with it, too. So a SIGTERM from systemd and one from ``up`` do not count
as two.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType

STOP = signal.SIGRTMIN
"""An orderly end, asked for by the parent. Sent twice it means the same as once."""
FAILED = signal.SIGRTMIN + 1
"""An orderly end like ``STOP``, because a process of the instance died: HTTP reports ``instance_failed``."""
PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals from outside on which only the parent acts."""
STRAY = (signal.SIGUSR1,)
"""Signals that mean something to other programs (log rotation), and would end this one by default."""


ECHO_SECONDS = 0.1
"""``timeout`` signals its child and then its whole group: two signals within this time are one."""


class EchoFilter:
    """Recognises a signal that comes a second time because one program sent it to a process and to its group."""

    def __init__(self) -> None:
        self._last: tuple[int, float] = (0, 0.0)

    def is_echo(self, number: int) -> bool:
        """Note a signal that comes now. Return whether the signal before it was the same, a moment ago."""
        last, at = self._last
        self._last = number, time.monotonic()
        return number == last and self._last[1] - at < ECHO_SECONDS


def unignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those of ``numbers`` that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> list[signal.Signals]:
    """Call ``handler`` for ``STOP`` and for those of ``numbers`` that are not ignored; ignore stray signals.

    Returns the signals that are handled.
    """
    handled = [STOP, *unignored(numbers)]
    for number in handled:
        signal.signal(number, handler)
    ignore_stray_signals()
    return handled


def ignore_stray_signals() -> None:
    """Ignore the signals in ``STRAY``, which are meant for other programs and would end this one."""
    for number in STRAY:
        signal.signal(number, signal.SIG_IGN)


def leave_signals_to_parent() -> None:
    """Ignore ``PARENTS``, on which the parent acts, and stray signals.

    ``STOP`` and ``FAILED`` stay as they are.
    """
    for number in (*PARENTS, *STRAY):
        signal.signal(number, signal.SIG_IGN)


def exit_on_signals() -> None:
    """Exit by ``SystemExit`` on SIGTERM and SIGHUP, so that ``finally`` blocks end the processes of this one.

    For programs that start others in sessions of their own, where no signal to this program's group reaches them. What
    is ignored stays ignored, and so do all signals after the first.
    """
    handled = unignored((signal.SIGTERM, signal.SIGHUP))

    def leave(number: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in handled:
        signal.signal(number, leave)
