"""docs/gpu-results.md, of what the parts have recorded."""

from __future__ import annotations

from collections.abc import Sequence

from .record import PartRecord

TITLES = {"kernels": "Kernels", "device": "Tests on the device", "server": "Server", "served": "Speed of a server"}
TITLES |= {"handovers": "Hand-overs and ranks", "bench": "Speed of steps", "peers": "Beside others"}
SIGNS = {True: "yes", False: "**no**", None: ""}


def render(records: Sequence[PartRecord], command: str) -> str:
    """Return docs/gpu-results.md, made of what the parts have recorded. ``command``: the command that wrote it."""
    lines = ["# What a GPU has shown", ""]
    lines += [f"Written by `{command}`; what is checked, and how, says [gpu.md](gpu.md).", ""]
    if any(record.dry_run for record in records):
        lines += [
            "**A dry run: no GPU was there. Kernels ran in Triton's interpreter; no figure here is a speed.**",
            "",
        ]
    for record in records:
        lines += [f"## {TITLES[record.part]}", ""]
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        ended = "" if record.is_over else " Not over yet."
        lines += [f"{record.device}; {versions}. {record.seconds:.0f} s.{ended}", ""]
        lines += ["| what | found | asked for | met |", "|---|---|---|---|"]
        lines += [
            f"| {_cell(f.name)} | {_cell(f.figure)} | {_cell(f.asked)} | {SIGNS[f.ok]} |" for f in record.findings
        ]
        lines.append("")
        if record.left_out:
            lines += ["**Left out:** " + "; ".join(record.left_out) + ".", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
