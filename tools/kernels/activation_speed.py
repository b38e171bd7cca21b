"""Measures passes with each way to round activations: ``python -P -m tools.kernels.activation_speed``.

The CPU engine on a GGUF file's own blocks, with activations of 16 and of 8 bits, and on the dequantised weights in
bfloat16. The ways take turns in each round. Each figure is the median over the rounds, with an interval that holds the
true median with a probability of at least 95 %. ``PDSERVE_CPU_ISA`` chooses the kernels' level.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import choose_level
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.load_setup import Threads
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.server.options import ServerOptions

from .bench import CONTEXT, make_batch

STREAMS = (1, 8)
PROMPT = 512
ROW_SLOTS = 1024
SECONDS = 0.4
"""Each figure of a round is the median of as many passes as fit into this, three at least."""


class Way(NamedTuple):
    """A loaded model, and the passes that are measured, by name, with the tokens of each."""

    model: LoadedModel
    passes: dict[str, tuple[int, ForwardBatch]]


def main() -> None:
    """Measure tokens per second of each way to round activations, in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2", help="a GGUF (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="6 at least (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.rounds < 6:
        parser.error("fewer than 6 rounds have no interval of 95 %")
    cpus = tuple(sorted(os.sched_getaffinity(0))[: args.threads])
    os.sched_setaffinity(0, cpus[:1])
    torch.set_num_threads(args.threads)
    ways = {
        "blocks, int16": load(args.model_path, cpus, quantization="gguf", quantized_activations="int16"),
        "blocks, int8": load(args.model_path, cpus, quantization="gguf", quantized_activations="int8"),
        "dequantised, bfloat16": load(args.model_path, cpus, quantization="none"),
    }
    names = list(ways["blocks, int16"].passes)
    print(f"level {choose_level().name}, {args.threads} threads, {args.model_path}, {args.rounds} rounds; tokens/s")
    rounds = [{way: run(loaded) for way, loaded in ways.items()} for _ in range(args.rounds)]
    print(f"{'':24}" + "".join(f"{name:>28}" for name in names))
    for way in ways:
        print(f"{way:24}" + "".join(f"{describe([found[way][name] for found in rounds]):>28}" for name in names))


def load(model_path: str, cpus: tuple[int, ...], **options: str) -> Way:
    """Load the model into the CPU engine in bfloat16, with further server ``options``. Prepare the passes to measure.

    ``cpus``: cores of its threads.
    """
    model = load_model(
        ServerOptions(
            model_path=model_path,
            device="cpu",
            dtype="bfloat16",
            attention_backend="cpu",
            max_total_tokens=max(STREAMS) * ROW_SLOTS,
            chunked_prefill_size=-1,
            **options,  # type: ignore[arg-type]
        ),
        Threads(cpus=cpus),
    )
    rows, size = max(STREAMS), model.pools.layout.page_size
    table = (torch.arange(rows * ROW_SLOTS, dtype=torch.int32) + size).view(rows, ROW_SLOTS)
    passes = {
        f"decode, {count} stream{'s' if count > 1 else ''}": (
            count,
            make_batch(table, [CONTEXT] * count, [1] * count, model.vocab_size),
        )
        for count in STREAMS
    }
    passes[f"prompt of {PROMPT}"] = (PROMPT, make_batch(table, [0], [PROMPT], model.vocab_size))
    return Way(model, passes)


def run(way: Way) -> dict[str, float]:
    """Run each pass of a way, and return its tokens per second by the pass's name."""
    # The prompt first: it writes the keys and values that decodes read.
    order = sorted(way.passes, key=lambda name: -way.passes[name][0])
    compute = way.model.engine.host_logits
    return {name: way.passes[name][0] / middle(partial(compute, way.passes[name][1].on_host())) for name in order}


def middle(work: Callable[[], object]) -> float:
    """Run ``work`` at least four times and for ``SECONDS``; return the median seconds. The first run does not count."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def describe(values: Sequence[float]) -> str:
    """Format the median of ``values`` and an interval that has the true median with at least 95 % probability."""
    ordered, count = sorted(values), len(values)
    cut = 0
    while 2 * sum(math.comb(count, i) for i in range(cut + 2)) / 2**count <= 0.05:
        cut += 1
    return f"{statistics.median(values):.1f} ({ordered[cut]:.1f} to {ordered[-1 - cut]:.1f})"


if __name__ == "__main__":
    main()
