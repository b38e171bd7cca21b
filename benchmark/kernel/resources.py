"""What compiled kernels take of a multiprocessor."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from ...model_runner.device.triton_compiler import SHARED_BYTES, CompileError, CompileRequest, compile_kernels
from ..errors import BenchError

REGISTERS = 65536
"""Registers of a multiprocessor."""
WARPS = {75: 32, 80: 64, 86: 48, 87: 48, 89: 48, 90: 64, 100: 64, 120: 48}
"""Maximum warps of a multiprocessor, by compute capability (times ten)."""
SHARED_RESERVED = 1024
"""Bytes of shared memory that the system takes for each program."""


class Resources(NamedTuple):
    """One kernel. ``registers`` and ``stack_bytes`` of a thread; ``stack_bytes`` above 0: registers spill.

    ``programs``: how many fit on a multiprocessor at a time.
    """

    kernel: str
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    programs: int
    seconds: float

    @property
    def refusal(self) -> str:
        """Return why no GPU of this kind can run the kernel; "" if one can."""
        if self.programs:
            return ""
        return f"no program of {self.kernel} fits: {self.registers} registers, {self.shared_bytes} bytes shared"


def resources_of(requests: Sequence[CompileRequest]) -> list[Resources]:
    """Compile each kernel, which needs no GPU, and return what it takes of a multiprocessor.

    Raises ``BenchError`` for a kernel that does not compile, or not in time.
    """
    try:
        compiled = compile_kernels(requests)
    except CompileError as e:
        lines = [line for line in str(e).splitlines() if line.strip()]
        raise BenchError(f"it does not compile: {lines[-1] if lines else 'the compiler says nothing'}") from None
    except subprocess.TimeoutExpired as e:
        raise BenchError(f"it is not compiled within {e.timeout:.0f} s; take smaller tiles") from None
    except FileNotFoundError as e:
        raise BenchError(f"{e.filename}, which comes with Triton, is missing") from None
    return [
        Resources(
            request.kernel.rpartition(":")[2],
            request.num_warps,
            request.num_stages,
            found.registers,
            found.stack_bytes,
            found.shared_bytes,
            programs_that_fit(request.capability, request.num_warps, found.registers, found.shared_bytes),
            found.seconds,
        )
        for request, found in zip(requests, compiled, strict=True)
    ]


def programs_that_fit(capability: int, num_warps: int, registers: int, shared_bytes: int) -> int:
    """Return how many programs (thread blocks) fit on a multiprocessor at a time; 0 if one takes more than it has.

    ``registers``: of a thread. ``shared_bytes``: of a program.
    """
    # A warp's registers are given out 256 at a time, 8 to a thread.
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * num_warps) if registers else WARPS[90]
    by_shared = (_of(SHARED_BYTES, capability) + SHARED_RESERVED) // (shared_bytes + SHARED_RESERVED)
    return min(by_registers, by_shared, _of(WARPS, capability) // num_warps)


def _of(table: dict[int, int], capability: int) -> int:
    return table[max((known for known in table if known <= capability), default=min(table))]
