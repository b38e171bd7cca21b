"""All instances of a router, and which of them serves the next request.

The rule: a pair where a healthy prefill and a healthy decode exist, or a healthy worker that has less to do. A pair
needs both of its legs, so an unhealthy prefill also keeps work from the decodes, and the other way round. Instances
that rest come last, and on a retry those that the request has already failed on.

Whether the prefill of a pair computes the prompt, or its decode after all, is for the decode to say, which asks the
prefill (``disaggregation/handover/choice.py``): the router knows neither's cache. But where an answer would come much
faster from the prefill, by the pace that both tell in ``/health``, or faster at all than from a decode that hardly
keeps its ITL budget, the prefill gets the whole request. Instances whose ``--disaggregation-threshold`` is not ``auto``
tell none.
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
from .policies import POLICIES
from .request_body import RequestBody

logger = logging.getLogger(__name__)

MOST_WAITING = 512
"""Maximum number of prompt tokens queued at a prefill that may also decode: about one step."""
CLEARLY_FASTER = 0.75
"""A prefill may decode a request itself if its time per token is at most this fraction of the decode's."""
MORE_STREAMS = 4
"""And if the decode has at least this many more streams than the prefill."""
PICK_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Pair(NamedTuple):
    """A prefill and a decode that serve one request together."""

    prefill: Instance
    decode: Instance


Target = Pair | Instance


def _queued(target: Target) -> tuple[int, int]:
    """What a request would wait for there: prompt tokens to be computed before its own, and answers beside it."""
    prefill, decode = target if isinstance(target, Pair) else (target, target)
    return prefill.prompt_tokens, decode.in_flight


def _spares_its_decode(pair: Pair) -> bool:
    """Whether the decode of a pair has too much to do, and the prefill so little that it would decode faster."""
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
        workers = [Instance(check_url(url), Role.WORKER) for url in options.worker]
        self.instances: tuple[Instance, ...] = (*prefills, *decodes, *workers)
        self._policies = {role: POLICIES[options.policy]() for role in Role}
        self._changed = asyncio.Event()
        self.pick_seconds = Histogram(PICK_SECONDS)
        """How long requests waited to be given somebody who serves them."""
        self.retries: Counter[int] = Counter()
        """Attempts after a failed one, by the status that the failure would have been answered with."""

    def healthy(self, role: Role | None = None) -> list[Instance]:
        """Healthy instances, of one role or of all."""
        return [i for i in self.instances if i.state is HealthState.HEALTHY and role in (None, i.role)]

    def in_rotation(self, role: Role) -> list[Instance]:
        """Healthy instances of a role, less those whose circuit breaker is open.

        At most half of them, rounded down, are left out at a time: those whose breakers opened first. So one client's
        errors never put the load of all on one instance, and the only instance of a role is always there.
        """
        healthy = self.healthy(role)
        opened = sorted((i for i in healthy if i.rest), key=lambda i: i.rest.opened_at)
        left_out = opened[: len(healthy) // 2]
        return [i for i in healthy if i not in left_out] if left_out else healthy

    def can_serve(self) -> bool:
        """Whether a request that comes now can be sent anywhere."""
        return bool(self.healthy(Role.WORKER) or (self.healthy(Role.PREFILL) and self.healthy(Role.DECODE)))

    def has_others(self, failed: Collection[Instance]) -> bool:
        """Whether instances that are in rotation and not among ``failed`` can serve."""
        fresh = {role for role in Role for i in self.in_rotation(role) if i not in failed}
        return Role.WORKER in fresh or {Role.PREFILL, Role.DECODE} <= fresh

    def named(self, epoch: str, url: str) -> Instance | None:
        """The instance that says it has this epoch; or else is where ``url`` says. None of any other's."""
        known = [i for i in self.instances if epoch and i.told.epoch == epoch]
        return next(iter(known or [i for i in self.instances if i.url == url]), None)

    def undecided(self) -> bool:
        """Whether a check under way may still turn up an instance."""
        return any(i.state is HealthState.UNKNOWN or i.asked_again for i in self.instances)

    def pick(
        self, request: RequestBody, failed: Collection[Instance] = (), tried: Collection[Instance] = ()
    ) -> Target | None:
        """Who serves ``request``; None while nobody can.

        ``failed``: instances it failed on before. ``tried``: those that took part, where it may still be ending, under
        the same name: others are better.
        """
        prefills, decodes, workers = (self.healthy(role) for role in (Role.PREFILL, Role.DECODE, Role.WORKER))
        fresh_prefills, fresh_decodes, fresh_workers = (
            [i for i in self.in_rotation(role) if i not in failed] for role in (Role.PREFILL, Role.DECODE, Role.WORKER)
        )
        fresh_prefills, fresh_decodes = (
            [i for i in group if i not in tried] or group for group in (fresh_prefills, fresh_decodes)
        )
        if fresh_prefills and fresh_decodes:
            pair = self._pair(fresh_prefills, fresh_decodes, request)
            target = pair.prefill if _spares_its_decode(pair) else pair
            worker = self._policies[Role.WORKER].choose(fresh_workers, request) if fresh_workers else None
            return worker if worker is not None and _queued(worker) < _queued(target) else target
        if fresh_workers:
            return self._policies[Role.WORKER].choose(fresh_workers, request)
        if prefills and decodes:
            return self._pair(fresh_prefills or prefills, fresh_decodes or decodes, request)
        return self._policies[Role.WORKER].choose(workers, request) if workers else None

    def _pair(self, prefills: Sequence[Instance], decodes: Sequence[Instance], request: RequestBody) -> Pair:
        prefill = self._policies[Role.PREFILL].choose(prefills, request)
        return Pair(prefill, self._policies[Role.DECODE].choose(decodes, request))

    def set_state(self, instance: Instance, state: HealthState, reason: str) -> None:
        """Record what was learned about an instance; wakes everyone in ``wait_change``."""
        if instance.state is not state:
            level = logging.INFO if state is HealthState.HEALTHY else logging.WARNING
            logger.log(level, "%s is %s: %s", instance, state, reason)
            self._changed.set()
            self._changed = asyncio.Event()
        # Also after UNKNOWN, which a request that found it dead leaves behind.
        if state is HealthState.UNHEALTHY and instance.state is not HealthState.UNHEALTHY:
            self._ask_others(instance)
        if state is HealthState.HEALTHY and instance.state is HealthState.UNHEALTHY:
            instance.rest.forget()
        instance.state = state
        instance.reason = reason

    def _ask_others(self, gone: Instance) -> None:
        """One of them may have taken over its role since it was asked last."""
        for other in self.instances:
            if other is not gone and other.state is HealthState.HEALTHY:
                other.asked_again = True
                other.check_now.set()

    def answered_again(self, instance: Instance) -> None:
        """A check has ended that began after it was to be asked again: wakes everyone in ``wait_change``."""
        instance.asked_again = False
        self.role_changed()

    def role_changed(self) -> None:
        """Some instance does other work now: wakes everyone in ``wait_change``."""
        self._changed.set()
        self._changed = asyncio.Event()

    def report_failure(self, instance: Instance, reason: str) -> None:
        """A request found the instance dead: send it nothing until a check, which starts at once, has passed."""
        instance.failures += 1
        if instance.state is HealthState.HEALTHY:
            self.set_state(instance, HealthState.UNKNOWN, reason)
        instance.check_now.set()

    async def wait_change(self) -> None:
        """Return when any instance's state has changed."""
        await self._changed.wait()
