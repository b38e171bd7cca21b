"""What a part of the check has found, in a file that is written anew after every finding: a part that is cut off leaves
what it had. Of the standard library alone: the page is also made where nothing is installed yet.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

PARTS = ("kernels", "server", "handovers", "bench", "peers")


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
    seconds: float = 0.0
    ended: str = "cut off"
    """How: "whole", "cut off", or the error."""


class Recorder:
    """Writes ``record`` to ``path``."""

    def __init__(self, record: PartRecord, path: Path) -> None:
        self.record = record
        self._path = path
        self._begin = time.monotonic()
        self._write()

    def check(self, name: str, find: Callable[[], Finding]) -> None:
        """Note what ``find`` says. An error is a finding, too: the other checks go on."""
        begin = time.monotonic()
        try:
            finding = find()
        except Exception as e:  # noqa: BLE001 - whatever it is, it is what this check came to
            traceback.print_exc()
            finding = Finding(name, f"{type(e).__name__}: {e}"[:300], ok=False)
        finding.name = name
        self.record.findings.append(finding)
        told = {True: "ok", False: "FAILED", None: "-"}[finding.ok]
        print(f"{told:6} {name}: {finding.figure} ({time.monotonic() - begin:.1f} s)", flush=True)
        self._write()

    def finish(self) -> None:
        """All was checked."""
        self.record.ended = "whole"
        self._write()

    def _write(self) -> None:
        self.record.seconds = round(time.monotonic() - self._begin, 1)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self.record), indent=1))
        os.replace(new, self._path)


def read_record(path: Path) -> PartRecord | None:
    """None where the part has not begun."""
    if not path.is_file():
        return None
    fields = json.loads(path.read_text())
    fields["findings"] = [Finding(**finding) for finding in fields["findings"]]
    return PartRecord(**fields)
