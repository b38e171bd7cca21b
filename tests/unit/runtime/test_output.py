"""Standard error that never blocks: a full pipe without a reading process, or one that is closed."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Iterator

import pytest
from support.machine import limit

from pdserve.runtime import output
from pdserve.runtime.output import LIMIT, NeverBlocking

LINE = b"x" * 1023 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    # Its thread may be waiting for the pipe, and so goes on having it.


def test_unread_output_is_dropped_counted_and_reported(pipe: tuple[int, int]) -> None:
    read, write = pipe
    out = NeverBlocking(write, lambda lines: f"{lines} dropped")
    many = 4 * LIMIT // len(LINE)
    for _ in range(many):
        out.write(LINE)
    assert not out.drain(0)
    written = b""
    while not (note := re.search(rb"(\d+) dropped\n", written)):
        written += os.read(read, 1 << 16)
    assert written.startswith(LINE)
    assert written.count(LINE) + int(note.group(1)) == many
    assert LIMIT // len(LINE) <= written.count(LINE) <= LIMIT // len(LINE) + 65  # and what the pipe had room for
    out.write(b"later\n")
    assert os.read(read, 100) == b"later\n"
    assert out.drain(limit(10))


def test_more_is_written_after_a_note_only_when_there_is_room(pipe: tuple[int, int]) -> None:
    read, write = pipe
    out = NeverBlocking(write, lambda lines: f"{lines} dropped")
    many = 4 * LIMIT // len(LINE)
    for _ in range(many):
        out.write(LINE)
    written = b""
    for _ in range(many):  # as fast as it is read
        written += os.read(read, len(LINE))
        out.write(LINE)
    assert written.count(b"dropped") <= 2


def test_a_reader_that_has_gone_costs_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    out = NeverBlocking(write)
    out.write(LINE)
    assert out.drain(limit(10))


def test_a_pipe_that_others_made_non_blocking_gets_every_line(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.set_blocking(write, False)
    out = NeverBlocking(write)
    lines = 512
    for _ in range(lines):
        out.write(LINE)
    with os.fdopen(os.dup(read), "rb") as reader:
        assert all(reader.readline() == LINE for _ in range(lines))


def test_its_text_is_written_at_once_whatever_it_says(pipe: tuple[int, int]) -> None:
    read, write = pipe
    text = io.TextIOWrapper(NeverBlocking(write), encoding="ascii", errors="backslashreplace", write_through=True)  # type: ignore[type-var]
    print("é \udcff", file=text)
    with os.fdopen(os.dup(read), "rb") as reader:
        assert reader.readline() == b"\\xe9 \\udcff\n"
    assert text.fileno() == write


def test_copied_output_goes_on_when_standard_error_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @property
        def buffer(self) -> Broken:
            raise BrokenPipeError

    monkeypatch.setattr(output.sys, "stderr", Broken())
    read, write = os.pipe()
    copier = threading.Thread(target=output.copy_to_stderr, args=(os.fdopen(read, "rb"), "name | "))
    copier.start()
    with os.fdopen(write, "wb") as out:
        out.write(LINE * 1000)
    copier.join(limit(10))
    assert not copier.is_alive()
