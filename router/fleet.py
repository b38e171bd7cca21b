"""All instances of a router, and the choice of the one that serves the next request.

The rule: a pair, if a healthy prefill and a healthy decode exist, or a healthy worker that has less to do. A pair
needs both of its legs, so an unhealthy prefill also keeps work from the decodes, and vice versa. Instances with an open
circuit breaker come last, and so do those that the request has already failed on.

The decode of a pair decides whether the prefill or itself computes the prompt, because the router does not know their
caches. To decide, it asks the prefill (``disaggregation/handover/placement_policy.py``).

In two cases the prefill gets the whole request, by the paces that both report in ``/health``:

- the prefill would answer much faster;
- the prefill would answer faster, and the decode hardly keeps its ITL budget.

Instances report a pace only with ``--disaggregation-threshold auto``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..messages.metrics import Histogram
from .instance import HealthState, Instance, Role
from .options import RouterOptions, check_url, parse_prefill
from .policies.registry import make_policy
from .request_body import RequestBody

logger = logging.getLogger(__name__)

MOST_WAITING = 512
"""Maximum number of prompt tokens queued at a prefill that may also decode: about one step."""
CLEARLY_FASTER = 0.75
"""A prefill may decode a request itself if its time per token is at most this fraction of the decode's."""
MORE_STREAMS = 4
"""A prefill may decode a request itself only if the decode has at least this many more streams."""
PICK_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Pair(NamedTuple):
    """A prefill and a decode that serve one request together."""

    prefill: Instance
    decode: Instance


Target = Pair | Instance


def _queued(target: Target) -> tuple[int, int]:
    """Return the load that a new request at ``target`` meets, for comparing targets.

    The first number is the prompt tokens that its prefill has still to compute. The second is the requests in flight at
    its decode. A single instance has both.
    """
    prefill, decode = target if isinstance(target, Pair) else (target, target)
    return prefill.prompt_tokens, decode.in_flight


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


class Fleet:
    """The instances, their states, and the policies that choose among them."""

    def __init__(self, options: RouterOptions) -> None:
        prefills = [Instance(url, Role.PREFILL, port) for url, port in parse_prefill(options.prefill)]
        decodes = [Instance(check_url(url), Role.DECODE) for url in options.decode]
        workers = [Instance(check_url(url), Role.UNIFIED) for url in options.worker]
        self.instances: tuple[Instance, ...] = (*prefills, *decodes, *workers)
        self._policies = {role: make_policy(options.policy) for role in Role}
        self._changed = asyncio.Event()
        self.pick_seconds = Histogram(PICK_SECONDS)
        """Seconds that requests waited for the choice of an instance."""
        self.retries: Counter[int] = Counter()
        """Attempts after a failed one, by the status that the failure would have been answered with."""

    def healthy(self, role: Role | None = None) -> list[Instance]:
        """Return the healthy instances of one role, or of all."""
        return [i for i in self.instances if i.state is HealthState.HEALTHY and role in (None, i.role)]

    def in_rotation(self, role: Role) -> list[Instance]:
        """Return the healthy instances of a role, without those with an open circuit breaker.

        At most half of them, rounded down, are left out at a time, in the order in which their breakers opened. So one
        client's errors never put the whole load on one instance, and the only instance of a role is never left out.
        """
        healthy = self.healthy(role)
        opened = sorted((i for i in healthy if i.breaker), key=lambda i: i.breaker.opened_at)
        left_out = opened[: len(healthy) // 2]
        return [i for i in healthy if i not in left_out] if left_out else healthy

    def can_serve(self) -> bool:
        """Return whether a worker, or a prefill and a decode, are healthy, so that a request can be served now."""
        return bool(self.healthy(Role.UNIFIED) or (self.healthy(Role.PREFILL) and self.healthy(Role.DECODE)))

    def has_others(self, request: RequestBody, failed: Collection[Instance]) -> bool:
        """Return whether the instances that ``request`` needs are in rotation and not among ``failed``.

        It needs a worker or a prefill, and a decode beside the prefill unless it is a prompt alone.
        """
        fresh = {role for role in Role for i in self.in_rotation(role) if i not in failed}
        pair = {Role.PREFILL} if request.is_prompt_alone else {Role.PREFILL, Role.DECODE}
        return Role.UNIFIED in fresh or pair <= fresh

    def named(self, epoch: str, url: str) -> Instance | None:
        """Return the instance with this epoch, or else the one at ``url``; None if the router has neither."""
        known = [i for i in self.instances if epoch and i.report.epoch == epoch]
        return next(iter(known or [i for i in self.instances if i.url == url]), None)

    def undecided(self) -> bool:
        """Return whether a health check that has not ended may still find an instance that can serve.

        It may if an instance is in state ``UNKNOWN``, or if its ``asked_again`` is set.
        """
        return any(i.state is HealthState.UNKNOWN or i.asked_again for i in self.instances)

    def pick(
        self, request: RequestBody, failed: Collection[Instance] = (), tried: Collection[Instance] = ()
    ) -> Target | None:
        """Choose the pair or the single instance that serves ``request``; return None while none can.

        ``failed`` are instances on which the request has failed before. ``tried`` are instances that took part in
        earlier attempts. They come after others, because the earlier attempt may still be ending there, with the same
        rid.
        """
        if request.is_prompt_alone:
            return self._pick_for_prompt(request, failed, tried)
        prefills, decodes, workers = (self.healthy(role) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED))
        fresh_prefills, fresh_decodes, fresh_workers = (
            [i for i in self.in_rotation(role) if i not in failed] for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)
        )
        fresh_prefills, fresh_decodes = (
            [i for i in group if i not in tried] or group for group in (fresh_prefills, fresh_decodes)
        )
        if fresh_prefills and fresh_decodes:
            pair = self._pair(fresh_prefills, fresh_decodes, request)
            target = pair.prefill if _spares_its_decode(pair) else pair
            worker = self._policies[Role.UNIFIED].choose(fresh_workers, request) if fresh_workers else None
            return worker if worker is not None and _queued(worker) < _queued(target) else target
        if fresh_workers:
            return self._policies[Role.UNIFIED].choose(fresh_workers, request)
        if prefills and decodes:
            return self._pair(fresh_prefills or prefills, fresh_decodes or decodes, request)
        return self._policies[Role.UNIFIED].choose(workers, request) if workers else None

    def _pick_for_prompt(
        self, request: RequestBody, failed: Collection[Instance], tried: Collection[Instance]
    ) -> Instance | None:
        """Choose the prefill or worker that computes a prompt and answers; the arguments are those of ``pick``."""
        roles = (Role.PREFILL, Role.UNIFIED)
        fresh = [[i for i in self.in_rotation(role) if i not in failed] for role in roles]
        fresh = [[i for i in group if i not in tried] or group for group in fresh]
        groups = fresh if any(fresh) else [self.healthy(role) for role in roles]
        chosen = [self._policies[group[0].role].choose(group, request) for group in groups if group]
        return min(chosen, key=_queued, default=None)

    def _pair(self, prefills: Sequence[Instance], decodes: Sequence[Instance], request: RequestBody) -> Pair:
        prefill = self._policies[Role.PREFILL].choose(prefills, request)
        return Pair(prefill, self._policies[Role.DECODE].choose(decodes, request))

    def set_state(self, instance: Instance, state: HealthState, reason: str) -> None:
        """Record the state of an instance and the reason for it. A change wakes all tasks in ``wait_change``.

        When an instance becomes unhealthy, all healthy ones are checked now. When it has recovered, its circuit breaker
        is closed.
        """
        if instance.state is not state:
            level = logging.INFO if state is HealthState.HEALTHY else logging.WARNING
            logger.log(level, "%s is %s: %s", instance, state, reason)
            self._changed.set()
            self._changed = asyncio.Event()
        # Also after UNKNOWN, the state after a request found the instance dead.
        if state is HealthState.UNHEALTHY and instance.state is not HealthState.UNHEALTHY:
            self._ask_others(instance)
        if state is HealthState.HEALTHY and instance.state is HealthState.UNHEALTHY:
            instance.breaker.forget()
        instance.state = state
        instance.reason = reason

    def _ask_others(self, gone: Instance) -> None:
        """Have the health of all healthy instances but ``gone`` checked now: one of them may have taken over its role.

        Sets their ``asked_again``, and waits for no check. ``gone``: an instance that has become unhealthy.
        """
        for other in self.instances:
            if other is not gone and other.state is HealthState.HEALTHY:
                other.asked_again = True
                other.check_now.set()

    def answered_again(self, instance: Instance) -> None:
        """Clear ``asked_again`` of ``instance``, because the check that it requested has ended.

        Wake all tasks in ``wait_change``.
        """
        instance.asked_again = False
        self.role_changed()

    def role_changed(self) -> None:
        """Wake all tasks in ``wait_change``: an instance has changed its role, or was checked again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def report_failure(self, instance: Instance, reason: str) -> None:
        """Note that a request found an instance dead. It gets no requests until a check, which starts now, has passed.

        ``reason`` is shown as the reason for its state.
        """
        instance.failures += 1
        if instance.state is HealthState.HEALTHY:
            self.set_state(instance, HealthState.UNKNOWN, reason)
        instance.check_now.set()

    async def wait_change(self) -> None:
        """Wait until the state or the role of an instance changes, or a requested check has ended."""
        await self._changed.wait()
