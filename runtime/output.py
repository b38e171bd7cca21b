"""Standard output and error that never block their process.

A pipe without a reader is full after 64 KiB, and then a write waits without limit. A terminal does the same after
Ctrl-S. Non-blocking mode is no solution, because the mode belongs to the pipe's description, which other processes
share.

write() ──▶ at most LIMIT bytes wait ──▶ a thread writes them, and waits if it must
   └── no room: dropped and counted ──▶ a line says how many, once the output takes lines again
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

LIMIT = 1 << 20
"""Bytes that wait for an output that takes none."""
EXIT_SECONDS = 1.0
"""Longest time that the end of the process waits for the output to take what is left."""
CHUNK = 1 << 16


def dropped_note(lines: int) -> str:
    """Return a line that says that ``lines`` lines were dropped."""
    return f"{lines} lines were not written here: this output was not read in time"


class NeverBlocking(io.RawIOBase):
    """A file descriptor that a thread of its own writes to.

    ``note`` formats the line that tells how many were dropped.
    """

    def __init__(self, fd: int, note: Callable[[int], str] = dropped_note) -> None:
        super().__init__()
        self._note = note
        self._fd = fd
        self._waiting: deque[tuple[bytes, int]] = deque()
        """What is to be written, and the number of lines that it stands for."""
        self._bytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"writes to {fd}", daemon=True).start()
        atexit.register(self.drain, EXIT_SECONDS)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Leave ``data``, whole lines, to the writing thread, and return its length; never wait.

        It is dropped and counted if too many bytes wait already.
        """
        copy = bytes(data)
        with self._changed:
            # After a drop, room is made first: one note for many lines, not one for each.
            room = LIMIT // 2 if self._dropped else LIMIT
            if self._bytes and self._bytes + len(copy) > room:
                self._dropped += _lines(copy)
            else:
                self._tell_dropped()
                self._put(copy, _lines(copy))
        return len(copy)

    def drain(self, seconds: float) -> bool:
        """Wait until all waiting bytes are written or failed, for at most ``seconds``; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, seconds)

    def writable(self) -> bool:
        """Return True: the stream can be written."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor, for libraries that write to it themselves. Such writes may block."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether the output is a terminal."""
        return os.isatty(self._fd)

    def _put(self, data: bytes, lines: int) -> None:
        self._bytes += len(data)
        self._waiting.append((data, lines))
        self._changed.notify_all()

    def _tell_dropped(self) -> None:
        if self._dropped:
            lines, self._dropped = self._dropped, 0
            self._put((self._note(lines) + "\n").encode(errors="backslashreplace"), lines)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data, lines = self._waiting.popleft()
            written = _write(self._fd, data)
            with self._changed:
                self._bytes -= len(data)
                if not written:
                    self._dropped += lines
                elif not self._waiting:
                    self._tell_dropped()
                self._changed.notify_all()


def _lines(data: bytes) -> int:
    return max(1, data.count(b"\n"))


def _write(fd: int, data: bytes) -> bool:
    """Write all of ``data``, however long that takes; returns False if the output takes no more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a process that shares the output made it non-blocking
            select.select([], [fd], [])
        except OSError:  # the reader has gone (it may come back: a FIFO), or the disk is full
            return False
    return True


def never_block(name: str, note: Callable[[int], str] = dropped_note) -> None:
    """Replace ``sys.stdout`` or ``sys.stderr`` (``name``: "stdout" or "stderr") by a stream that never blocks.

    ``note`` formats the line that tells how many lines were dropped. Nothing happens if the stream never blocks
    already, or is closed (None).
    """
    stream = getattr(sys, name)
    if stream is None or isinstance(stream.buffer, NeverBlocking):
        return
    stream.flush()
    raw = NeverBlocking(stream.fileno(), note)
    text = io.TextIOWrapper(raw, encoding=stream.encoding, errors="backslashreplace", write_through=True)  # type: ignore[type-var]
    setattr(sys, name, text)


def copy_to_stderr(source: IO[bytes], prefix: str = "") -> None:
    """Copy what arrives from ``source`` to standard error until it ends, each line after ``prefix``.

    It goes on reading if standard error fails, because the writers at the other end must never wait.
    """
    start = prefix.encode()
    with source:
        while data := source.readline(CHUNK) if prefix else os.read(source.fileno(), CHUNK):
            try:
                # One write: the lines of several processes don't mix.
                sys.stderr.buffer.write(start + data)
                sys.stderr.buffer.flush()
            except OSError:
                continue
