"""Check and measure the GPU path on this machine, and write docs/gpu-results.md.

    make gpu-check GPU_CHECK="--wheels DIR --only kernels"

A part has nine minutes from a bare start. Its groups of checks run in processes of their own, and the page is written
after each of them. Checks that no time was left for are named there. Everything is written to --page and --cache:
compiled kernels, installed wheels, records, logs and tables. --dry-run runs everything on a CPU, at tiny shapes,
kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdserve.runtime.python import python_command
from pdserve.runtime.signals import exit_on_signals

from .install import describe, install, is_there, needed
from .page import render
from .record import PARTS, PartRecord, close_group, read_record, write_record

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 520.0
"""Seconds of one part: nine minutes, less what it takes to install wheels."""
LAST_SECONDS = 30.0
"""No check begins in these last seconds of a part."""
NO_GPU = 2


def main() -> int:
    """Run the parts of the GPU check that the command line asks for, and write the page. Return the exit code.

    It is the number of parts with a failed or left-out check, or 1 without a GPU.
    """
    exit_on_signals()
    options = arguments()
    results = options.cache / ("dry-run" if options.dry_run else "results")
    results.mkdir(parents=True, exist_ok=True)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    _install(options)
    tokenizer = _tokenizer(options)
    failed = 0
    for part in options.only or PARTS:
        record_file = results / f"{part}.json"
        record_file.unlink(missing_ok=True)
        print(f"== {part}", flush=True)
        if not _run_part(part, record_file, options, tokenizer):
            return 1
        record = read_record(record_file)
        failed += record is None or not record.is_well
    print(f"wrote {options.page}")
    return failed


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line ``argv``, or this process's own for None. Paths that are not given get their defaults."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="folder to install from what is missing; nothing else is asked")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be given again")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at tiny shapes")
    parser.add_argument("--cache", type=Path, default=ROOT / ".gpu-check", help="compiled kernels, records, logs")
    parser.add_argument("--page", type=Path, default=None, help="what is written; default docs/gpu-results.md")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a part may take")
    options = parser.parse_args(argv)
    options.cache = options.cache.absolute()
    if options.page is None:
        # A dry run says nothing of a GPU: its page is no document.
        options.page = options.cache / "dry-run.md" if options.dry_run else ROOT / "docs" / "gpu-results.md"
    return options


def _install(options: argparse.Namespace) -> None:
    """Install missing packages from the folder of wheels, if one is given. Print the names of those still missing."""
    if options.wheels is not None:
        begin = time.monotonic()
        count = install(options.wheels, site_of(options.cache))
        print(f"installed {count} wheels that were missing in {time.monotonic() - begin:.0f} s", flush=True)
    describe(ROOT / "pyproject.toml", site_of(options.cache))
    for name in needed(ROOT / "pyproject.toml"):
        if not is_there(name, site_of(options.cache)):
            print(f"not installed: {name}; what needs it will fail", file=sys.stderr)


def _tokenizer(options: argparse.Namespace) -> Path | None:
    """Return the path of the tokenizer's file; None if there is none.

    A process of its own looks for it, as this one may lack the libraries.
    """
    code = "import sys; from pathlib import Path; from tools.gpu_check.tokenizer_file import find_tokenizer"
    code += "; wheels, cache = sys.argv[1:]; print(find_tokenizer(Path(wheels) if wheels else None, Path(cache)))"
    words = ("-c", code, "" if options.wheels is None else str(options.wheels.absolute()), str(options.cache))
    env = environment(options.cache, options.dry_run)
    done = subprocess.run(python_command(*words), cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    found = done.stdout.strip()
    return None if found in ("", "None") else Path(found)


def _run_part(part: str, record_file: Path, options: argparse.Namespace, tokenizer: Path | None) -> bool:
    """Run the groups of a part, one after another, and write the page after each. Return False if there is no GPU."""
    deadline = time.monotonic() + options.limit
    for group in PARTS[part]:
        command = python_command("-m", f"tools.gpu_check.{part}_part", str(record_file), group)
        command += ["--dry-run"] * options.dry_run
        if tokenizer is not None:
            command += ["--tokenizer", str(tokenizer)]
        reason = _run_group(command, deadline - time.monotonic(), environment(options.cache, options.dry_run))
        record = read_record(record_file)
        if record is None:
            if reason == f"exit status {NO_GPU}":
                return False
            record = PartRecord(part, options.dry_run, "unknown device")
        close_group(record, group, reason)
        record.is_over = group == PARTS[part][-1]
        write_record(record_file, record)
        _write_page(record_file.parent, options)
    return True


def _run_group(command: list[str], seconds: float, env: dict[str, str]) -> str:
    """Run the process of a group of checks for at most ``seconds``. Return why it ended early, "" if it did not.

    All processes that it has started are killed in the end.
    """
    if seconds < LAST_SECONDS:
        return "no time was left"
    command = [*command, "--seconds", f"{seconds - LAST_SECONDS:.0f}"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"the part's time was over, after {seconds:.0f} s of this group"
    finally:
        # It may have servers of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status < 0:
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


def _write_page(results: Path, options: argparse.Namespace) -> None:
    records = [record for part in PARTS if (record := read_record(results / f"{part}.json")) is not None]
    options.page.write_text(render(records, _command(options)))


def environment(cache: Path, dry_run: bool) -> dict[str, str]:
    """Return the environment variables of a part's process, so that it writes only below ``cache``.

    They also let it find modules where pdserve is not installed. What PYTHONPATH names goes before what the check has
    installed.
    """
    paths = [str(ROOT), str(ROOT / ".ns"), *filter(None, [os.environ.get("PYTHONPATH")]), str(site_of(cache))]
    kept = {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "TORCH_EXTENSIONS_DIR": str(cache / "torch"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(cache / "hypothesis"),
        # The CPU engine's kernels.
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    if dry_run:
        kept |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **kept}


def site_of(cache: Path) -> Path:
    """Return the folder that missing packages are installed into."""
    return cache / "site"


def _command(options: argparse.Namespace) -> str:
    only = "".join(f" --only {part}" for part in options.only or ())
    return "make gpu-check" + (
        f' GPU_CHECK="{("--dry-run" * options.dry_run + only).strip()}"' if only or options.dry_run else ""
    )


if __name__ == "__main__":
    sys.exit(main())
