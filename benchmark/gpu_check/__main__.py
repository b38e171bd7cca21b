"""Check and measure the GPU path on this machine, and write docs/gpu-results.md.

    make gpu-check GPU_CHECK="--wheels DIR --only kernels"

Each part is a process of its own with three minutes from a bare start; what a part has found by then is kept, and the
page is written after each. Compiled kernels are kept in --cache, and found there by the next run. --dry-run runs
everything on a CPU, at tiny shapes, kernels in Triton's interpreter.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ...runtime.python import python_command
from .install import install
from .page import render
from .record import PARTS, PartRecord, read_record

ROOT = Path(__file__).parents[2]
LIMIT = 175.0
"""Seconds of one part."""


def main() -> int:
    """The number of parts that did not end well, or found something amiss."""
    options = _arguments()
    results = options.cache / ("dry-run" if options.dry_run else "results")
    results.mkdir(parents=True, exist_ok=True)
    if options.wheels is not None:
        begin = time.monotonic()
        for name in install(options.wheels, ROOT / "pyproject.toml"):
            print(f"not in {options.wheels}: {name}; what needs it will say so", file=sys.stderr)
        print(f"installed what was missing in {time.monotonic() - begin:.0f} s")
    failed = 0
    for part in options.only or PARTS:
        record_file = results / f"{part}.json"
        record_file.unlink(missing_ok=True)
        _run_part(part, record_file, options)
        records = [record for each in PARTS if (record := read_record(results / f"{each}.json")) is not None]
        options.page.write_text(render(records, _command(options)))
        failed += not _is_well(read_record(record_file))
    print(f"wrote {options.page}")
    return failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="folder to install from what is missing; nothing else is asked")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be given again")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at tiny shapes")
    parser.add_argument("--cache", type=Path, default=ROOT / ".gpu-check", help="compiled kernels, results")
    parser.add_argument("--page", type=Path, default=None, help="what is written; default docs/gpu-results.md")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a part may take")
    options = parser.parse_args()
    options.cache = options.cache.absolute()
    if options.page is None:
        # A dry run says nothing of a GPU: its page is no document.
        options.page = options.cache / "dry-run.md" if options.dry_run else ROOT / "docs" / "gpu-results.md"
    return options


def _run_part(part: str, record_file: Path, options: argparse.Namespace) -> None:
    command = python_command("-m", f"pdserve.benchmark.gpu_check.{part}_part", str(record_file))
    command += ["--dry-run"] * options.dry_run
    print(f"== {part}", flush=True)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(options.cache, options.dry_run), start_new_session=True
    )
    try:
        process.wait(options.limit)
    except subprocess.TimeoutExpired:
        print(f"{part}: {options.limit:.0f} s are over", file=sys.stderr)
    finally:
        # It may have servers of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment(cache: Path, dry_run: bool) -> dict[str, str]:
    """Of a part: where compiled kernels are kept, and how modules are found where pdserve is not installed."""
    paths = [str(ROOT / ".ns"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "TORCH_EXTENSIONS_DIR": str(cache / "torch"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if dry_run:
        kept |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **kept}


def _is_well(record: PartRecord | None) -> bool:
    return record is not None and record.ended == "whole" and all(f.ok is not False for f in record.findings)


def _command(options: argparse.Namespace) -> str:
    only = "".join(f" --only {part}" for part in options.only or ())
    return "make gpu-check" + (
        f' GPU_CHECK="{("--dry-run" * options.dry_run + only).strip()}"' if only or options.dry_run else ""
    )


if __name__ == "__main__":
    sys.exit(main())
