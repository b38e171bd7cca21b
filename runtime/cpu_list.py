"""Lists of cores as flags and the kernel spell them: "0,2-3"."""

from __future__ import annotations

from collections.abc import Iterable


class ThreadPlacementError(ValueError):
    """``--threads`` and ``--cpus`` ask for what this process can't have; the message says what would do."""


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of cores like "0,2-3", and keep its order; raises ``ThreadPlacementError``."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ThreadPlacementError(f'--cpus {text}: "{part}" is neither a core nor a range; write it like 0,2-3')
        cores = range(int(first), int(last if dash else first) + 1)
        if not cores:
            raise ThreadPlacementError(f'--cpus {text}: "{part}" runs backwards')
        cpus.extend(cores)
    if len(set(cpus)) != len(cpus):
        raise ThreadPlacementError(f"--cpus {text}: name each core once")
    return tuple(cpus)


def parse_kernel_list(text: str) -> list[int]:
    """Parse the cores in a file of the kernel, like "0-3,8". An empty one names none."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        cpus.extend(range(int(first), int(last if dash else first) + 1))
    return cpus


def format_cores(cores: Iterable[int]) -> str:
    """Format cores as ``--cpus`` takes them, with three or more neighbours as a range."""
    runs: list[list[int]] = []
    for cpu in cores:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
