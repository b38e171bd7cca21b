"""``pdserve bench kernel``: one kernel at one shape, with the server's tiles or others.

On a GPU it is checked against torch, measured, and compiled once more for its resources. Without one it is compiled
alone; in Triton's interpreter (``TRITON_INTERPRET=1``) it is checked alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..command import exit_code, wide_console
from ..errors import BenchError
from .options import KernelBenchOptions

if TYPE_CHECKING:
    from .case import Ask, Case, Place
    from .resources import Resources
    from .timing import Rates, Times

DEFAULT_CAPABILITY = 90


def run_kernel_bench(options: KernelBenchOptions) -> int:
    """Measure what can be measured on this machine, print it and write the file; return the exit code."""
    return exit_code("pdserve bench kernel", lambda: _run(options))


def _run(options: KernelBenchOptions) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        raise BenchError("Triton is not installed: pip install 'pdserve[triton]'") from None
    from .case import Mode

    console, place = wide_console(), _place(options)
    ask, case, resources = _prepare(options, place)
    sizes = " ".join(f"{name}={size}" for name, size in ask.sizes.items())
    console.print(f"{options.kernel}, {ask.variant}, {options.dtype}: {sizes}")
    given = {name: f"{size}*" if name in ask.tile else str(size) for name, size in case.tile.items()}
    tile = " ".join(f"{name}={size}" for name, size in given.items()) or "fixed"
    console.print(f"tile: {tile}{' (* as given)' if ask.tile else ''}")
    console.print(f"least work: {case.nbytes / 1e6:.2f} MB moved, {case.operations / 1e9:.3f} GFLOP")
    results: dict[str, Any] = {
        **{"kernel": options.kernel, "variant": ask.variant, "dtype": options.dtype, "shape": dict(ask.sizes)},
        **{"tile": dict(case.tile), "bytes": case.nbytes, "operations": case.operations},
        "mode": place.mode.name.lower(),
    }
    is_right = True
    if place.mode is not Mode.ON_PAPER:
        error = case.error()
        is_right = error <= case.tolerance
        console.print(f"off by {error:.1e} at most, {case.tolerance:.0e} allowed{'' if is_right else ': WRONG'}")
        results |= {"error": error, "tolerance": case.tolerance}
    if place.mode is Mode.GPU:
        results |= _measured(options, ask, case, console)
    else:
        console.print(f"not measured: {_why_not(place)}")
    if resources:
        console.print(_table(resources, place.capability))
        results["kernels"] = [kernel._asdict() for kernel in resources]
    for refusal in filter(None, (kernel.refusal for kernel in resources)):
        console.print(refusal)
        is_right = False
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return is_right


def _prepare(options: KernelBenchOptions, place: Place) -> tuple[Ask, Case, list[Resources]]:
    """Make the case that the options ask for, and compile the kernels that it launches.

    In Triton's interpreter nothing is compiled, and the list of resources is empty.
    """
    import torch

    from .case import Ask, Mode
    from .cases import CASES

    ask = Ask(options.sizes, options.chosen_variant, options.tile_sizes, getattr(torch, options.dtype))
    make = CASES[options.kernel]
    if place.mode is Mode.INTERPRETED:
        return ask, make(ask, place), []
    from .launches import launched, on_paper
    from .resources import resources_of

    has_gpu = place.mode is Mode.GPU
    if has_gpu:
        case = make(ask, place)
    else:
        with on_paper(place.capability):
            case = make(ask, place)
    try:
        requests = launched(case.run, place.capability, has_gpu=has_gpu)
    except Exception as e:
        # Whatever Triton raises for a tile that no GPU can have: its classes differ from version to version.
        raise BenchError(f"it can't be launched: {str(e).strip().splitlines()[-1]}") from e
    return ask, case, resources_of(requests)


def _place(options: KernelBenchOptions) -> Place:
    import torch
    from triton import knobs

    from .case import Mode, Place

    if knobs.runtime.interpret:
        return Place(Mode.INTERPRETED, torch.device("cpu"), DEFAULT_CAPABILITY)
    if not torch.cuda.is_available():
        return Place(Mode.ON_PAPER, torch.device("cpu"), options.capability or DEFAULT_CAPABILITY)
    major, minor = torch.cuda.get_device_capability()
    own = major * 10 + minor
    if options.capability not in (None, own):
        # What is chosen for another GPU may not run here.
        return Place(Mode.ON_PAPER, torch.device("cpu"), options.capability or own)
    return Place(Mode.GPU, torch.device("cuda"), own)


def _why_not(place: Place) -> str:
    from .case import Mode

    if place.mode is Mode.INTERPRETED:
        return "Triton's interpreter computes on the CPU; registers and spills are not known there either"
    text = "without a GPU of that capability there is no time and no share of the roofline"
    return f"{text}; compiled for capability {place.capability / 10:.1f}"


def _measured(options: KernelBenchOptions, ask: Ask, case: Case, console: Console) -> dict[str, Any]:
    """Measure the case on the GPU, print its times and its share of the roofline, and return them for the JSON file."""
    from .timing import measure, measure_rates, roofline

    times: Times = measure(case, options.seconds)
    rates: Rates = measure_rates(ask.dtype)
    bound, by = roofline(case.nbytes, case.operations, rates)
    share = bound / times.median
    low, median, high = (f"{value * 1e6:.2f}" for value in (times.low, times.median, times.high))
    console.print(f"time: median {median} µs, 80 % of the runs between {low} and {high} µs")
    console.print(f"roofline: {share:.0%} of it; {bound * 1e6:.2f} µs, bound by {by}")
    return {"seconds": times._asdict(), "rates": rates._asdict(), "roofline_seconds": bound, "share": share}


def _table(resources: list[Resources], capability: int) -> Table:
    table = Table(title=f"compiled for capability {capability / 10:.1f}", title_justify="left")
    for name in ("kernel", "warps", "stages", "registers", "spills (B)", "shared (B)", "programs/SM", "compiled (s)"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for kernel in resources:
        spills = f"[red]{kernel.stack_bytes}[/red]" if kernel.stack_bytes else "0"
        numbers = (kernel.num_warps, kernel.num_stages, kernel.registers, spills, kernel.shared_bytes)
        table.add_row(kernel.kernel, *map(str, (*numbers, kernel.programs)), f"{kernel.seconds:.1f}")
    return table
