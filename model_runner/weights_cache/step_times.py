"""The times of steps that an earlier start has measured, in a file beside the packed weights.

A worker measures steps before it is ready (``steps/measure_steps.py``), which takes up to a second of each start. On a
CPU the result is kept for a day. The scheduler's cost model corrects it by the steps of requests. So a file that was
measured beside other work does no more harm than such a measurement at this start.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ...messages.worker import MachineUse, MeasuredStep
from ...runtime.machine.processor import cpu_model
from ...runtime.private_cache import is_there, publish
from ...runtime.trusted_path import make_private_folder
from ..cpu_engine.build import choose_level, library_path
from ..options import WorkerOptions
from .cache import weights_folder

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 86400.0
MAX_BYTES = 1 << 16
MAX_MS = 1e6
SUFFIX = ".steps"


def file_of(options: WorkerOptions, machine: MachineUse, fingerprint: str, context_length: int) -> Path | None:
    """Return the path for the times of a model's steps on this machine; None if they are not kept.

    Its name is a digest of what the times depend on. Only times of the C++ engine are kept, and none with
    ``--weights-cache off``. On a GPU, measuring also loads what the libraries need for each size.
    """
    folder = weights_folder(options.weights_cache)
    if folder is None or machine.kernel_level is None:
        return None
    depends = (
        *(fingerprint, context_length, options.max_running_requests, options.page_size),
        *(options.enable_double_sparsity, options.tp_size, machine.threads, machine.bound),
        *(cpu_model(), machine.kernel_level, library_path(choose_level()).name),
    )
    return folder / (hashlib.sha256(msgspec.json.encode(depends)).hexdigest()[:32] + SUFFIX)


def known_or_measured(path: Path | None, measure: Callable[[], list[MeasuredStep]]) -> list[MeasuredStep]:
    """Return the times in the file ``path``, or what ``measure`` returns, which is then written there.

    A file that is missing, old, damaged or possibly another user's is replaced. A folder that can't be written to is no
    error.
    """
    if path is None:
        return measure()
    if known := _read(path):
        return known
    measured = measure()
    try:
        make_private_folder(path.parent)
        _write(path, measured)
        _remove_old(path.parent)
    except OSError as e:
        log.info("the times of steps are measured at each start, as %s can't be written: %s", path, e.strerror or e)
    return measured


def _read(path: Path) -> list[MeasuredStep]:
    """Return the times in ``path``, or [] if there are none to rely on."""
    try:
        if not is_there(path):
            return []
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if abs(time.time() - os.fstat(fd).st_mtime) > MAX_AGE_SECONDS:
                return []
            steps = msgspec.json.decode(file.read(MAX_BYTES), type=list[MeasuredStep])
    except OSError as e:
        log.warning("the times of steps in %s are not used: %s", path, e.strerror or e)
        return []
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return steps if all(_is_plausible(step) for step in steps) else []


def _is_plausible(step: MeasuredStep) -> bool:
    sizes = (step.decodes, step.kv_tokens, step.prompt_tokens, step.prompt_pairs)
    return all(size >= 0 and math.isfinite(size) for size in sizes) and 0 < step.forward_ms <= MAX_MS


def _write(path: Path, steps: list[MeasuredStep]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".new", delete=False) as file:
        made = Path(file.name)
        try:
            file.write(msgspec.json.encode(steps))
            file.flush()
            publish(made, path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise


def _remove_old(folder: Path) -> None:
    oldest = time.time() - MAX_AGE_SECONDS
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob("*.new")):
        with suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()
