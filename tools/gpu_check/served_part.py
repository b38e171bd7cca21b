"""Speed of a server: what its clients see, beside the bare step of the same model. Weights are random.

Prompts are random numbers, so no prefix is cached. All requests of a load come at once, with prompts and
answers of one length. So a stream's gaps (ITL) are decode steps of one batch size.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from pdserve.runtime.python import python_command

from .bench_part import Bench
from .bench_shapes import Shape, config_of, shape_called
from .part import Part, run_group
from .record import Check, Finding
from .servers import serve
from .token_checks import compiled_kernels

LOAD_SECONDS = 150.0
"""Limit of one load."""
VOCABULARY = 50_000
"""Words in a dry run: more than the tokenizer's, as on a GPU."""


class Served:
    """A server of ``shape``, from ``start`` to ``stop``."""

    def __init__(self, part: Part, shape: Shape) -> None:
        self.part = part
        self.shape = shape
        self.itl_ms: dict[int, float] = {}
        """Median gaps by batch size, of the loads so far."""
        self._open = ExitStack()
        self._address: str | None = None

    @property
    def address(self) -> str:
        """Base URL of the server. Raises ``RuntimeError`` if it did not start."""
        if self._address is None:
            raise RuntimeError("the server did not start, see above")
        return self._address

    def start(self) -> Finding:
        """Start the server and wait until it is ready. Report the seconds, and the GPU memory in use."""
        begin = time.monotonic()
        folder = self.part.scratch / "served"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(self.shape)))
        rows = max(self.shape.asked)
        options = ["--model-path", str(folder), "--load-format", "dummy", "--device", self.part.device.type]
        options += [*self.part.server_tokenizer, "--max-running-requests", str(rows)]
        options += ["--max-total-tokens", str(rows * (self.shape.context + 512))]
        if self.part.dry_run:
            options += ["--dtype", "float32", "--context-length", "512"]
        else:
            options += ["--dtype", "bfloat16", "--attention-backend", "triton"]
        self._address = self._open.enter_context(serve(options, self.part.log(f"served {self.shape.name}")))
        summary = f"ready after {time.monotonic() - begin:.1f} s"
        if not self.part.dry_run:
            free, total = torch.cuda.mem_get_info()
            summary += f", {(total - free) / 2**30:.2f} GiB of the GPU in use"
        return Finding("", summary)

    def stop(self) -> Finding:
        """Stop the server, so that its memory is free for the bare steps."""
        self._open.close()
        self._address = None
        return Finding("", "stopped")

    def gaps(self, batch: int) -> Finding:
        """Stream ``batch`` answers at once, and report the time between their tokens (ITL) and the throughput.

        The median is kept in ``itl_ms``.
        """
        length = 8 if self.part.dry_run else 160
        report = self._load(self.shape.context, length, batch, batch)
        itl = report["itl"]
        self.itl_ms[batch] = itl["median"]
        text = f"ITL {itl['median']:.3f} ms (median), {itl['p99']:.3f} ms (p99)"
        return Finding("", f"{text}, {report['output_throughput']:.0f} tokens/s")

    def first_token(self, tokens: int) -> Finding:
        """Send prompts of ``tokens`` tokens one at a time, and report their times to the first token."""
        ttft = self._load(tokens, 2, 1, 3 if self.part.dry_run else 15)["ttft"]
        return Finding("", f"TTFT {ttft['median']:.2f} ms (median), {ttft['p90']:.2f} ms (p90)")

    def compiles(self) -> Finding:
        """Report how many kernels the server has compiled since it was ready; any is a failure."""
        count = compiled_kernels(self.address)
        return Finding("", f"{count} kernels compiled after it was ready", "none", not count)

    def _load(self, input_len: int, output_len: int, concurrency: int, prompts: int) -> Any:
        """Run ``pdserve bench serve`` on the server and return its report.

        Raises ``RuntimeError`` if a request failed.
        """
        path = self.part.scratch / "load.json"
        path.unlink(missing_ok=True)
        command = python_command("-m", "pdserve.server.cli", "bench", "serve", "--base-url", self.address, "--strict")
        command += ["--input-len", str(input_len), "--output-len", str(output_len), "--num-prompts", str(prompts)]
        command += ["--max-concurrency", str(concurrency), "--warmup-requests", "1", "--output-json", str(path)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOAD_SECONDS, check=False
        )
        if done.returncode or not path.is_file():
            raise RuntimeError(f"bench serve: {(done.stderr or done.stdout).strip()[-250:]}")
        return json.loads(path.read_text())["runs"][0]["report"]["total"]


def checks(part: Part, name: str) -> Iterator[Check]:
    """Yield a name and a function for each measurement of a server of the shape ``name``, then of bare steps."""
    shape = shape_called(name, part.dry_run)
    if part.dry_run:
        shape = shape._replace(config=shape.config | {"vocab_size": VOCABULARY})
    served, bench = Served(part, shape), Bench(part, shape, "torch" if part.dry_run else "triton")
    yield f"{name}: server started", served.start
    for batch in shape.asked:
        yield f"{name}: {batch} streams", lambda b=batch: served.gaps(b)  # type: ignore[misc]
    for tokens in (16, 40) if part.dry_run else (64, 512, 2048):
        yield f"{name}: prompts of {tokens}", lambda t=tokens: served.first_token(t)  # type: ignore[misc]
    yield f"{name}: compilations", served.compiles
    yield f"{name}: server stopped", served.stop
    yield f"{name}: bare steps loaded", bench.load
    for batch in shape.asked:
        yield f"{name}: {batch} streams beside bare steps", lambda b=batch: beside(served, bench, b)  # type: ignore[misc]


def beside(served: Served, bench: Bench, batch: int) -> Finding:
    """Compare the ITL that the server's clients saw with the time of the same step without a server."""
    if batch not in served.itl_ms:
        return Finding("", "not compared: the load was not measured")
    bare, seen = bench.steps.decode(batch, 3 if bench.part.dry_run else 60).step_ms, served.itl_ms[batch]
    return Finding("", f"ITL {seen:.3f} ms, bare step {bare:.3f} ms: {seen - bare:+.3f} ms, {seen / bare - 1:+.1%}")


GROUPS = {"1B": lambda part: checks(part, "1B"), "8B": lambda part: checks(part, "8B")}


if __name__ == "__main__":
    run_group("served", GROUPS)
