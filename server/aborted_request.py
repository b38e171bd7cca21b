"""Ends requests with all answers aborted before their prompts were encoded."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..messages.outputs import (
    FinishReason,
    FinishType,
    InstanceRole,
    Phase,
    PhaseTime,
    ReqMeta,
    ReqText,
    TextBatch,
    Timing,
)
from ..messages.requests import TokenizeReq


def end_of_aborted(req: TokenizeReq, aborts: Mapping[str, str], here: InstanceRole) -> TextBatch:
    """Return the message that ends ``req``: one aborted result without text or tokens for each of its answers.

    ``aborts``: the reason for each answer, by rid. ``here``: role of this instance. The time since the request's
    arrival counts as tokenizing.
    """
    ms = 1000 * max(0.0, time.monotonic() - req.arrival)
    timing = Timing(tokenize_ms=ms, here=here, phases=[PhaseTime(Phase.TOKENIZE, here, ms)])
    return TextBatch(
        [
            ReqText(rid, "", [], FinishReason(FinishType.ABORT, message=reason), ReqMeta(0, 0, 0, timing))
            for rid, reason in aborts.items()
        ]
    )
