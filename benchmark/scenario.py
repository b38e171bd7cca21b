"""Scenario files: several groups of requests at once, each with its own lengths and arrivals.

::

    duration: 40                  # seconds; what is under way then is finished, but nothing new is sent
    groups:
      - name: short
        concurrency: 8            # a closed loop; or rate: 2.5 (burstiness: 1) or every: 3 (burst: 3)
        input_len: 64             # range_ratio, prefix_len, prefix_share, num_prefixes: as the options of these names
        output_len: 200
        start: 0                  # seconds in which this group sends, default: all
        end: 40
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .errors import WorkloadError
from .prompts import PromptShape

SHIPPED = Path(__file__).with_name("scenarios")


class ScenarioGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One group; one of ``concurrency``, ``rate`` and ``every`` says how its requests arrive. Times in seconds."""

    name: str
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    prefix_share: float = 1.0
    num_prefixes: int = 1
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    every: float | None = None
    burst: int = 1
    start: float = 0.0
    end: float | None = None

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.concurrency, self.rate, self.every)) != 1:
            raise ValueError(f'group "{self.name}": give one of concurrency, rate and every')
        counts = (self.input_len, self.output_len, self.num_prefixes, self.burst, self.concurrency)
        rates = (self.rate, self.every, self.burstiness)
        if any(n is not None and n < 1 for n in counts) or any(rate is not None and rate <= 0 for rate in rates):
            raise ValueError(f'group "{self.name}": lengths, counts and rates must be above 0')
        if self.start < 0 or self.prefix_len < 0 or not 0 <= self.range_ratio < 1 or not 0 <= self.prefix_share <= 1:
            raise ValueError(f'group "{self.name}": start, prefix_len, range_ratio or prefix_share is out of range')

    @property
    def shape(self) -> PromptShape:
        """Return the shape of the group's prompts and answers."""
        return PromptShape(
            self.input_len, self.output_len, self.range_ratio, self.prefix_len, self.prefix_share, self.num_prefixes
        )


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scenario file. ``duration`` in seconds."""

    duration: float
    groups: list[ScenarioGroup]

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if self.duration <= 0 or not names or len(set(names)) < len(names):
            raise ValueError("a scenario needs a duration above 0, and groups with different names")


def read_scenario(name: str) -> Scenario:
    """Read the scenario ``name``: one of ``benchmark/scenarios``, or a file; raises ``WorkloadError``."""
    shipped = SHIPPED / f"{name}.yaml"
    path = shipped if shipped.is_file() else Path(name)
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Scenario)
    except OSError as e:
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
        raise WorkloadError(f"--scenario {name}: neither a file nor one of {known} ({e})") from e
    except msgspec.MsgspecError as e:
        raise WorkloadError(f"--scenario {path}: {e}") from e
