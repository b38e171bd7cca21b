"""What the parts have in common: their arguments, the device, and what it and the libraries are called."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import NamedTuple

import torch

from .record import PartRecord, Recorder

LIBRARIES = ("torch", "triton", "flashinfer-python", "transformers")


class Part(NamedTuple):
    """``dry_run``: on the CPU, as small as it gets."""

    recorder: Recorder
    device: torch.device
    dry_run: bool


def open_part(name: str) -> Part:
    """Of the arguments ``RECORD [--dry-run]``. Exits where there is no GPU and it is no dry run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.exit(2, "gpu-check: torch sees no CUDA device here; --dry-run needs none\n")
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    record = PartRecord(name, options.dry_run, _device_name(device), _versions())
    return Part(Recorder(record, options.record), device, options.dry_run)


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "a CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions
