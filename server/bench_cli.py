"""The commands ``pdserve bench serve | transfer | schedule | cache | kernel``.

Only ``cli.py`` names this module, as text: it is imported when ``bench`` is asked for, and no other command loads the
benchmarks. What a command runs is imported inside it.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from ..benchmark.cache.options import CacheBenchOptions
from ..benchmark.errors import BenchOptionsError
from ..benchmark.kernel.options import KernelBenchOptions
from ..benchmark.options import BenchOptions
from ..benchmark.schedule.options import ScheduleBenchOptions
from ..benchmark.transfer.options import TransferBenchOptions
from .commands import BENCH_HELP, Config, refuse

SERVE_DEFAULTS, TRANSFER_DEFAULTS, SCHEDULE_DEFAULTS = BenchOptions(), TransferBenchOptions(), ScheduleBenchOptions()
CACHE_DEFAULTS, KERNEL_DEFAULTS = CacheBenchOptions(), KernelBenchOptions()

bench = App(name="bench", help=BENCH_HELP, group_parameters="Options")


@bench.command(name="serve")
def bench_serve(
    *, options: Annotated[BenchOptions, Parameter(name="*")] = SERVE_DEFAULTS, config: Config = None
) -> int:
    """Send a load to a server and report latencies, throughput and goodput."""
    try:
        options.check()
    except BenchOptionsError as e:
        return refuse("bench serve", e)
    from ..benchmark.serve import run_bench

    return run_bench(options)


@bench.command(name="transfer")
def bench_transfer(
    *, options: Annotated[TransferBenchOptions, Parameter(name="*")] = TRANSFER_DEFAULTS, config: Config = None
) -> int:
    """Measure how fast each transfer backend moves KV pages between two processes of this host.

    Also measures memcpy of the same bytes, and NIXL and Mooncake without pdserve.
    """
    try:
        options.check()
    except BenchOptionsError as e:
        return refuse("bench transfer", e)
    from ..benchmark.transfer.run import run_transfer_bench

    return run_transfer_bench(options)


@bench.command(name="schedule")
def bench_schedule(
    *, options: Annotated[ScheduleBenchOptions, Parameter(name="*")] = SCHEDULE_DEFAULTS, config: Config = None
) -> int:
    """Send a trace through the scheduler in virtual time, without a model and without waiting.

    Prints the times to the first token and the retractions of each policy and rule of admission.
    """
    try:
        options.check()
    except BenchOptionsError as e:
        return refuse("bench schedule", e)
    from ..benchmark.schedule.run import run_schedule_bench

    return run_schedule_bench(options)


@bench.command(name="cache")
def bench_cache(
    *, options: Annotated[CacheBenchOptions, Parameter(name="*")] = CACHE_DEFAULTS, config: Config = None
) -> int:
    """Measure the prefix tree, the queue in order of cached prefixes, and the allocator, without a model.

    Compares them with vLLM and SGLang if --vllm-python and --sglang-python name their environments. With --trace,
    prints hit rates by eviction policy and pool size instead.
    """
    try:
        options.check()
    except BenchOptionsError as e:
        return refuse("bench cache", e)
    from ..benchmark.cache.run import run_cache_bench

    return run_cache_bench(options)


@bench.command(name="kernel")
def bench_kernel(
    *, options: Annotated[KernelBenchOptions, Parameter(name="*")] = KERNEL_DEFAULTS, config: Config = None
) -> int:
    """Measure one GPU kernel at one shape, with its own tile sizes or others.

    Prints its time, share of the roofline, registers and spills. Without a GPU, compiles the kernel and prints no time.
    """
    try:
        options.check()
    except BenchOptionsError as e:
        return refuse("bench kernel", e)
    from ..benchmark.kernel.run import run_kernel_bench

    return run_kernel_bench(options)
