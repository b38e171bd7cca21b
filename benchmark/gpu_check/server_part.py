"""Real servers: in float32 the GPU's tokens are those of the CPU engine and of transformers, with graphs and without,
and nothing in a step's launch waits for the GPU.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..admin_key import admin_key
from .part import Part, open_part
from .record import Finding
from .servers import ask, generate, serve
from .token_checks import (
    LENGTH,
    SAME,
    Prompts,
    Tokens,
    answers_of,
    compare,
    compiled_kernels,
    judge,
    make_asked,
    save_packed,
    without_compiles,
)


def main() -> None:
    """All servers, one after another."""
    part = open_part("server")
    with tempfile.TemporaryDirectory() as folder:
        check_servers(part, Path(folder))
    part.recorder.finish()


def check_servers(part: Part, folder: Path) -> None:
    """``folder``: for the model and the logs."""
    asked = make_asked(part, folder)

    def check(name: str, args: Sequence[str], least: float = 1.0) -> None:
        part.recorder.check(name, lambda: compare(args, asked.log(name), asked.prompts, asked.reference, least))

    def check_packed(name: str, args: Sequence[str]) -> None:
        ending = "down_proj.weight" if part.dry_run else "proj.weight"
        packed, answer_by = save_packed(folder / "packed", asked.model, ending)
        few, length = (asked.prompts[:1], 3) if part.dry_run else (asked.prompts, LENGTH)
        expected = [tokens[:length] for tokens in answers_of(answer_by, few)]
        all_args = [*packed, *asked.options, "--dtype", "float32", "--device", part.device.type, *args]
        part.recorder.check(name, lambda: compare(all_args, asked.log(name), few, expected, 1.0, length))

    check("CPU engine, float32, against transformers", asked.on("cpu"))
    on_device = asked.on(part.device.type)
    if part.dry_run:
        # The interpreter takes long for products: a short context makes the steps of the start short, too.
        few = ["--attention-backend", "torch", "--context-length", "24"]
        check_packed("FP8 weights that stay packed, float32, against transformers", few)
        for backend in ("torch", "triton"):
            check(f"{backend}, float32, against transformers", [*on_device, "--attention-backend", backend])
        part.recorder.check("drawn tokens", lambda: check_drawn(asked.on("cpu"), on_device, folder, asked.prompts[-1]))
        return
    strict = ["--attention-backend", "triton", "--fail-on-host-sync"]
    check("triton, float32, graphs", [*on_device, *strict])
    check("triton, float32, no graphs", [*on_device, *strict, "--disable-cuda-graph"])
    check("triton, float32, no overlap", [*on_device, *strict, "--disable-overlap-schedule"])
    check_packed("FP8 weights that stay packed, float32, graphs", strict)
    check("torch backend, float32", [*on_device, "--attention-backend", "torch"])
    part.recorder.check(
        "triton, float32, drawn tokens",
        lambda: check_drawn(asked.on("cpu"), [*on_device, *strict], folder, asked.prompts[-1]),
    )
    half = [*asked.common, "--dtype", "bfloat16", "--device", part.device.type]
    for backend in ("triton", "flashinfer"):
        # In 16 bits rounding decides now and then, and what follows is another text.
        check(f"{backend}, bfloat16, graphs", [*half, "--attention-backend", backend, "--fail-on-host-sync"], least=0.5)
    again = [*on_device, "--attention-backend", "triton"]
    part.recorder.check(
        "memory given back and taken again", lambda: check_memory(again, folder, asked.prompts, asked.reference)
    )


DRAWN: list[dict[str, object]] = [
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2, "sampling_seed": 2},
    {"temperature": 1.0, "logit_bias": {"7": 5.0}, "min_new_tokens": 4, "presence_penalty": 0.5, "sampling_seed": 3},
]


def check_drawn(on_cpu: Sequence[str], on_device: Sequence[str], folder: Path, prompt: list[int]) -> Finding:
    """Tokens drawn at random, penalised and biased, against the CPU engine's: rounding decides hardly ever."""
    answers = []
    for name, args in (("cpu", on_cpu), ("device", on_device)):
        with serve(args, folder / f"drawn-{name}.log") as address:
            answers.append([generate(address, prompt, LENGTH, sampling=drawn) for drawn in DRAWN])
            compiled = compiled_kernels(address)
    return without_compiles(judge(answers[1], answers[0], 0.9, "all kinds of sampling"), compiled)


def check_memory(args: Sequence[str], folder: Path, prompts: Prompts, expected: Tokens) -> Finding:
    """Release weights and KV pool, resume them, and compare the bytes that were freed and the tokens afterwards."""
    admin, flags = admin_key(folder)
    with serve([*args, *flags], folder / "memory.log") as address:
        use = ask(f"{address}/server_info")["memory"]
        freed = ask(f"{address}/release_memory_occupation", {}, 30.0, admin)["freed_bytes"]
        ask(f"{address}/resume_memory_occupation", {}, 60.0, admin)
        found = judge([generate(address, prompt, LENGTH) for prompt in prompts], expected, 1.0, "")
    share = freed / (use["weights"] + use["kv_pool"])
    told = f"{share:.0%} of weights and pool given back, then {found.figure}"
    return Finding("", told, f"90%, then {SAME}", bool(found.ok) and share >= 0.9)


if __name__ == "__main__":
    main()
