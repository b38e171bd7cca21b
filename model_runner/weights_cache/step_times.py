"""The times of steps that an earlier start has measured, in a file beside the packed weights.

A worker measures steps before it is ready (``steps/measure_steps.py``), which takes up to a second of each start. On a
CPU the result is kept for a day. The scheduler's cost model corrects it by the steps of requests. So a file that was
measured beside other work does no more harm than such a measurement at this start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from ...messages.worker import MachineUse, MeasuredStep
from ...runtime.machine.processor import cpu_model
from ...runtime.private_cache import publish
from ...runtime.trusted_path import distrust, make_private_folder, without_links
from ..cpu_engine.build import choose_level, library_path
from ..options import WorkerOptions
from .cache import weights_folder

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 86400.0
MAX_BYTES = 1 << 16
SUFFIX, NEW = ".steps", ".new"
OWN_FILE = re.compile(r"[0-9a-f]{32}(\.steps|\w*\.new)")
"""Names that ``file_of`` and ``_write`` give. The folder may be the user's own, with other files."""
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``MeasuredStep`` in the file, with bounds."""

    decodes: Size
    kv_tokens: Size
    prompt_tokens: Size
    prompt_pairs: Annotated[float, msgspec.Meta(ge=0, le=1e18)]
    forward_ms: Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]


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
        place = without_links(path.parent) / path.name
        _write(place, measured)
        _remove_old(place.parent)
    except OSError as e:
        log.info("the times of steps are measured at each start, as %s can't be written: %s", path, e.strerror or e)
    return measured


def _read(path: Path) -> list[MeasuredStep]:
    """Return the times in ``path``, or [] if there are none to rely on."""
    try:
        place = without_links(path.parent) / path.name
        reason = distrust(place.parent.lstat())
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            state = os.fstat(fd)
            reason = reason or distrust(state) or ("" if stat.S_ISREG(state.st_mode) else "it is not a file")
            if reason or abs(time.time() - state.st_mtime) > MAX_AGE_SECONDS:
                return []
            kept = msgspec.json.decode(file.read(MAX_BYTES), type=list[_Kept])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return [MeasuredStep(*msgspec.structs.astuple(step)) for step in kept]


def _write(path: Path, steps: list[MeasuredStep]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=NEW, delete=False) as file:
        made = Path(file.name)
        try:
            file.write(msgspec.json.encode(steps))
            file.flush()
            publish(made, path)
        except BaseException:
            # Broad: whatever ends the writing, an interrupt included, half a file must not stay.
            made.unlink(missing_ok=True)
            raise


def _remove_old(folder: Path) -> None:
    oldest = time.time() - MAX_AGE_SECONDS
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{NEW}")):
        with suppress(OSError):
            if OWN_FILE.fullmatch(path.name) and path.lstat().st_mtime < oldest:
                path.unlink()
