"""What `make chaos` is told by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

BACKENDS = ("tcp", "shm", "nixl", "mooncake")
SEED = 1
FAULTS = 100


@dataclass(frozen=True)
class Options:
    """``faults``: how many for each backend."""

    backends: tuple[str, ...] = BACKENDS
    seed: int = SEED
    faults: int = FAULTS

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Read the options from the environment. Exits with what is wrong with them."""
        backends = tuple(environment.get("PDSERVE_CHAOS_BACKENDS", " ".join(BACKENDS)).replace(",", " ").split())
        unknown = set(backends) - set(BACKENDS)
        if unknown or not backends:
            raise SystemExit(
                f"PDSERVE_CHAOS_BACKENDS: give some of {', '.join(BACKENDS)}, not {', '.join(unknown) or 'none'}"
            )
        numbers = []
        for name, default in (("PDSERVE_CHAOS_SEED", SEED), ("PDSERVE_CHAOS_FAULTS", FAULTS)):
            value = environment.get(name, str(default))
            if not value.isdecimal():
                raise SystemExit(f"{name}: give a whole number, not {value!r}")
            numbers.append(int(value))
        return cls(backends, *numbers)

    @property
    def command(self) -> str:
        """What repeats this campaign."""
        return (
            f"PDSERVE_CHAOS_BACKENDS={','.join(self.backends)} PDSERVE_CHAOS_SEED={self.seed} "
            f"PDSERVE_CHAOS_FAULTS={self.faults} make chaos"
        )
