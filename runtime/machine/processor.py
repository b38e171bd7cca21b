"""What the processor calls itself and what it can do."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the processor's feature flags (x86 "flags", Arm "Features"); empty if the system does not tell."""
    return set(_field(cpuinfo, ("flags", "Features")).split())


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name; "" if the system does not tell, as on most Arm machines."""
    return _field(cpuinfo, ("model name",))


def _field(cpuinfo: Path, names: tuple[str, ...]) -> str:
    """Return the value of the first line with one of ``names``, as if all cores were equal."""
    if not cpuinfo.is_file():
        return ""
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""
