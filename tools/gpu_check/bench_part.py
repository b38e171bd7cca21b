"""Speed of steps on a GPU, with random weights of an 8B and of a 1B model.

Decode steps are compared with the rate at which this GPU reads memory, prompts with the rate at which it multiplies. It
also compares attention backends, and measures what a step costs the host and what it launches.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator

import torch

from pdserve.model_files.spec import AttentionSpec
from pdserve.model_runner.attention.flashinfer.support import missing
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.server.options import ServerOptions

from . import packed_checks, rates
from .bench_shapes import PACKED_SHAPES, Shape, config_of, shape_called
from .bench_steps import BenchSteps
from .part import Part, run_group
from .record import Check, Finding
from .step_profile import profiled, summarise, write_table

OVERWRITTEN_STEPS = 24


class Bench:
    """A model under a backend, loaded by the first check that needs it."""

    def __init__(self, part: Part, shape: Shape, backend: str) -> None:
        self.part = part
        self.shape = shape
        self.backend = backend
        self._steps: BenchSteps | None = None

    @property
    def label(self) -> str:
        """Model and backend, the first words of the names of this model's checks."""
        return f"{self.shape.name}, {self.backend}"

    @property
    def steps(self) -> BenchSteps:
        """Steps of the loaded model. Raises ``RuntimeError`` if loading it failed."""
        if self._steps is None:
            raise RuntimeError("the model was not loaded, see above")
        return self._steps

    def load(self) -> Finding:
        """Load the model with random weights and capture its CUDA graphs. Report the times and the memory."""
        begin = time.monotonic()
        folder = self.part.scratch / self.shape.name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(self.shape)))
        model = _runner(self.part, self.shape, self.backend, str(folder))
        loaded = time.monotonic() - begin
        self._steps = steps = BenchSteps(model, max(self.shape.asked), self.shape.context)
        seconds, reserved, added = steps.captured
        text = (
            f"{loaded:.1f} s; graphs of {len(model.engine.graph_sizes)} sizes in {seconds:.1f} s, for which torch took "
        )
        return Finding("", f"{text}{added / 2**20:.0f} MiB; {reserved / 2**30:.2f} GiB in all after it")

    def unload(self) -> Finding:
        """Free the model's memory. Report how much torch still holds."""
        self._steps = None
        gc.collect()
        held = 0
        if not self.part.dry_run:
            torch.cuda.empty_cache()
            held = torch.cuda.memory_allocated()
        return Finding("", f"{held / 2**20:.0f} MiB still held")


def small_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each measurement of a 1B model's steps; the function runs it."""
    yield from _of_backends(part, shape_called("1B", part.dry_run))


def large_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each measurement of an 8B model's steps; the function runs it."""
    yield from _of_backends(part, shape_called("8B", part.dry_run))


def packed_model_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each measurement with packed weights: products alone, then whole models."""
    yield from packed_checks.rates(part)
    for name in PACKED_SHAPES:
        shape = shape_called(name, part.dry_run)
        if shape.quantization == "w8a8" and not packed_checks.multiplies_fp8(part):
            yield shape.name, lambda: Finding("", packed_checks.NO_FP8)
            continue
        yield from _of_model(Bench(part, shape, "triton"))


def graph_checks(part: Part) -> Iterator[Check]:
    """Yield checks that a CUDA graph reads no freed memory: steps run while freed memory is overwritten."""
    bench = Bench(part, shape_called("1B", part.dry_run), "triton")
    yield f"{bench.label}: loaded for overwritten memory", bench.load
    for batch in bench.shape.asked:
        yield (
            f"{bench.label}: graph of {batch}, freed memory overwritten",
            lambda b=batch: check_overwritten(bench, b),  # type: ignore[misc]
        )


GROUPS = {
    "rates": rates.checks,
    "1B": small_checks,
    "8B": large_checks,
    "graphs": graph_checks,
    "packed": packed_model_checks,
}


def _of_backends(part: Part, shape: Shape) -> Iterator[Check]:
    for backend in ("triton", "torch") if part.dry_run else ("triton", "flashinfer", "torch"):
        if backend == "flashinfer" and (why_not := missing()):
            yield f"{shape.name}, flashinfer", lambda why=why_not: Finding("", f"not run: {why}")  # type: ignore[misc]
            continue
        yield from _of_model(Bench(part, shape, backend))


def _of_model(bench: Bench) -> Iterator[Check]:
    shape, label = bench.shape, bench.label
    is_asked = bench.backend != "torch"
    yield f"{label}: loaded", bench.load
    for batch, share in shape.asked.items():
        least = share if is_asked else 0.0
        yield f"{label}: decode of {batch}", lambda b=batch, s=least: check_decode(bench, b, s)  # type: ignore[misc]
    of_prompt = shape.asked_of_prompt if is_asked else None
    yield f"{label}: prompt of {shape.prompt}", lambda: check_prompt(bench, of_prompt)
    if is_asked:
        yield f"{label}: what a decode step of 1 launches", lambda: check_launches(bench)
    yield f"{label}: unloaded", bench.unload


def check_decode(bench: Bench, batch: int, least: float) -> Finding:
    """Time decode steps of ``batch`` rows, and report the rate at which they read weights and KV.

    ``least``: share of the copy rate that is required; 0 requires nothing.
    """
    steps, shape = bench.steps, bench.shape
    times = steps.decode(batch, 3 if bench.part.dry_run else 60)
    kv = batch * shape.context * steps.model.pools.layout.page_bytes // steps.model.pools.page_size
    speed = (steps.model.engine.step_weight_bytes + kv) / (times.step_ms / 1e3)
    share, of_copy = speed / rates.read_rate(bench.part), speed / rates.copy_rate(bench.part)
    idle = "" if math.isnan(times.idle) else f", GPU idle {times.idle:.1%}"
    figure = f"{times.step_ms:.3f} ms, {share:.0%} of the read rate, {of_copy:.0%} of the copy rate"
    figure += f", launch {times.launch_ms:.3f} ms{idle}"
    asked = f"at least {least:.0%} of the copy rate" if least else ""
    return Finding("", figure, asked, of_copy >= least if least else None)


def check_prompt(bench: Bench, least: float | None) -> Finding:
    """Time a prompt's prefill, and report its operations per second as a share of the multiplying rate.

    Operations are two for each weight and token, and attention's. ``least``: share that is required; None requires
    nothing.
    """
    shape = bench.shape
    took = bench.steps.prefill(shape.prompt, 2 if bench.part.dry_run else 7)
    spec = bench.steps.model.spec
    assert spec is not None
    weights, hidden = 0, spec.hidden_size
    for layer in spec.layers:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        weights += hidden * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
        weights += 3 * hidden * layer.mlp.inner
    heads = sum(layer.attention.heads * layer.attention.head_dim for layer in spec.layers)
    operations = 2 * weights * shape.prompt + 2 * heads * shape.prompt**2
    share = operations / (took / 1e3) / rates.matmul_rate(bench.part)
    figure = f"{took:.1f} ms, {shape.prompt / took * 1e3:.0f} tokens/s, {share:.0%} of the multiplying rate"
    return Finding(
        "", figure, "" if least is None else f"at least {least:.0%}", None if least is None else share >= least
    )


def check_launches(bench: Bench) -> Finding:
    """Count the kernels that a decode step of one row launches, by the profiler.

    Write a table of them to the results.
    """
    steps, count = bench.steps, 2 if bench.part.dry_run else 20
    steps.decode(1, count)
    kernels = profiled(bench.part, lambda: steps.tokens(1, range(count), overwrite=False))
    path = bench.part.results / f"kernels-{bench.label.replace(', ', '-').replace(' ', '-')}.txt"
    write_table(kernels, count, path)
    return Finding("", f"{summarise(kernels, count)}; {path.name}")


def check_overwritten(bench: Bench, batch: int) -> Finding:
    """Check that steps give the same tokens if freed memory is overwritten between them."""
    positions = range(2 if bench.part.dry_run else OVERWRITTEN_STEPS)
    bench.steps.begin(batch)
    expected = bench.steps.tokens(batch, positions, overwrite=False)
    found = bench.steps.tokens(batch, positions, overwrite=True)
    other = sum(one != two for one, two in zip(found, expected, strict=True))
    return Finding("", f"{other} of {len(expected)} steps gave other tokens", "none", not other)


def _runner(part: Part, shape: Shape, backend: str, folder: str) -> LoadedModel:
    rows = max(shape.asked)
    options = ServerOptions(
        model_path=folder,
        load_format="dummy",
        device="cpu" if part.dry_run else "cuda",
        dtype="float32" if part.dry_run else "bfloat16",
        attention_backend=backend,  # type: ignore[arg-type]
        quantization=shape.quantization,
        max_running_requests=rows,
        max_total_tokens=max(rows * (shape.context + 256), 2 * shape.prompt),
        cuda_graph_bs=",".join(str(batch) for batch in shape.asked),
    )
    return load_model(options)


if __name__ == "__main__":
    run_group("bench", GROUPS)
