"""Estimates of how much instances have to do, from the router's counts and their reports, and rules that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .instance import Instance, Role
from .targets import Pair, Target

MOST_WAITING = 512
"""Maximum number of prompt tokens queued at a prefill that may also decode: about one step."""
CLEARLY_FASTER = 0.75
"""A prefill may decode a request itself if its time per token is at most this fraction of the decode's."""
MORE_STREAMS = 4
"""A prefill may decode a request itself only if the decode has at least this many more streams."""
ANSWER_TOKENS = 256
"""Prompt tokens that take about as long as the rest of a running answer, among the work of one instance."""

ANSWER_SHARE = 0.02
"""Least share of a decode's reported time per token that each further answer adds to its cost.

An instance may report that further answers cost nothing. Without this share, all requests would go to the decode that
reported the lowest time last.
"""
FAILURE_ANSWERS = 2.0
"""Running answers that a recent failure counts as."""
SIMILAR_FAILURES = 2.0, 0.5
"""Factor and sum. Idle instances take turns if their counts of recent failures are at most ``factor * best + sum``.

``best``: the count of the one with the lowest cost.
"""

Cost = Callable[[Instance], float]


def queued(target: Target) -> tuple[int, int]:
    """Return the load that a new request at ``target`` meets, for comparing targets.

    The first number is the prompt tokens that its prefill has still to compute. The second is the requests in flight at
    its decode. A single instance has both.
    """
    prefill, decode = target if isinstance(target, Pair) else (target, target)
    return prefill.prompt_tokens, decode.in_flight


def relieved(pair: Pair) -> Target:
    """Return ``pair``, or its prefill alone if that should decode the request, too: the decode has too much to do."""
    return pair.prefill if _spares_its_decode(pair) else pair


def _spares_its_decode(pair: Pair) -> bool:
    """Return whether the prefill of ``pair`` should decode the request, too, because the decode has too much to do.

    Return False if the pace of either is unknown. The same holds if the prefill takes only shorter requests, or has
    many prompts to compute for decodes.
    """
    prefill, decode = pair
    if prefill.token_ms is None or decode.token_ms is None or decode.decode_ms is None:
        return False
    if prefill.handed_over_tokens > MOST_WAITING or not prefill.has_room_of(decode):
        return False
    more = decode.answers - prefill.answers >= MORE_STREAMS
    if more and prefill.token_ms <= CLEARLY_FASTER * decode.decode_ms:
        return True
    return not decode.keeps_pace and prefill.token_ms < decode.token_ms


def cost_for(role: Role, candidates: Sequence[Instance], prompt_tokens: int) -> Cost:
    """Return a function that estimates how long a request would take at each of ``candidates``, for comparing them.

    ``role``: the part of the request that they would serve. ``prompt_tokens``: the length of its prompt.

    - A decode costs the time per token that it reports, corrected for requests sent since, and a share of it for each
      answer.
    - A prefill or worker costs its ``work``, weighted by the time per token that it reports.

    Reports are used only if all candidates have one. A recent failure counts as ``FAILURE_ANSWERS`` requests like this
    one.
    """
    is_reported = all(instance.report.pace is not None for instance in candidates)
    if role is Role.DECODE:
        return _token_ms if is_reported else _answers
    size = prompt_tokens + ANSWER_TOKENS
    if not is_reported:
        return lambda instance: work(instance) + size * _failed_answers(instance)
    return lambda instance: (work(instance) + size * (1.0 + _failed_answers(instance))) * (instance.decode_ms or 0.0)


def least_loaded(role: Role, candidates: Sequence[Instance], prompt_tokens: int) -> Instance:
    """Return the candidate with the lowest cost (``cost_for``). Without requests, all are equal: return the first one.

    What an instance reports is as old as its last request. If it was too high, it would never get another one while the
    others are idle. Instances that are equal should fail similarly often, too.
    """
    best = min(candidates, key=cost_for(role, candidates, prompt_tokens))
    if not _is_idle(best):
        return best
    factor, more = SIMILAR_FAILURES
    most = factor * best.recent_failures.count + more
    return next(one for one in candidates if _is_idle(one) and one.recent_failures.count <= most)


def _is_idle(instance: Instance) -> bool:
    return not (instance.answers or instance.prompt_tokens)


def _token_ms(instance: Instance) -> float:
    pace, failed = instance.report.pace, _failed_answers(instance)
    failed_ms = failed * pace.stream_ms if pace is not None else 0.0
    return ((instance.token_ms or 0.0) + failed_ms) * (1.0 + ANSWER_SHARE * (instance.answers + failed))


def _answers(instance: Instance) -> float:
    return instance.answers + _failed_answers(instance)


def _failed_answers(instance: Instance) -> float:
    return FAILURE_ANSWERS * instance.recent_failures.count


def work(instance: Instance) -> int:
    """Return the prompt tokens that an instance has to compute, with each running answer as ``ANSWER_TOKENS``."""
    return instance.prompt_tokens + ANSWER_TOKENS * instance.answers
