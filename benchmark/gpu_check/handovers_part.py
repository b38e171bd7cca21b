"""KV from instance to instance by each backend there is, and ranks on several GPUs: the tokens are transformers'."""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...runtime.python import python_command
from . import ipc_check
from .part import Part, open_part
from .record import Finding
from .servers import ask, free_port, generate, serve_all
from .token_checks import LENGTH, Asked, compare, judge, make_asked


class Sides(NamedTuple):
    """Options of a prefill and of a decode, and the backend between them. ``gpus``: how many there must be."""

    name: str
    backend: str
    prefill: list[str]
    decode: list[str]
    gpus: int = 1


class Ranks(NamedTuple):
    """Options of an instance of several."""

    name: str
    options: list[str]
    gpus: int = 2


def main() -> None:
    """What has been tried least comes first: the time of a part is limited."""
    part = open_part("handovers")
    for name, find in ipc_check.checks(part):
        part.recorder.check(name, find)
    with tempfile.TemporaryDirectory() as folder:
        asked = make_asked(part, Path(folder))
        for ranks in instances(part, asked):
            part.recorder.check(ranks.name, lambda ranks=ranks: check_ranks(part, ranks, asked))  # type: ignore[misc]
        for sides in pairs(part, asked):
            part.recorder.check(sides.name, lambda sides=sides: check_pair(part, sides, asked))  # type: ignore[misc]
    part.recorder.finish()


def pairs(part: Part, asked: Asked) -> list[Sides]:
    """Everything that KV can take from a GPU to a GPU, or between a GPU and a CPU."""
    if part.dry_run:
        staged = [*asked.on("cpu"), "--attention-backend", "torch", "--kv-staging-size", "0.002"]
        kinds = ("tcp", "nixl", "mooncake")
        through = [Sides(f"prefill and decode through host memory, by {kind}", kind, staged, staged) for kind in kinds]
        plain = [*asked.on("auto"), "--attention-backend", "torch"]
        return [*through, Sides("from pool to pool of a GPU, by cuda_ipc", "cuda_ipc", plain, plain)]
    gpu, cpu = [*asked.on("cuda"), "--attention-backend", "triton"], asked.on("cpu")
    direct, second = ["--kv-staging-size", "0"], ["--base-gpu-id", "1"]
    return [
        Sides("on one GPU, from pool to pool, by cuda_ipc", "cuda_ipc", gpu, gpu),
        Sides("on one GPU, from pool to pool, by nixl", "nixl", [*gpu, *direct], [*gpu, *direct]),
        Sides("on one GPU, by tcp", "tcp", gpu, gpu),
        Sides("on one GPU, by nixl", "nixl", gpu, gpu),
        Sides("on one GPU, by mooncake", "mooncake", gpu, gpu),
        Sides("prefill on the CPU, decode on the GPU, by shm", "shm", cpu, gpu),
        Sides("prefill on the GPU, decode on the CPU, by shm", "shm", gpu, cpu),
        Sides("on two GPUs, from pool to pool, by cuda_ipc", "cuda_ipc", gpu, [*gpu, *second], 2),
        Sides("on two GPUs, from pool to pool, by nixl", "nixl", [*gpu, *direct], [*gpu, *direct, *second], 2),
    ]


def instances(part: Part, asked: Asked) -> list[Ranks]:
    """Of several ranks; in a dry run those of torch on the CPU are all that there is."""
    two = ["--tp-size", "2"]
    if part.dry_run:
        on_cpu = [*asked.on("cpu"), *two, "--attention-backend", "torch"]
        return [Ranks("two ranks, over gloo", on_cpu, 0), Ranks("two ranks, over NCCL", [])]
    gpus = [*asked.on("cuda"), *two, "--attention-backend", "triton", "--fail-on-host-sync"]
    return [
        Ranks("two ranks, over NCCL", gpus),
        Ranks("two ranks, over NCCL, in graphs", [*gpus, "--cuda-graph-max-bs", "4"]),
    ]


def check_pair(part: Part, sides: Sides, asked: Asked) -> Finding:
    """Tokens of a decode whose prompts another instance computed, and how many bytes came of them."""
    if why_not := _too_few(part, sides.gpus) or missing(sides.backend):
        return Finding("", f"not run: {why_not}")
    transfer, port = ["--disaggregation-transfer-backend", sides.backend], free_port()
    prefill = [*sides.prefill, *transfer, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port"]
    decode = [*sides.decode, *transfer, "--disaggregation-mode", "decode", "--disaggregation-threshold", "always"]
    servers = [([*prefill, str(port)], asked.log(f"{sides.name} P")), (decode, asked.log(f"{sides.name} D"))]
    with serve_all(servers) as [one, other]:
        found = []
        for room, prompt in enumerate(asked.prompts, 1):
            where: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
            prefilled = _later(one, prompt, where)
            found.append(generate(other, prompt, LENGTH, **where))
            prefilled.join(30)
        computed = ask(f"{other}/server_info")["counters"]["prompt_tokens"]
    finding = judge(found, asked.reference, 1.0, f"by {sides.backend}")
    finding.ok = bool(finding.ok) and not computed  # else the decode has not needed what came
    return finding


def check_ranks(part: Part, ranks: Ranks, asked: Asked) -> Finding:
    """Tokens of an instance whose layers are divided."""
    if why_not := _too_few(part, ranks.gpus):
        return Finding("", f"not run: {why_not}")
    return compare(ranks.options, asked.log(ranks.name), asked.prompts, asked.reference, 1.0)


def _too_few(part: Part, gpus: int) -> str:
    """Why something that takes so many GPUs can't run here, "" where it can; what one is enough for has a stand-in in
    a dry run, or says itself that it has none.
    """
    there = 0 if part.dry_run else torch.cuda.device_count()
    return f"it takes {gpus} GPUs, and there are {there}" if gpus > max(there, 1) else ""


@cache
def missing(backend: str) -> str:
    """Why a transfer backend can't be loaded, "" where it can. Asked of another process: what libraries do as they are
    loaded stays there.
    """
    code = (
        "import os, sys\n"
        "from pdserve.disaggregation.errors import BackendUnavailable\n"
        "from pdserve.disaggregation.transfer.backends.registry import find_backend\n"
        "try: find_backend(sys.argv[1])\n"
        "except BackendUnavailable as e: print(e, flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run(python_command("-c", code, backend), capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _later(address: str, prompt: Sequence[int], where: dict[str, Any]) -> threading.Thread:
    thread = threading.Thread(target=generate, args=(address, prompt, LENGTH), kwargs=where, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    main()
