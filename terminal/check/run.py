"""``pdserve check``: looks at this machine, and at a model and a server that are named, and says what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from ...runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from ..access import AccessError, check_server_url, read_api_key
from .backends import look_at_backends
from .finding import Finding, Level
from .host import look_at_cores, look_at_files, look_at_memory, look_at_run_dir, look_at_shared_memory
from .kernels import can_use_kernels, look_at_kernels
from .model import look_at_model
from .options import CheckOptions
from .ports import look_at_ports
from .probe import Probe, run_probe
from .server import look_at_server
from .software import look_at_packages, look_at_python, look_at_torch

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
MODEL_SECONDS = 60.0
"""A big vocabulary takes a while, and so does a folder with many files on a network disk."""
SERVER_SECONDS = 20.0


def run_check(options: CheckOptions) -> int:
    """Run all probes and print what they find; return the exit code.

    It is 0, 1 if there is a problem, or 2 for a bad option.
    """
    try:
        probes = list(choose_probes(options))
    except AccessError as e:
        print(f"pdserve check: {e}", file=sys.stderr)
        return EXIT_USAGE
    report = _Lines(sys.stdout)
    findings: list[Finding] = []
    for probe in probes:
        found = run_probe(probe)
        findings += found
        if not options.json:
            # As they come: some take a while.
            report.show(found)
    if options.json:
        print(as_json(findings))
    else:
        report.sum_up(findings)
    return EXIT_FAILED if any(finding.level is Level.PROBLEM for finding in findings) else 0


def choose_probes(options: CheckOptions) -> Iterator[Probe]:
    """Yield the probes that ``options`` ask for, in the order in which they run.

    Raises ``AccessError`` for an unusable URL or key file.
    """
    yield Probe("python", look_at_python)
    yield Probe("packages", look_at_packages)
    yield Probe("torch", look_at_torch)
    yield Probe("processor", look_at_cores)
    yield Probe("kernels", look_at_kernels)
    yield Probe("memory", look_at_memory)
    yield Probe("shared memory", look_at_shared_memory)
    yield Probe("open files", look_at_files)
    yield Probe("sockets", look_at_run_dir)
    yield Probe("ports", partial(look_at_ports, options.ports_to_check))
    yield Probe("backends", look_at_backends)
    if options.model_path is not None:
        look = partial(look_at_model, options.model_path, can_use_kernels(), options.revision)
        yield Probe("model", look, MODEL_SECONDS)
    if options.url is not None:
        url, api_key = check_server_url(options.url), read_api_key(options.api_key_file)
        yield Probe("server", partial(look_at_server, url, api_key), SERVER_SECONDS)


def as_json(findings: list[Finding]) -> str:
    """Format all findings and the worst level among them as JSON, for programs."""
    order = list(Level)
    worst = max((finding.level for finding in findings), key=order.index, default=Level.OK)
    content = {
        "pdserve": version("pdserve"),
        "level": worst,
        "findings": [finding._asdict() for finding in findings],
    }
    return msgspec.json.format(msgspec.json.encode(content)).decode()


class _Lines:
    """Output for people: one line per finding, with its advice below."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False, soft_wrap=True)

    def show(self, findings: list[Finding]) -> None:
        """Print each finding on a line, and its advice below."""
        for finding in findings:
            line = Text.assemble((f"{finding.level:<8}", STYLES[finding.level]), f" {finding.topic:<14} {finding.text}")
            self._console.print(line)
            if finding.advice:
                self._console.print(Text(f"{'':<24}{finding.advice}", style="dim"))

    def sum_up(self, findings: list[Finding]) -> None:
        """Print the last line, with the numbers of problems and warnings among ``findings``."""
        count: Callable[[Level], int] = [finding.level for finding in findings].count
        problems, warnings = count(Level.PROBLEM), count(Level.WARNING)
        self._console.print(f"\n{_number(problems, 'problem')}, {_number(warnings, 'warning')}")


def _number(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'s' * (count != 1)}"
