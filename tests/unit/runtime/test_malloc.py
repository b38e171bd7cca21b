"""Blocks that a process takes from its heap, and blocks that it takes from the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.machine import limit

CODE = """
import ctypes
from pdserve.runtime.malloc import return_freed_memory

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
return_freed_memory()
for kib in {sizes}:
    before = info().hblks
    block = bytes(kib * 1024)
    print(info().hblks - before)
    del block
"""


def test_blocks_below_a_megabyte_are_on_the_heap_and_larger_ones_mapped() -> None:
    """Also after a larger one was freed, which raises glibc's own limit."""
    sizes = [800, 2048, 800, 2048]
    command = [sys.executable, "-P", "-c", CODE.format(sizes=sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60), check=False)
    if "mallinfo2" in done.stderr:
        pytest.skip("another C library than glibc 2.33 and later")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "0", "1"]
