"""Speed: decode steps against the rate that this GPU copies memory at, prompts against the rate that it multiplies
at, attention backends beside each other, and what a step costs the host. Weights are random, of an 8B and of a 1B.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ...model_files.spec import AttentionSpec
from ...model_runner.model_runner import ModelRunner
from ...runtime.options import ServerOptions
from . import packed_checks
from .bench_steps import BenchSteps
from .part import Part, open_part
from .record import Finding

COMMON = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
COMMON |= {"rope_theta": 500000.0, "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "bos_token_id": 1}
COMMON |= {"eos_token_id": 2}


class Shape(NamedTuple):
    """A model's sizes, and what is asked of it: of the copying rate by batch size, of the multiplying rate by a prompt.

    ``prompt``: tokens. ``quantization``: of the server's options, by Triton alone where it is not "none".
    """

    name: str
    config: dict[str, object]
    context: int
    prompt: int
    asked: dict[int, float]
    asked_of_prompt: float | None
    quantization: Literal["none", "packed", "w8a8"] = "none"


BLOCKS: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ: dict[str, object] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
PACKED: tuple[tuple[str, dict[str, object], Literal["packed", "w8a8"]], ...] = (
    ("FP8 blocks", BLOCKS, "packed"),
    ("FP8 blocks by FP8", BLOCKS, "w8a8"),
    ("four bits", AWQ, "packed"),
)


def shapes(dry_run: bool) -> list[Shape]:
    """The sizes of Llama 3.1 8B and of Llama 3.2 1B, and the first packed."""
    if dry_run:
        tiny = _sizes(64, 128, 2, 4, 2, 512, head_dim=64)
        few = {1: 0.0, 2: 0.0}
        packed = [(kind, tiny | {"quantization_config": how}, use) for kind, how, use in PACKED]
        return [
            Shape("tiny", tiny, 64, 64, few, None),
            *(Shape(f"tiny in {kind}", config, 8, 16, few, None, use) for kind, config, use in packed),
        ]
    large = _sizes(4096, 14336, 32, 32, 8, 128_256)
    few = {1: 0.0, 8: 0.0, 64: 0.0}
    small = _sizes(2048, 8192, 16, 32, 8, 128_256, head_dim=64, tied=True)
    return [
        Shape("1B", small, 1024, 2048, {1: 0.7, 16: 0.0, 64: 0.0}, None),
        Shape("8B", large, 1024, 2048, {1: 0.8, 8: 0.8, 64: 0.8}, 0.6),
        *(
            Shape(f"8B in {kind}", large | {"quantization_config": how}, 1024, 2048, dict(few), None, use)
            for kind, how, use in PACKED
        ),
    ]


def _sizes(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    head_dim: int = 0,
    tied: bool = False,
) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "head_dim": head_dim or hidden // heads,
        "tie_word_embeddings": tied,
    }


def main() -> None:
    """Rates of the GPU first: the figures are shares of them."""
    part = open_part("bench")
    rates = {"copy": 0.0, "matmul": 0.0}

    def measured(name: str, measure: Callable[[Part], float], unit: float, text: str) -> None:
        def find() -> Finding:
            rates[name] = measure(part)
            return Finding("", f"{rates[name] / unit:.1f} {text}")

        part.recorder.check(f"{name} rate", find)

    measured("copy", copy_rate, 1e9, "GB/s, read and written")
    measured("matmul", matmul_rate, 1e12, "TFLOP/s in bfloat16")
    for name, find in packed_checks.rates(part, rates["copy"]):
        part.recorder.check(f"product of {name}", find)
    for shape in shapes(part.dry_run):
        all_backends = ("torch", "triton") if part.dry_run else ("flashinfer", "triton", "torch")
        for backend in all_backends if shape.quantization == "none" else ("triton",):
            check_model(part, shape, backend, rates)
    part.recorder.finish()


def check_model(part: Part, shape: Shape, backend: str, rates: dict[str, float]) -> None:
    """Load it once, measure all of it."""
    label = f"{shape.name}, {backend}"
    if shape.quantization == "w8a8" and not packed_checks.multiplies_fp8(part):
        part.recorder.check(label, lambda: Finding("", packed_checks.NO_FP8))
        return
    steps: list[BenchSteps] = []

    def load() -> Finding:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(COMMON | shape.config))
            steps.append(BenchSteps(_runner(part, shape, backend, folder), max(shape.asked), shape.context))
        return Finding("", f"{time.monotonic() - begin:.1f} s, graphs of {len(steps[0].model.graph_sizes)} sizes")

    part.recorder.check(f"{label}: loaded", load)
    if not steps:
        return
    asked = shape.asked if backend != "torch" else dict.fromkeys(shape.asked, 0.0)
    for batch, share in asked.items():
        name = f"{label}: decode of {batch}"
        part.recorder.check(name, lambda b=batch, s=share: check_decode(part, steps[0], shape, b, s, rates["copy"]))  # type: ignore[misc]
    least = shape.asked_of_prompt if backend != "torch" else None
    part.recorder.check(
        f"{label}: prompt of {shape.prompt}", lambda: check_prompt(part, steps[0], shape, least, rates["matmul"])
    )
    steps.clear()
    if part.device.type == "cuda":
        torch.cuda.empty_cache()


def check_decode(part: Part, steps: BenchSteps, shape: Shape, batch: int, least: float, rate: float) -> Finding:
    """Bytes that the step must read (weights, and its rows' KV) in its time, as a share of the copying rate."""
    times = steps.decode(batch, 3 if part.dry_run else 40)
    kv = batch * shape.context * steps.model.layout.page_bytes // steps.model.page_size
    share = (steps.model.step_weight_bytes + kv) / (times.step_ms / 1e3) / rate
    idle = "" if math.isnan(times.idle) else f", GPU idle {times.idle:.1%}"
    figure = f"{times.step_ms:.3f} ms, {share:.0%} of the copy rate, launch {times.launch_ms:.3f} ms{idle}"
    return Finding("", figure, f"at least {least:.0%}" if least else "", share >= least if least else None)


def check_prompt(part: Part, steps: BenchSteps, shape: Shape, least: float | None, rate: float) -> Finding:
    """Two operations for each weight and token, and attention's, as a share of the multiplying rate."""
    took = steps.prefill(shape.prompt, 2 if part.dry_run else 5)
    spec = steps.model.spec
    assert spec is not None
    weights, hidden = 0, spec.hidden_size
    for layer in spec.layers:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        weights += hidden * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
        weights += 3 * hidden * layer.mlp.inner
    heads = sum(layer.attention.heads * layer.attention.head_dim for layer in spec.layers)
    operations = 2 * weights * shape.prompt + 2 * heads * shape.prompt**2
    share = operations / (took / 1e3) / rate
    figure = f"{took:.1f} ms, {shape.prompt / took * 1e3:.0f} tokens/s, {share:.0%} of the matmul rate"
    return Finding(
        "", figure, "" if least is None else f"at least {least:.0%}", None if least is None else share >= least
    )


def copy_rate(part: Part) -> float:
    """Bytes a second, read and written, the best of several."""
    nbytes = 1 << (24 if part.dry_run else 31)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=part.device)
    target = torch.empty_like(source)
    return 2 * nbytes / _best(part, lambda: target.copy_(source))


def matmul_rate(part: Part) -> float:
    """Operations a second of a product of two square matrices."""
    size = 256 if part.dry_run else 8192
    a, b = (torch.randn(size, size, device=part.device).bfloat16() for _ in range(2))
    return 2 * size**3 / _best(part, lambda: a @ b)


def _best(part: Part, run: Callable[[], object]) -> float:
    """Seconds."""
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        run()
        if part.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def _runner(part: Part, shape: Shape, backend: str, folder: str) -> ModelRunner:
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
    return ModelRunner(options)


if __name__ == "__main__":
    main()
