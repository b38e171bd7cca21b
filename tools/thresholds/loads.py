"""The loads of the comparison, as options of ``pdserve bench serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.benchmark.options import BenchOptions

WARMUP_REQUESTS = 4
TRACE_LENGTHS = 1 / 32
TRACE_REQUESTS = 120

LOADS: Final[dict[str, dict[str, Any]]] = {
    "streams-4": {"max_concurrency": [4], "num_prompts": 40, "input_len": 64, "output_len": 200},
    "streams-16": {"max_concurrency": [16], "num_prompts": 96, "input_len": 64, "output_len": 200},
    "open": {"request_rate": [4.0], "num_prompts": 120, "input_len": 64, "output_len": 64},
    "long": {"request_rate": [1.2], "num_prompts": 36, "input_len": 1000, "output_len": 8},
    "middle": {"request_rate": [3.0], "num_prompts": 90, "input_len": 300, "output_len": 40},
    "closed": {
        "duration": 32,
        "groups": [
            {"name": "short", "concurrency": 4, "input_len": 64, "output_len": 100},
            {"name": "long", "start": 2, "every": 4, "input_len": 1500, "output_len": 4},
        ],
    },
    "mixed": {"scenario": "mixed"},
    "trace": {"dataset": "trace", "length_scale": TRACE_LENGTHS, "num_prompts": TRACE_REQUESTS},
}
"""Loads by name; one with ``groups`` is a scenario of its own."""


def bench_options(name: str, seed: int, base_url: str, pace: float, trace: Path | None, folder: Path) -> BenchOptions:
    """Return the options of ``pdserve bench serve`` for the load ``name``. A scenario's file is written to ``folder``.

    ``pace``: factor for arrival rates. ``trace``: file for the load "trace".
    """
    fields = dict(LOADS[name])
    if "groups" in fields:
        path = folder / f"{name}.yaml"
        path.write_bytes(msgspec.yaml.encode(fields))
        fields = {"scenario": str(path)}
    if "request_rate" in fields:
        fields["request_rate"] = [rate * pace for rate in fields["request_rate"]]
    if name == "trace":
        fields |= {"dataset_path": trace, "time_scale": 1 / pace}
    fields |= {"base_url": base_url, "seed": seed, "warmup_requests": WARMUP_REQUESTS}
    return BenchOptions(slo_ttft_ms=3000.0, slo_tpot_ms=40.0, **fields)
