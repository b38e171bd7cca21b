"""The options of ``python -P -m tools.thresholds``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pdserve.benchmark.errors import BenchOptionsError

from .clusters import CLUSTERS, FREE_THRESHOLD
from .loads import LOADS


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions:
    """What to measure.

    Parameters
    ----------
    clusters
        Contestants, in the order of each round: auto, always, never, or a number of tokens (a pair with that
        --disaggregation-threshold), unified-2 (two unified instances of one thread), unified-1 (one of two threads).
    loads
        Loads: streams-4, streams-16 (N clients of 64 + 200 tokens), open (4 a second, 64 + 64), long (1.2 a
        second, 1,000 + 8), middle (3 a second, 300 + 40), closed (4 clients of 64 + 100, and 1,500 + 4 every 4 s),
        mixed (the scenario of that name), trace.
    seeds
        A round for each: its requests, which all contestants get.
    pace
        Factor for the arrival rates of open, long, middle and trace, for machines slower or faster than those of the
        docs.
    trace
        File of the load trace: a Mooncake trace; lengths are taken by 1/32.
    other_python
        A Python of another checkout; its pair with auto takes part as "other".
    model_path
        A folder, .gguf file, hub name or "smollm2".
    dtype
        Type of weights and KV.
    cpus
        The two cores that every contestant gets.
    output_json
        File that each result is added to, one JSON object a line.
    """

    clusters: list[str] = field(default_factory=lambda: ["auto", "always", "never", "256", "unified-2"])
    loads: list[str] = field(default_factory=lambda: ["streams-16", "open", "long", "middle", "closed"])
    seeds: list[int] = field(default_factory=lambda: [0])
    pace: float = 1.0
    trace: Path | None = None
    other_python: Path | None = None
    model_path: str = "smollm2"
    dtype: str = "bfloat16"
    cpus: str = "0,1"
    output_json: Path | None = None

    def check(self) -> None:
        """Raise ``BenchOptionsError`` if an option has a value that can't work."""
        known = set(CLUSTERS)
        for name in self.clusters:
            if name not in known and not FREE_THRESHOLD.fullmatch(name):
                raise BenchOptionsError(f'--clusters: "{name}" is none of {", ".join(known)}, nor a number')
        for name in self.loads:
            if name not in LOADS:
                raise BenchOptionsError(f'--loads: "{name}" is none of {", ".join(LOADS)}')
        if "trace" in self.loads and self.trace is None:
            raise BenchOptionsError("the load trace needs --trace FILE")
        if not self.clusters or not self.loads or not self.seeds or self.pace <= 0:
            raise BenchOptionsError("give clusters, loads, seeds, and a pace above 0")
        if self.cpus.count(",") != 1:
            raise BenchOptionsError('--cpus takes two cores, like "0,1"')

    @property
    def contestants(self) -> list[str]:
        """The contestants, in the order in which each round measures them."""
        return [*self.clusters, *(["other"] if self.other_python is not None else [])]
