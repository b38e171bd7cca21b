"""The scheduler's interface to its own parts that admit requests, move them between instances, and end late ones."""

from __future__ import annotations

from typing import Protocol

from ..messages.outputs import FinishReason
from ..messages.worker import WorkerReady
from ..runtime.disaggregation_options import DisaggregationMode
from .admission_gate import AdmissionGate
from .counters import Counters
from .deadlines import Deadlines
from .estimator import Estimator
from .forks import Forks
from .grammars import PreparedGrammars
from .handover import Handovers
from .kv_memory import KVMemory
from .options import SchedulerOptions
from .outbox import Outbox
from .planner import StepPlanner
from .req import Req, ReqState
from .tiers import Tiers


class RunsRequests(Protocol):
    """The scheduler, as these parts see it; ``Scheduler`` describes the attributes."""

    options: SchedulerOptions
    worker: WorkerReady
    outbox: Outbox
    tiers: Tiers
    memory: KVMemory
    planner: StepPlanner
    estimator: Estimator
    reqs: dict[str, Req]
    forks: Forks
    counters: Counters
    deadlines: Deadlines
    grammars: PreparedGrammars
    gate: AdmissionGate
    handovers: Handovers
    draining: bool
    now: float

    @property
    def role(self) -> DisaggregationMode:
        """Role of this instance now: the work that it is offered."""

    @property
    def longest(self) -> int:
        """Maximum length of a request in tokens, prompt and output."""

    def enqueue(self, req: Req, now: float) -> None:
        """Queue a request that is to compute its prompt here."""

    def end(self, req: Req, state: ReqState, finish: FinishReason | None) -> None:
        """End a request in ``state``, free its memory and send its client ``finish``, or nothing if that is None."""

    def fail(self, req: Req, status: int, message: str, kind: str = "server_error", code: str | None = None) -> None:
        """End a request because of a fault, and send its client its pending output and an error."""

    def leave(self, req: Req, state: ReqState) -> None:
        """Set a request to ``state``, in which it has ended, remove it from every queue and free its memory. Send
        nothing.
        """

    def send_output(self, req: Req) -> None:
        """Send a request's pending output, if there is any."""

    def on_newest_token(self, req: Req, token: int, now: float) -> None:
        """Count a token that was just appended to a request; send pending output if that is due, or end the request."""
