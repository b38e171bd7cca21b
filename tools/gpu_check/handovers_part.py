"""KV from instance to instance by each backend there is, and ranks on several GPUs: the tokens are transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from . import handover_rate, ipc_check
from .pair import missing, serve_pair
from .part import Part, run_group
from .record import Check, Finding
from .servers import ask, generate, serve
from .token_checks import LENGTH, Asked, compare, compiled_kernels, judge, make_asked, without_compiles

GIB = 1 << 30
LEAST_SHARE, MOST_SHARE = 0.80, 0.92
"""Shares of the GPU between which the weights and pools of both instances of a cluster must lie together."""
LARGE_KV = {"num_hidden_layers": 32, "num_attention_heads": 8, "num_key_value_heads": 8}
"""Sizes of the cluster's model. Its KV takes 128 KiB a token in float32, so that a pool can fill a GPU."""
CLUSTER_ROWS = 512
"""Running requests of a cluster's instance. They would fill 129 GiB: 2,063 tokens each."""


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


def rank_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of an instance with several ranks. First generates expected tokens."""
    asked = make_asked(part)
    for ranks in instances(part, asked):
        yield ranks.name, lambda ranks=ranks: check_ranks(part, ranks, asked)  # type: ignore[misc]


def pair_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of a prefill and a decode instance.

    First generates expected tokens.
    """
    asked = make_asked(part)
    for sides in pairs(part, asked):
        yield sides.name, lambda sides=sides: check_pair(part, sides, asked)  # type: ignore[misc]


def cluster_checks(part: Part) -> Iterator[Check]:
    """Yield the name and the function of the check of a whole cluster on one GPU. First generates expected tokens."""
    asked = make_asked(part, LARGE_KV)
    yield "pdserve up, both instances on one GPU", lambda: check_cluster(part, asked)


GROUPS = {
    "driver": ipc_check.checks,
    "ranks": rank_checks,
    "pairs": pair_checks,
    "cluster": cluster_checks,
    "rate": handover_rate.checks,
}
"""The ones that have been tried least come first: the time of a part is limited."""


def pairs(part: Part, asked: Asked) -> list[Sides]:
    """Return the options of each pair of instances to check, one for every way of KV between devices.

    They are GPU to GPU, or between GPU and CPU.
    """
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
    """Return the options of each instance with several ranks to check. A dry run has one on the CPU, by torch."""
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
    """Compare a decode's tokens with transformers', for prompts that the prefill computed.

    It fails, too, if the decode computed any prompt itself, or if a kernel was compiled while serving.
    """
    if why_not := _too_few(part, sides.gpus) or missing(sides.backend):
        return Finding("", f"not run: {why_not}")
    logs = asked.log(f"{sides.name} P"), asked.log(f"{sides.name} D")
    with serve_pair(sides.backend, sides.prefill, sides.decode, logs) as pair:
        found = [pair.answer(room, prompt, LENGTH) for room, prompt in enumerate(asked.prompts, 1)]
        computed = ask(f"{pair.decode}/server_info")["counters"]["prompt_tokens"]
        compiled = sum(compiled_kernels(address) for address in (pair.prefill, pair.decode))
    finding = judge(found, asked.reference, 1.0, f"by {sides.backend}")
    finding.ok = bool(finding.ok) and not computed  # else the decode has not needed what came
    return without_compiles(finding, compiled)


def check_cluster(part: Part, asked: Asked) -> Finding:
    """Compare the tokens of a cluster of ``pdserve up`` with transformers', and check the memory of its instances.

    They divide the GPU's memory by their own rules, and fill it as far as they may.
    """
    if part.dry_run:
        with serve([*asked.on("cpu"), "--attention-backend", "torch"], asked.log("up"), command="up") as router:
            found = [generate(router, prompt, LENGTH) for prompt in asked.prompts]
        return judge(found, asked.reference, 1.0, "through the router")
    args = [*asked.on(part.device.type), "--attention-backend", "triton", "--max-running-requests", str(CLUSTER_ROWS)]
    at = args.index("--max-total-tokens")
    # How large the pools are is up to the instances.
    del args[at : at + 2]
    with serve(args, asked.log("up"), command="up") as router:
        found = [generate(router, prompt, LENGTH) for prompt in asked.prompts]
        instances = ask(f"{router}/server_info")["instances"]
    # With this many layers, rounding decides more often.
    finding = judge(found, asked.reference, 0.9, "through the router")
    shares = judge_shares([instance["info"]["memory"] for instance in instances], torch.cuda.mem_get_info()[1])
    figure, wanted = f"{finding.figure}, {shares.figure}", f"{finding.asked}, {shares.asked}"
    return Finding("", figure, wanted, bool(finding.ok and shares.ok))


def judge_shares(memories: Sequence[Mapping[str, int]], total: int) -> Finding:
    """Check that two instances use about equal memory, and nearly all of the GPU's together.

    ``memories``: field ``memory`` of each instance's ``/server_info``, in bytes. ``total``: bytes of the GPU.
    """
    taken = [memory["weights"] + memory["kv_pool"] + memory["window_pool"] for memory in memories]
    are_equal = len(taken) == 2 and max(taken) <= 1.1 * min(taken)
    share = sum(taken) / total
    figure = f"weights and pools of {' and '.join(f'{nbytes / GIB:.2f}' for nbytes in taken)} GiB, {share:.0%} in all"
    asked = f"two equal ones of {LEAST_SHARE:.0%} to {MOST_SHARE:.0%} of {total / GIB:.0f} GiB"
    return Finding("", figure, asked, are_equal and LEAST_SHARE <= share <= MOST_SHARE)


def check_ranks(part: Part, ranks: Ranks, asked: Asked) -> Finding:
    """Compare the tokens of an instance of several ranks with transformers'. Not run if there are too few GPUs."""
    if why_not := _too_few(part, ranks.gpus):
        return Finding("", f"not run: {why_not}")
    return compare(ranks.options, asked.log(ranks.name), asked.prompts, asked.reference, 1.0)


def _too_few(part: Part, gpus: int) -> str:
    """Return why a check that needs ``gpus`` GPUs can't run here, or "" if it can.

    A check that needs one GPU always runs: a dry run has a stand-in, or the check itself reports that there is none.
    """
    there = 0 if part.dry_run else torch.cuda.device_count()
    return f"it takes {gpus} GPUs, and there are {there}" if gpus > max(there, 1) else ""


if __name__ == "__main__":
    run_group("handovers", GROUPS)
