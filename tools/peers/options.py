"""The options of ``python -P -m tools.peers``, declared once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .cases import CASES
from .engines import ENGINES

Step = Literal["install", "run", "page"]
STEPS: tuple[Step, ...] = ("install", "run", "page")


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Options of the peer comparison.

    Parameters
    ----------
    steps
        install: get and build the peers. run: measure. page: write the page and its plots from the results.
    build_dir
        Folder for the peers, the exported model, logs and results; it keeps itself out of git.
    results
        Folder of the results; a run that is there already is not repeated. Default: a new one in build_dir, and for the
        page alone the newest.
    page
        The page to write; its plots go into a folder beside it, called as the page.
    rounds
        How often everything is measured; within a round the engines take turns.
    engines
        Engines to measure.
    cases
        Cases to measure.
    """

    steps: list[Step] = field(default_factory=lambda: list(STEPS))
    build_dir: Path = Path(".bench")
    results: Path | None = None
    page: Path = Path("docs/benchmarks.md")
    rounds: int = 3
    engines: list[str] = field(default_factory=lambda: list(ENGINES))
    cases: list[str] = field(default_factory=lambda: list(CASES))

    def results_dir(self) -> Path:
        """Return the folder of results: the given one, or one below ``build_dir``.

        To measure, that is a new one, named after the time. Otherwise it is the newest one, if there is any.
        """
        if self.results is not None:
            return self.results
        folder = self.build_dir / "results"
        there = sorted(folder.glob("*/"))
        return there[-1] if there and "run" not in self.steps else folder / time.strftime("%Y%m%d-%H%M%S")

    def check(self) -> None:
        """Raise ``ValueError`` for an unknown engine or case, or for fewer rounds than one."""
        for flag, given, known in (("engines", self.engines, ENGINES), ("cases", self.cases, CASES)):
            if unknown := sorted(set(given) - set(known)):
                raise ValueError(f"--{flag}: there is no {unknown[0]!r}, only {', '.join(known)}")
        if self.rounds < 1:
            raise ValueError("--rounds must be 1 or more")
