"""Measures passes as llama.cpp's ``llama-batched-bench`` does: ``python -P -m tools.kernels.batched_bench``.

Each stream has a prompt of random tokens, computed ``--chunk`` tokens of all streams a pass. Then come steps of one
random token a stream. Passes alone are measured, nothing is sampled. All tokens differ, and their KV is what the model
makes of them, so streams choose experts of their own; in bench.py all choose alike. The same of llama.cpp, to be run in
turns: ``llama-batched-bench -m model.gguf -npp 128 -ntg 32 -npl 1,8 -c 2048 -t 2 -tb 2``. ``PDSERVE_CPU_ISA`` chooses
the kernels' level.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import NamedTuple

import torch

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import choose_level
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.load_setup import Threads
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.server.options import ServerOptions


class Speed(NamedTuple):
    """Tokens a second of the prompts, and of the steps."""

    prompt: float
    decode: float
    bytes_read: float
    """Bytes of weights that a step reads, on average."""


def main() -> None:
    """Measure prompts and decode steps at each number of streams, and print tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantization", choices=("none", "gguf", "int8", "int4"), default="gguf")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a stream after it (default: %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="(default: 1 8)")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a pass (default: %(default)s)")
    args = parser.parse_args()
    cpus = tuple(sorted(os.sched_getaffinity(0))[: args.threads])
    os.sched_setaffinity(0, cpus[:1])
    torch.set_num_threads(args.threads)
    print(f"level {choose_level().name}, {args.threads} threads, {args.model_path}, bfloat16, {args.quantization}")
    options = ServerOptions(
        model_path=args.model_path,
        device="cpu",
        dtype="bfloat16",
        attention_backend="cpu",
        quantization=args.quantization,
        max_total_tokens=max(args.streams) * (args.prompt + args.steps + ServerOptions().page_size),
    )
    model = load_model(options, Threads(cpus=cpus))
    for streams in args.streams:
        # As the other does it, what memory has to be found for first is found before.
        measure(model, streams, args.prompt, 1, args.chunk)
        speed = measure(model, streams, args.prompt, args.steps, args.chunk)
        gib = speed.bytes_read * speed.decode / streams / 1e9
        print(
            f"{streams:3} streams: prompt {speed.prompt:7.1f} tokens/s, decode {speed.decode:7.1f} tokens/s; "
            f"a step reads {speed.bytes_read / 1e6:.0f} MB of weights, {gib:.1f} GB/s"
        )


def measure(model: LoadedModel, streams: int, prompt: int, steps: int, chunk: int) -> Speed:
    """Compute ``streams`` prompts of ``prompt`` tokens, then ``steps`` decode steps of all streams. Return the speeds.

    ``chunk``: maximum number of prompt tokens in a pass.
    """
    size = model.pools.layout.page_size
    width = -(-(prompt + steps) // size) * size
    table = (torch.arange(streams * width, dtype=torch.int32) + size).view(streams, width)
    tokens = torch.randint(model.vocab_size, (streams, width), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    for rows, start, end in _pieces(streams, prompt, chunk):
        model.engine.host_logits(_batch(table, tokens, rows, start, end).on_host())
    decode = time.perf_counter()
    nbytes = 0
    for position in range(prompt, prompt + steps):
        model.engine.host_logits(_batch(table, tokens, range(streams), position, position + 1).on_host())
        nbytes += model.engine.weight_bytes_read()
    end_of_all = time.perf_counter()
    return Speed(streams * prompt / (decode - begin), streams * steps / (end_of_all - decode), nbytes / steps)


def _pieces(streams: int, prompt: int, chunk: int) -> list[tuple[range, int, int]]:
    """Return the passes for the prompts: the streams of each, and the range of the prompts' tokens that it computes.

    A pass has whole prompts of several streams, or a piece of one prompt if that is longer than ``chunk``.
    """
    if prompt <= chunk:
        together = chunk // prompt
        return [(range(i, min(i + together, streams)), 0, prompt) for i in range(0, streams, together)]
    cuts = [*range(0, prompt, chunk), prompt]
    return [(range(i, i + 1), a, b) for i in range(streams) for a, b in itertools.pairwise(cuts)]


def _batch(table: torch.Tensor, tokens: torch.Tensor, rows: range, start: int, end: int) -> ForwardBatch:
    """Make a pass of the tokens ``[start, end)`` of each of ``rows``, with the logits of each row's last token."""
    count, length = len(rows), end - start
    return ForwardBatch(
        input_ids=tokens[rows.start : rows.stop, start:end].reshape(-1),
        positions=torch.arange(start, end).repeat(count),
        out_cache_loc=table[rows.start : rows.stop, start:end].reshape(-1).long(),
        rows=torch.arange(rows.start, rows.stop),
        starts=[start] * count,
        q_lens=[length] * count,
        req_to_token=table,
        logit_indices=torch.arange(1, count + 1) * length - 1,
    )


if __name__ == "__main__":
    main()
