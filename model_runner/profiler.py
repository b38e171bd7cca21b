"""Profiles of what the ranks of this host compute, as Chrome traces: ``POST /start_profile`` and ``/stop_profile``.

Each rank records its own steps in the thread that computes them, and writes one file. While it writes, it computes
nothing. The scheduler bounds a profile in steps and time (``scheduler/features/profiling.py``); here a trace is bounded
in bytes, and the folder in profiles.
"""

from __future__ import annotations

import atexit
import gzip
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ..messages.profiling import (
    ProfileActivity,
    ProfileCommand,
    ProfileEvent,
    ProfileStarted,
    ProfileWritten,
    StartProfile,
    StopProfile,
)
from ..messages.worker import ForwardStep, StepResult
from ..runtime.layers_done import NOT_COUNTED, PassProgress
from ..runtime.trusted_path import make_private_folder
from .options import WorkerOptions
from .torch_import import note_torch

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

    from .ranks.other_ranks import OtherRanks
    from .steps.step_queue import StepQueue
    from .steps.step_runner import Launched, StepRunner

log = logging.getLogger(__name__)

MAX_TRACE_BYTES = 1 << 30
"""Maximum size of one rank's trace before it is compressed."""
MAX_PROFILES = 32
"""Maximum number of entries in the folder of profiles; a profile more is refused."""
COMPRESSION = 3


class ProfileError(Exception):
    """A profile can't be recorded or written; the message says why."""


def profile_folder(options: WorkerOptions, run_dir: Path) -> Path:
    """Return the path of the folder with all profiles of an instance; each has a subfolder. It may not exist yet."""
    return run_dir / "profiles" if options.profile_dir is None else Path(options.profile_dir).expanduser()


class ProfiledSteps:
    """A ``StepRunner`` that names its launches and waits in the profile."""

    def __init__(self, steps: StepRunner) -> None:
        from torch.autograd.profiler import record_function

        self._steps = steps
        self._record = record_function

    def launch(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Launched:
        """Launch the step in a profiler range named by the step's summary, and return what ``collect`` takes."""
        with self._record(step.summary):
            return self._steps.launch(step, done)

    def follow(self, step: ForwardStep) -> None:
        """Compute the step and drop its result, in a profiler range named by the step's summary."""
        with self._record(step.summary):
            self._steps.follow(step)

    def is_done(self, launched: Launched) -> bool:
        """Return whether ``collect`` of this step would return without waiting. Adds no range to the profile."""
        return self._steps.is_done(launched)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for the step and return its result, in a profiler range named "collect"."""
        with self._record("collect"):
            return self._steps.collect(launched)


class RankProfiler:
    """Records the steps of this rank: ``start``, steps by ``steps``, ``stop``. One thread."""

    def __init__(self, folder: Path, rank: int, device_kind: str, steps: StepRunner) -> None:
        """Prepare to record the ``steps`` of rank ``rank``; nothing is recorded yet.

        ``folder``: folder of all profiles.
        """
        self.folder = folder
        self.number = rank
        """Number of this rank."""
        self._plain = steps
        self.steps: StepRunner | ProfiledSteps = steps
        """What launches steps now."""
        self._profile: profile | None = None
        self._path = folder
        self.activities: tuple[ProfileActivity, ...] = ("CPU", "GPU") if device_kind == "cuda" else ("CPU",)
        """What can be recorded here."""

    def path(self, name: str, rank: int | None = None) -> Path:
        """Return the path of the trace of ``rank`` (default: this one) in the profile ``name``."""
        return self.folder / name / f"rank-{self.number if rank is None else rank}.trace.json.gz"

    def obey(self, command: ProfileCommand) -> str:
        """Start or stop a recording, as ``command`` says; return why that failed, or ""."""
        try:
            if isinstance(command, StartProfile):
                self.start(command)
            else:
                self.stop()
        except ProfileError as e:
            return str(e)
        return ""

    def start(self, command: StartProfile) -> None:
        """Start to record ``command.activities`` for the profile of this name; ``steps`` then names its launches.

        The profile's folder must exist. Imports torch. Raises ``ProfileError``.
        """
        note_torch("profiles")
        from torch.autograd.profiler import profile

        self._path = self.path(command.name)
        # Not torch.profiler's own class: its first start imports Inductor, for seconds in which no step is computed.
        recording = profile(
            use_cpu="CPU" in command.activities,
            use_device="cuda" if "GPU" in command.activities else None,
            use_kineto=True,
            record_shapes=command.record_shapes,
            with_stack=command.with_stack,
        )
        try:
            recording.__enter__()  # type: ignore[no-untyped-call]
        except RuntimeError as e:
            raise ProfileError(f"torch.profiler does not start: {_first_line(e)}") from e
        self._profile, self.steps = recording, ProfiledSteps(self._plain)
        # A process that ends while it records would end by a segmentation fault, whatever its own reason is.
        atexit.register(self._drop)

    def stop(self) -> None:
        """End the recording, and write its compressed trace before returning.

        Raises ``ProfileError`` if none was started or if writing fails; there is no file then.
        """
        recording, self._profile, self.steps = self._profile, None, self._plain
        if recording is None:
            raise ProfileError(f"rank {self.number} records no profile")
        atexit.unregister(self._drop)
        whole = self._path.with_suffix("")
        try:
            recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            recording.export_chrome_trace(str(whole))  # type: ignore[no-untyped-call]
            size = whole.stat().st_size
            if size > MAX_TRACE_BYTES:
                raise ProfileError(
                    f"the trace of rank {self.number} has {size} bytes, and {MAX_TRACE_BYTES} are the limit; "
                    "record fewer steps (num_steps)"
                )
            with whole.open("rb") as read, gzip.open(self._path, "xb", COMPRESSION) as written:
                shutil.copyfileobj(read, written, 1 << 20)
        except (OSError, RuntimeError) as e:
            self._path.unlink(missing_ok=True)
            raise ProfileError(f"the trace of rank {self.number} was not written: {_first_line(e)}") from e
        finally:
            whole.unlink(missing_ok=True)

    def _drop(self) -> None:
        """End the recording, if there is one, without a file; registered for the process's exit."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Profiler:
    """Obeys the scheduler's ``ProfileCommand``, and has the other ranks of this host do so."""

    def __init__(self, rank: RankProfiler, queue: StepQueue, others: OtherRanks) -> None:
        self._rank = rank
        self._queue = queue
        self._others = others
        self._files: list[Path] = []

    def obey(self, command: ProfileCommand) -> ProfileEvent:
        """Start a profile on all ranks of this host, or end it and write its traces, and return the answer.

        A failure is told in the answer.
        """
        return self._start(command) if isinstance(command, StartProfile) else self._stop(command)

    def _start(self, command: StartProfile) -> ProfileStarted:
        can = self._rank.activities
        activities = [name for name in can if name in command.activities or not command.activities]
        if not activities:
            return ProfileStarted(
                status=400,
                error=f"activities: this instance records {', '.join(can)} alone, as it computes without a GPU",
            )
        order = StartProfile(command.name, activities, command.with_stack, command.record_shapes)
        folder = self._rank.folder / command.name
        try:
            self._make(folder)
        except FileExistsError:
            error = f'output_dir: a profile named "{command.name}" is there already; choose another name'
            return ProfileStarted(status=409, error=error)
        except ProfileError as e:
            return ProfileStarted(status=409, error=str(e))
        except OSError as e:
            return ProfileStarted(status=503, error=f"{e.filename or folder}: {e.strerror or e}")
        errors = self._tell(order)
        try:
            self._rank.start(order)
        except ProfileError as e:
            errors.append(str(e))
        if errors:
            self._stop(StopProfile())
            shutil.rmtree(folder, ignore_errors=True)
            return ProfileStarted(status=503, error=errors[0])
        self._queue.use(self._rank.steps)
        ranks = [self._rank.number, *self._others.numbers]
        self._files = [self._rank.path(command.name, rank) for rank in ranks]
        return ProfileStarted(str(folder), [str(path) for path in self._files], activities)

    def _stop(self, command: StopProfile) -> ProfileWritten:
        errors: list[str] = []
        # The others first: all ranks write at the same time.
        self._others.tell(command)
        try:
            self._rank.stop()
        except ProfileError as e:
            errors.append(str(e))
        self._queue.use(self._rank.steps)
        errors += self._others.answers()
        there = [path for path in self._files if path.exists()]
        nbytes = sum(path.stat().st_size for path in there)
        return ProfileWritten([str(path) for path in there], nbytes, errors[0] if errors else "")

    def _make(self, folder: Path) -> None:
        """Make the new, private folder of one profile.

        Raises ``ProfileError`` if there are too many, and ``OSError``.
        """
        make_private_folder(folder.parent)
        count = len(os.listdir(folder.parent))
        if count >= MAX_PROFILES:
            raise ProfileError(f"{folder.parent} holds {count} profiles, and {MAX_PROFILES} are the limit; remove some")
        folder.mkdir(mode=0o700)

    def _tell(self, command: StartProfile) -> list[str]:
        """Have the other ranks start recording, wait for their answers, and return why some could not."""
        self._others.tell(command)
        return self._others.answers()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
