"""Reports to clients where a request's time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....messages.outputs import Phase, Timing
from ..engine.submission import Choice

PROCESSES = {
    Phase.TOKENIZE: "tokenizer",
    Phase.QUEUE: "scheduler",
    Phase.PREFILL: "worker",
    Phase.TRANSFER: "worker",
    Phase.DECODE: "worker",
    Phase.REPLY: "detokenizer",
}
"""The process that a request is in or waits for. TOKENIZE and REPLY include the way from and to the HTTP process."""
SUMS = ("tokenize_ms", "queue_ms", "prefill_ms", "transfer_ms")


def timing(spent: Timing, seconds: float) -> dict[str, Any]:
    """Return the ``timing`` object of an answer: times in milliseconds, by phase, and the bytes of a hand-over.

    ``spent``: what the instance's processes measured. ``seconds``: from the request's arrival to its end, as the HTTP
    process saw it.
    """
    counted = sum(one.ms for one in spent.phases)
    # A moved request's phases come from another host and include message delays: they may sum to a little more.
    total = max(seconds * 1000, counted)
    reply = total - counted
    fields: dict[str, Any] = {
        "total_ms": _rounded(total),
        "first_token_ms": _rounded(spent.first_token_ms),
        **{name: _rounded(getattr(spent, name)) for name in SUMS},
        "transfer_bytes": spent.transfer_bytes,
        "decode_ms": _rounded(spent.decode_ms),
        "reply_ms": _rounded(reply),
        "detokenize_ms": _rounded(spent.detokenize_ms),
    }
    if spent.push_ms:
        fields["push_ms"] = _rounded(spent.push_ms)
    phases = [(one.phase, one.at, one.ms) for one in spent.phases] + [(Phase.REPLY, spent.here, reply)]
    fields["phases"] = [
        {"phase": phase.value, "at": at, "process": PROCESSES[phase], "ms": _rounded(ms)} for phase, at, ms in phases
    ]
    if spent.timeline is not None:
        fields["timeline"] = {name: _rounded(ms) for name, ms in msgspec.structs.asdict(spent.timeline).items()}
    return fields


def timing_of(choices: Sequence[Choice]) -> dict[str, dict[str, Any]]:
    """Return ``{"timing": …}`` for an answer that is one choice and has ended, else ``{}``."""
    choice = choices[0]
    if len(choices) != 1 or choice.meta is None:
        return {}
    return {"timing": timing(choice.meta.timing, choice.seconds)}


def _rounded(value: float) -> float:
    return round(value, 3)
