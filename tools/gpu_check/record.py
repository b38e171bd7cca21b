"""What a part of the check has found, in a file that is written anew before and after every check.

It imports the standard library alone, because the page is also made where nothing is installed yet.

A part has groups of checks, and each group is a process of its own. So an error of the device, after which a process
can't use it any more, ends a group and not the part. The file shows at any time what is found, which check runs, and
which ones follow in the group. What a process could not check is left out by name. ``Recorder`` reports it if it can,
and ``close_group`` if the process has died or was ended.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

PARTS = {
    "kernels": ("layers", "sampler", "packed", "attention"),
    "device": ("tests",),
    "server": ("cpu", "device"),
    "served": ("1B", "8B"),
    "handovers": ("driver", "ranks", "pairs", "cluster", "rate"),
    "bench": ("rates", "1B", "8B", "graphs", "packed"),
    "peers": ("products", "prompts", "compiled", "batching"),
}
"""The groups of each part, in the order in which they run: those that compile longest come last."""
Check = tuple[str, Callable[[], "Finding"]]
"""A name, and what finds out."""


@dataclass
class Finding:
    """``ok``: None where nothing could be said (``figure`` tells why), or nothing was asked of the figure."""

    name: str
    figure: str
    asked: str = ""
    ok: bool | None = None


@dataclass
class PartRecord:
    """One part's findings, on ``device`` with ``versions``."""

    part: str
    dry_run: bool
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Checks that were not made, each with the reason."""
    group: str = ""
    """The group that began last and has told the names of its checks."""
    pending: list[str] = field(default_factory=list)
    """Checks of the group that runs, from the one that runs on."""
    is_checking: bool = False
    """Whether the first of ``pending`` has begun."""
    seconds: float = 0.0
    is_over: bool = False
    """Whether no group follows."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is over and no check was left out."""
        return self.is_over and not self.left_out

    @property
    def is_well(self) -> bool:
        """Whether the part is over, no check was left out and none failed."""
        return self.is_whole and all(finding.ok is not False for finding in self.findings)


class Recorder:
    """Writes ``record`` to ``path``. No check begins after ``seconds`` from now.

    ``is_alive`` is asked after an error: whether this process can still use its device.
    """

    def __init__(
        self,
        record: PartRecord,
        path: Path,
        seconds: float = float("inf"),
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.record = record
        self._path = path
        self._is_alive = is_alive
        self._begin = time.monotonic()
        self._until = self._begin + seconds
        self._seconds_before = record.seconds
        self._write()

    def run(self, group: str, make_checks: Callable[[], Iterable[Check]]) -> None:
        """Run the checks of a group, one after another, until the device fails or the time is over.

        Each finding is written to the file at once. Checks that did not run are recorded as left out.
        """
        todo: list[Check] = []
        self.record.group = group

        def prepare() -> Finding:
            todo.extend(make_checks())
            return Finding("", f"{len(todo)} checks")

        self.record.pending = [f"preparing “{group}”"]
        self.check(self.record.pending[0], prepare)
        if self.record.findings[-1].ok is not False:
            # What went well is no finding.
            self.record.findings.pop()
        self.record.pending = [name for name, _ in todo]
        for name, find in todo:
            if time.monotonic() > self._until:
                self._leave_out("no time was left")
                break
            if not self.check(name, find):
                self._leave_out(f"the device failed in “{name}”")
                break
        self._write()

    def check(self, name: str, find: Callable[[], Finding]) -> bool:
        """Run ``find``, and record and print its finding, or its exception as a failure.

        Return whether the device can still be used.
        """
        self.record.is_checking = True
        self._write()
        begin, alive = time.monotonic(), True
        try:
            finding = find()
        except Exception as e:  # noqa: BLE001 - whatever it is, it is what this check came to
            traceback.print_exc()
            finding = Finding(name, f"{type(e).__name__}: {e}"[:300], ok=False)
            if not (alive := self._is_alive()):
                finding.figure += " (the device failed: run again with CUDA_LAUNCH_BLOCKING=1 to see in which kernel)"
        finding.name = name
        self.record.findings.append(finding)
        self.record.pending, self.record.is_checking = self.record.pending[1:], False
        verdict = {True: "ok", False: "FAILED", None: "-"}[finding.ok]
        print(f"{verdict:6} {name}: {finding.figure} ({time.monotonic() - begin:.1f} s)", flush=True)
        self._write()
        return alive

    def _leave_out(self, reason: str) -> None:
        self.record.left_out += [f"{name} ({reason})" for name in self.record.pending]
        self.record.pending = []

    def _write(self) -> None:
        self.record.seconds = round(self._seconds_before + time.monotonic() - self._begin, 1)
        write_record(self._path, self.record)


def close_group(record: PartRecord, group: str, reason: str) -> None:
    """Complete ``record`` after a group's process has ended: a check that was running has failed, others are left out.

    ``reason``: why the process ended early, "" if it did not.
    """
    why = reason or "its process died"
    if record.group != group:
        record.pending, record.is_checking = [f"all of “{group}”"], False
    if record.is_checking:
        record.findings.append(Finding(record.pending.pop(0), f"not finished: {why}", ok=False))
    record.left_out += [f"{name} ({why})" for name in record.pending]
    record.pending, record.is_checking = [], False


def write_record(path: Path, record: PartRecord) -> None:
    """Replace the file by the whole record in one step: a reader finds the old record or the new one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(record), indent=1))
    os.replace(new, path)


def read_record(path: Path) -> PartRecord | None:
    """Return the record that the file holds; None if there is no file, because the part has not begun."""
    if not path.is_file():
        return None
    fields = json.loads(path.read_text())
    fields["findings"] = [Finding(**finding) for finding in fields["findings"]]
    return PartRecord(**fields)
