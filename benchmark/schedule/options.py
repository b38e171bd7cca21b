"""The options of ``pdserve bench schedule``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...scheduler.policy_registry import POLICIES
from ..errors import BenchOptionsError

if TYPE_CHECKING:
    TracePolicyName = str
else:
    TracePolicyName = Literal[tuple(name for name, spec in POLICIES.items() if not spec.implies_priorities)]
"""A policy that orders the requests of a trace, which have no priorities."""
Rule = Literal["forecast", "ratio"]


@dataclass(frozen=True, kw_only=True)
class ScheduleBenchOptions:
    """Options of ``pdserve bench schedule``.

    Parameters
    ----------
    trace
        Trace in Mooncake's format (JSON lines): arrivals, lengths and shared blocks.
    num_requests
        Requests to take from the start of the trace; default: all.
    policies
        Policies to compare.
    admission
        Rules of admission to compare. forecast: the server's own. ratio: SGLang's, which reserves a share of what may
        be generated; the share sinks with each step and rises with each retraction.
    prefill_only
        Simulate a prefill instance: every request ends with its first token.
    length_scale
        Factor for the lengths of prompts, in steps of 1/512.
    output_scale
        Factor for the lengths of outputs.
    time_scale
        Factor for the times between arrivals; 0.5 is twice as fast.
    max_tokens
        What every client asks for, whatever it gets; before output_scale.
    pool_tokens
        Size of the KV pool.
    page_size
        Tokens of a KV page.
    max_running_requests
        Most requests that hold KV memory at once.
    chunked_prefill_size
        Most prompt tokens of a step.
    itl_budget_ms
        As of the server, for steps in which requests decode.
    conservativeness
        As --schedule-conservativeness of the server.
    output_json
        File for the results.
    """

    trace: Path | None = None
    num_requests: int | None = None
    policies: list[TracePolicyName] = field(default_factory=lambda: ["fcfs", "srpf"])
    admission: list[Rule] = field(default_factory=lambda: ["forecast"])
    prefill_only: bool = False
    length_scale: float = 1 / 16
    output_scale: float = 0.25
    time_scale: float = 1.0
    max_tokens: int = 2048
    pool_tokens: int = 65536
    page_size: int = 16
    max_running_requests: int = 64
    chunked_prefill_size: int = 512
    itl_budget_ms: float = 40.0
    conservativeness: float = 1.0
    output_json: Path | None = None

    def check(self) -> None:
        """Raise ``BenchOptionsError`` when these options can't work."""
        if self.trace is None:
            raise BenchOptionsError("--trace is needed: a file in the format of the Mooncake traces")
        if not self.policies or not self.admission:
            raise BenchOptionsError("--policies and --admission take one value or more")
        for name in ("length_scale", "output_scale", "conservativeness"):
            if not 0 < getattr(self, name) < math.inf:
                raise BenchOptionsError(f"--{name.replace('_', '-')} must be above 0")
        for name in ("num_requests", "max_tokens", "page_size", "max_running_requests", "chunked_prefill_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BenchOptionsError(f"--{name.replace('_', '-')} must be 1 or more")
        if self.pool_tokens % self.page_size or self.pool_tokens < self.page_size:
            raise BenchOptionsError("--pool-tokens must be a whole number of pages")
        if not 0 <= self.time_scale < math.inf or not 0 <= self.itl_budget_ms < math.inf:
            raise BenchOptionsError("--time-scale and --itl-budget-ms must be 0 or more")
