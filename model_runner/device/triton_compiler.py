"""What a kernel takes of a GPU, found out without one: it is compiled for a capability, and its resources are read.

A process runs kernels either compiled or in Triton's interpreter (``TRITON_INTERPRET=1`` as triton is imported), never
both. ``compile_kernels`` therefore compiles in a child that has no such variable, and can be called from either kind:

    compile_kernels([CompileRequest(kernel="pdserve.model_runner.attention.triton.store_kv:store_kv_rows",
                                    types={"k": "*bf16", ...}, constants={"DIM": 128, ...})])

The child reads the requests as JSON and answers in JSON; nothing of it needs a driver.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...runtime.python import python_command

SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that a block may have, by compute capability (times ten)."""


class CompileError(Exception):
    """A kernel does not compile; the message is what the compiler said."""


class CompileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, as one launch would compile it.

    ``kernel``: "module:function". ``types``: of the arguments that a launch passes, "*bf16" (a pointer, taken to be
    aligned to 16 bytes as torch's are), "i32", "i64", "fp32". ``constants``: of the ``tl.constexpr`` ones; None also of
    a pointer that the launch leaves out. ``divisible``: integers that are multiples of 16.
    """

    kernel: str
    types: dict[str, str]
    constants: dict[str, int | float | str | bool | None]
    capability: int = 90
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``registers``: of a thread. ``stack_bytes``: of a thread, above 0 where registers spill."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    seconds: float
    ptx: str

    def count(self, instruction: str) -> int:
        """Return how many PTX instructions begin with ``instruction``, such as "wgmma" or "cp.async.cg"."""
        return len(re.findall(rf"^\s*(?:@!?%p\d+ )?{re.escape(instruction)}", self.ptx, re.MULTILINE))


def compile_kernels(requests: Sequence[CompileRequest], timeout: float = 300) -> list[Compiled]:
    """Compile the kernels in a child process, and return the resources and PTX of each, in order. Needs no GPU.

    Raises ``CompileError`` for the first that does not compile, and ``subprocess.TimeoutExpired`` after ``timeout``
    seconds.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            python_command("-m", __name__),
            input=msgspec.json.encode(list(requests)),
            capture_output=True,
            env=environment | {"TRITON_CACHE_DIR": cache},
            timeout=timeout,
            check=False,
        )
    if done.returncode:
        raise CompileError(done.stderr.decode(errors="replace"))
    return msgspec.json.decode(done.stdout, type=list[Compiled])


def compile_kernel(request: CompileRequest) -> Compiled:
    """Compile a kernel in this process for the GPU generation that it names, and return its resources and PTX.

    Triton must not be interpreting here. Raises ``CompileError`` if the request names other arguments than the kernel
    has.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = request.kernel.partition(":")
    kernel: Any = getattr(importlib.import_module(module), name)
    order: list[str] = kernel.arg_names
    if unknown := (request.types.keys() | request.constants.keys()) ^ set(order):
        raise CompileError(f"{request.kernel}: arguments that are not its own, or missing: {sorted(unknown)}")
    signature = {name: request.types.get(name, "constexpr") for name in order}
    aligned = [name for name, kind in request.types.items() if kind.startswith("*") or name in request.divisible]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(order.index(name),): value for name, value in request.constants.items()},
        attrs={(order.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": request.num_warps, "num_stages": request.num_stages, "enable_fp_fusion": True}
    begin = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", request.capability, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    return Compiled(
        registers=registers,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        seconds=time.perf_counter() - begin,
        ptx=compiled.asm["ptx"],
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the stack bytes that one thread of the compiled kernel uses.

    They are read by the ``cuobjdump`` that comes with Triton.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise CompileError(f"no resources in what cuobjdump says: {text}")
    return int(found[1]), int(found[2])


def main() -> None:
    """Compile the kernels requested as JSON on standard input, and write their results as JSON to standard output."""
    requests = msgspec.json.decode(sys.stdin.buffer.read(), type=list[CompileRequest])
    results = [compile_kernel(request) for request in requests]
    sys.stdout.buffer.write(msgspec.json.encode(results))


if __name__ == "__main__":
    main()
