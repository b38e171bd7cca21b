"""Measures decode steps that attend to few tokens: ``python -P -m tools.double_sparsity.bench --channels FILE``.

Beside it, on the same weights, the torch engine and the CPU kernels attend to all tokens. Passes alternate, so that
disturbances of the machine affect all of them. A ratio is the median of those of the rounds, to the first. Contexts may
be longer than the model's own: what is computed means nothing, and takes as long.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import torch

from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.load_setup import Threads
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.server.options import ServerOptions

from ..kernels.kv_bench import Decodes, fill, measure


def main() -> None:
    """Measure decode steps with attention to few and to all tokens, at the batch sizes and contexts asked for.

    Print times.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", required=True, help="file of `pdserve calibrate`")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--chosen", type=int, default=256)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    cpus = tuple(sorted(os.sched_getaffinity(0))[: args.threads])
    torch.set_num_threads(args.threads)
    cases = [Decodes(rows, context) for rows in args.rows for context in args.contexts]
    slots = max(case.rows * (case.context + ServerOptions().page_size) for case in cases)
    models = make_models(args.model_path, args.channels, args.chosen, slots, cpus)
    print(f"{args.threads} threads, {args.model_path}, bfloat16")
    for name, model in models.items():
        print(f"{name}: {model.pools.layout.page_bytes // model.pools.layout.page_size} bytes a token")
    for case in cases:
        measure(case, models, args.turns)


def make_models(
    model_path: str, channels: str, chosen: int, slots: int, cpus: tuple[int, ...]
) -> dict[str, LoadedModel]:
    """Load one model with three kinds of attention, and return the three by name. Fill their KV pools.

    They are torch over all tokens, torch over ``chosen`` tokens, and the CPU kernels over all. ``channels``: file of
    `pdserve calibrate`. ``slots``: tokens that each pool has room for.
    """
    torch_all = ServerOptions(
        model_path=model_path,
        device="cpu",
        dtype="bfloat16",
        quantization="none",
        max_total_tokens=slots,
        attention_backend="torch",
    )
    sparse = replace(
        torch_all,
        enable_double_sparsity=True,
        ds_channel_config_path=channels,
        ds_heavy_token_num=chosen,
        ds_sparse_decode_threshold=0,
    )
    asked = {
        "torch, all": torch_all,
        f"torch, {chosen}": sparse,
        "cpu, all": replace(torch_all, attention_backend="cpu"),
    }
    models = {}
    for name, options in asked.items():
        model = models[name] = load_model(options, Threads(cpus=cpus))
        fill(model.pools.pool)
    return models


if __name__ == "__main__":
    main()
