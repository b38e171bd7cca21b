"""A prefill and a decode instance, and requests that go from one to the other."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.runtime.python import python_command

from .servers import free_port, generate, serve_all


class Pair(NamedTuple):
    """Addresses of both, and the port at which the prefill waits for decodes."""

    prefill: str
    decode: str
    port: int

    def answer(self, room: int, prompt: Sequence[int], length: int) -> list[int]:
        """Send a request to both instances; return the ``length`` tokens that the decode generates after ``prompt``.

        The prefill computes the prompt. ``room``: a number that no other request of the pair has.
        """
        where: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        args = (self.prefill, prompt, length)
        prefilled = threading.Thread(target=generate, args=args, kwargs=where, daemon=True)
        prefilled.start()
        tokens = generate(self.decode, prompt, length, **where)
        prefilled.join(60)
        return tokens


@contextmanager
def serve_pair(backend: str, prefill: Sequence[str], decode: Sequence[str], logs: tuple[Path, Path]) -> Iterator[Pair]:
    """Run a prefill and a decode instance within the ``with`` block, and yield their addresses.

    ``prefill``, ``decode``: their options. ``logs``: their log files. Raises ``ServerFailed``.
    """
    transfer, port = ["--disaggregation-transfer-backend", backend], free_port()
    one = [*prefill, *transfer, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)]
    other = [*decode, *transfer, "--disaggregation-mode", "decode", "--disaggregation-threshold", "always"]
    with serve_all([(one, logs[0]), (other, logs[1])]) as [prefill_address, decode_address]:
        yield Pair(prefill_address, decode_address, port)


@cache
def missing(backend: str) -> str:
    """Return why the transfer backend ``backend`` can't be loaded, "" if it can.

    Another process tries it, because libraries may change the process that loads them.
    """
    code = (
        "import os, sys\n"
        "from pdserve.disaggregation.errors import BackendUnavailable\n"
        "from pdserve.disaggregation.transfer.backends.load import find_backend\n"
        "try: find_backend(sys.argv[1])\n"
        "except BackendUnavailable as e: print(e, flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run(python_command("-c", code, backend), capture_output=True, text=True, check=False)
    return done.stdout.strip()
