"""Options of the processes of a server, and of their logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .disaggregation_options import DisaggregationOptions
from .options import opt, section


@section("Processes and logs", order=110)
@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Options of every server's processes and logs, the router's too."""

    drain_timeout: float = opt(
        default=30.0,
        help="Seconds for running requests to finish after SIGTERM.",
        at_least=0,
    )
    allow_core_dumps: bool = opt(
        default=False,
        help=(
            "Allow core dumps of the server's processes, and debuggers and profilers of the same user. Both reveal "
            "keys and prompts."
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = opt(
        default="info", help="Lowest severity of logged messages."
    )
    log_format: Literal["text", "json"] = opt(
        default="text", help="Format of the log. text: for people. json: one object per line."
    )


@section("Processes and logs", order=110)
@dataclass(frozen=True, kw_only=True)
class ProcessOptions(LogOptions):
    """Options of the processes of an instance."""

    watchdog_timeout: float = opt(
        default=60.0, help="Seconds that one step may take before /health reports a failure.", above=0
    )
    startup_timeout: float = opt(default=300.0, help="Seconds that start-up may take.", above=0)


@dataclass(frozen=True, kw_only=True)
class ChildOptions(DisaggregationOptions, ProcessOptions):
    """Options that every child process of an instance reads."""
