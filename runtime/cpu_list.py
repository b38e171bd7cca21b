"""Lists of cores as flags spell them: "0,2-3"."""

from __future__ import annotations


class PlacementError(ValueError):
    """``--threads`` and ``--cpus`` ask for what this process can't have; the message says what would do."""


def parse_cpus(text: str) -> tuple[int, ...]:
    """Cores in a list like "0,2-3", in the order given; raises ``PlacementError``."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise PlacementError(f'--cpus {text}: "{part}" is neither a core nor a range; write it like 0,2-3')
        cores = range(int(first), int(last if dash else first) + 1)
        if not cores:
            raise PlacementError(f'--cpus {text}: "{part}" runs backwards')
        cpus.extend(cores)
    if len(set(cpus)) != len(cpus):
        raise PlacementError(f"--cpus {text}: name each core once")
    return tuple(cpus)


def format_cores(cores: list[int]) -> str:
    """The list as ``--cpus`` takes it."""
    return ",".join(map(str, cores))
