"""Real servers: in float32 the GPU's tokens are those of the CPU engine and of transformers.

That holds with graphs and without them. Nothing in a step's launch waits for the GPU.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence

from pdserve.model_runner.attention.flashinfer.support import missing
from pdserve.runtime.python import python_command

from ..servers.admin_key import admin_key
from .part import Part, run_group
from .record import Check, Finding
from .servers import ask, generate, serve
from .token_checks import (
    LENGTH,
    SAME,
    Asked,
    answers_of,
    compare,
    compiled_kernels,
    judge,
    make_asked,
    save_packed,
    without_compiles,
)


def on_cpu(part: Part) -> Iterator[Check]:
    """Yield a name and a function to compile the CPU kernels, and to compare the CPU engine with transformers."""
    yield "CPU kernels, compiled", build_kernels
    asked = make_asked(part)
    yield "CPU engine, float32, against transformers", lambda: check_tokens(asked, "CPU engine", asked.on("cpu"))


def on_device(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of servers on the device, or on the CPU in a dry run."""
    asked = make_asked(part)
    yield from _dry_checks(asked) if part.dry_run else _gpu_checks(asked)


def _dry_checks(asked: Asked) -> Iterator[Check]:
    cpu = asked.on("cpu")
    # The interpreter takes long for products: a short context makes the steps of the start short, too.
    few = ["--attention-backend", "torch", "--context-length", "24"]
    name = "FP8 weights that stay packed, float32, against transformers"
    yield name, lambda: check_packed(asked, name, few)
    for backend in ("torch", "triton"):
        title, args = f"{backend}, float32, against transformers", [*cpu, "--attention-backend", backend]
        yield title, lambda t=title, a=args: check_tokens(asked, t, a)  # type: ignore[misc]
    yield "drawn tokens", lambda: check_drawn(asked, cpu, cpu)


def _gpu_checks(asked: Asked) -> Iterator[Check]:
    gpu = asked.on("cuda")
    strict = ["--attention-backend", "triton", "--fail-on-host-sync"]
    plain = {
        "triton, float32, graphs": [*gpu, *strict],
        "triton, float32, no graphs": [*gpu, *strict, "--disable-cuda-graph"],
        "triton, float32, no overlap": [*gpu, *strict, "--disable-overlap-schedule"],
        "torch backend, float32": [*gpu, "--attention-backend", "torch"],
    }
    for name, args in plain.items():
        yield name, lambda n=name, a=args: check_tokens(asked, n, a)  # type: ignore[misc]
    packed = "FP8 weights that stay packed, float32, graphs"
    yield packed, lambda: check_packed(asked, packed, strict)
    yield "triton, float32, drawn tokens", lambda: check_drawn(asked, asked.on("cpu"), [*gpu, *strict])
    again = [*gpu, "--attention-backend", "triton"]
    yield "memory given back and taken again", lambda: check_memory(asked, again)
    half = [*asked.common, "--dtype", "bfloat16", "--device", "cuda", "--fail-on-host-sync", "--attention-backend"]
    # In 16 bits rounding decides now and then, and what follows is another text.
    yield "triton, bfloat16, graphs", lambda: check_tokens(asked, "triton-bfloat16", [*half, "triton"], 0.5)
    yield "flashinfer, bfloat16, graphs", lambda: check_flashinfer(asked, [*half, "flashinfer"])


GROUPS = {"cpu": on_cpu, "device": on_device}


def build_kernels() -> Finding:
    """Compile the CPU engine's kernels.

    Otherwise the first server on a CPU would, within the time limit of its start.
    """
    begin = time.monotonic()
    command = python_command("-m", "pdserve.model_runner.cpu_engine.build")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return Finding(
        "", f"{time.monotonic() - begin:.0f} s; {lines[-1] if lines else 'they were there'}", ok=not done.returncode
    )


def check_tokens(asked: Asked, name: str, args: Sequence[str], least: float = 1.0) -> Finding:
    """Compare a server's tokens with transformers'. ``args``: its options. ``least``: share of tokens that must agree.

    ``name``: for its log file.
    """
    return compare(args, asked.log(name), asked.prompts, asked.reference, least)


def check_flashinfer(asked: Asked, args: Sequence[str]) -> Finding:
    """Compare a server's tokens with transformers', if FlashInfer is installed; half of them must agree."""
    if why_not := missing():
        return Finding("", f"not run: {why_not}")
    return check_tokens(asked, "flashinfer-bfloat16", args, 0.5)


def check_packed(asked: Asked, name: str, args: Sequence[str]) -> Finding:
    """Compare the tokens of a server with FP8 weights with those of the dequantised weights in transformers."""
    part = asked.part
    packed, answer_by = save_packed(
        asked.folder / "packed", asked.model, "down_proj.weight" if part.dry_run else "proj.weight"
    )
    few, length = (asked.prompts[:1], 3) if part.dry_run else (asked.prompts, LENGTH)
    expected = [tokens[:length] for tokens in answers_of(answer_by, few)]
    all_args = [*packed, *asked.options, "--dtype", "float32", "--device", part.device.type, *args]
    return compare(all_args, asked.log(name), few, expected, 1.0, length)


DRAWN: list[dict[str, object]] = [
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2, "sampling_seed": 2},
    {"temperature": 1.0, "logit_bias": {"7": 5.0}, "min_new_tokens": 4, "presence_penalty": 0.5, "sampling_seed": 3},
]


def check_drawn(asked: Asked, cpu: Sequence[str], device: Sequence[str]) -> Finding:
    """Compare tokens sampled with all kinds of parameters on the device with the CPU engine's.

    ``cpu``, ``device``: options of the two servers. One in ten may differ, as rounding may decide.
    """
    answers, prompt = [], asked.prompts[1]
    for name, args in (("cpu", cpu), ("device", device)):
        with serve(args, asked.log(f"drawn {name}")) as address:
            answers.append([generate(address, prompt, LENGTH, sampling=drawn) for drawn in DRAWN])
            compiled = compiled_kernels(address)
    return without_compiles(judge(answers[1], answers[0], 0.9, "all kinds of sampling"), compiled)


def check_memory(asked: Asked, args: Sequence[str]) -> Finding:
    """Release a server's weights and KV pool and resume them. Check the bytes freed, and the tokens afterwards."""
    admin, flags = admin_key(asked.folder)
    with serve([*args, *flags], asked.log("memory")) as address:
        use = ask(f"{address}/server_info")["memory"]
        freed = ask(f"{address}/release_memory_occupation", {}, 30.0, admin)["freed_bytes"]
        ask(f"{address}/resume_memory_occupation", {}, 60.0, admin)
        found = judge([generate(address, prompt, LENGTH) for prompt in asked.prompts], asked.reference, 1.0, "")
    share = freed / (use["weights"] + use["kv_pool"])
    summary = f"{share:.0%} of weights and pool given back, then {found.figure}"
    return Finding("", summary, f"90%, then {SAME}", bool(found.ok) and share >= 0.9)


if __name__ == "__main__":
    run_group("server", GROUPS)
