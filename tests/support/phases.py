"""What must hold of the account of a request's time (``Timing.phases``), whatever became of the request."""

from __future__ import annotations

from pdserve.messages.outputs import Phase, ReqMeta, Timing

ROUNDING_MS = 1e-3


def phases_problem(meta: ReqMeta, age: float, *, computed: bool, reported_later: bool = False) -> str | None:
    """Return what is wrong with the phases of a request that is ``age`` seconds old; None if nothing is.

    ``computed``: whether its first token is known. At least one prompt token is computed before that.
    ``reported_later``: it may have ended earlier than now.
    """
    timing = meta.timing
    names = [(one.phase, one.at) for one in timing.phases]
    if len(set(names)) != len(names):
        return f"a phase of an instance is reported twice: {timing.phases}"
    if any(one.ms < 0 for one in timing.phases):
        return f"a phase is negative: {timing.phases}"
    total = sum(one.ms for one in timing.phases)
    if total - age * 1000 > ROUNDING_MS or (age * 1000 - total > ROUNDING_MS and not reported_later):
        return f"the phases add up to {total:.3f} ms, the request is {age * 1000:.3f} ms old: {timing.phases}"
    for phase in (Phase.TOKENIZE, Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER, Phase.DECODE):
        spent = sum(one.ms for one in timing.phases if one.phase is phase)
        if abs(getattr(timing, f"{phase}_ms") - spent) > ROUNDING_MS:
            return f"{phase}_ms is {getattr(timing, f'{phase}_ms')}, its phases add up to {spent}"
    if computed and timing.prefill_ms <= 0:
        return f"{meta.prompt_tokens - meta.cached_tokens} prompt tokens were computed in no time: {timing.phases}"
    if not 0 <= timing.first_token_ms <= total + ROUNDING_MS:
        return f"the first token came after {timing.first_token_ms} of {total} ms"
    return None


def where(timing: Timing) -> set[tuple[str, str]]:
    """Return the phases that took time, with the instances that spent it."""
    return {(one.phase.value, one.at) for one in timing.phases}
