"""All instances of a router, and those that the next request can be sent to. A policy chooses among them.

Instances join and leave while the router runs (``membership.py``). Those that are cordoned or draining keep their
requests and get no new ones. An instance is available if it is healthy and neither.

A request needs a pair of an available prefill and an available decode, or an available worker. A pair needs both of its
legs, so an unhealthy prefill also keeps work from the decodes, and vice versa. Instances with an open circuit breaker
come last, and so do those that the request has already failed on.

The decode of a pair decides whether the prefill or itself computes the prompt, because the router does not know their
caches. To decide, it asks the prefill (``disaggregation/handover/placement_policy.py``).

In two cases the prefill gets the whole request (``load.relieved``), by the paces that both report in ``/health``:

- the prefill would answer much faster;
- the prefill would answer faster, and the decode hardly keeps its ITL budget.

Instances report a pace only with ``--disaggregation-threshold auto``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from itertools import takewhile

from ..messages.metrics import Histogram
from .facts import Facts
from .instance import HealthState, Instance, Role
from .membership import MemberState
from .options import RouterOptions, check_url, parse_prefill
from .policies.factory import make_policy
from .request_body import RequestBody
from .targets import Offer, Target

logger = logging.getLogger(__name__)

PICK_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Fleet:
    """The instances, their states, and the policy that chooses among them."""

    def __init__(self, options: RouterOptions) -> None:
        prefills = [Instance(url, Role.PREFILL, port) for url, port in parse_prefill(options.prefill)]
        decodes = [Instance(check_url(url), Role.DECODE) for url in options.decode]
        workers = [Instance(check_url(url), Role.UNIFIED) for url in options.worker]
        self.instances: tuple[Instance, ...] = (*prefills, *decodes, *workers)
        """The members, in the order in which they were added. Replaced, not changed, when one comes or goes."""
        self.policy = make_policy(options)
        self._joined: dict[Instance, str] = {}
        """Epoch of each instance that the policy knows."""
        self._changed = asyncio.Event()
        self.pick_seconds = Histogram(PICK_SECONDS)
        """Seconds that requests waited for the choice of an instance."""
        self.retries: Counter[int] = Counter()
        """Attempts after a failed one, by the status that the failure would have been answered with."""

    def healthy(self, role: Role | None = None) -> list[Instance]:
        """Return the healthy instances of one role, or of all, whether they are cordoned or not."""
        return [i for i in self.instances if i.state is HealthState.HEALTHY and role in (None, i.role)]

    def answer_order(self) -> list[Instance]:
        """Return the healthy instances in the order in which they are asked what any of them can answer.

        Workers come first, then decodes, then prefills. Cordoned and draining ones come after all others: they have
        sessions and running requests that no other one has.
        """
        order = (Role.UNIFIED, Role.DECODE, Role.PREFILL)
        return sorted(self.healthy(), key=lambda i: (i.withheld is not None, order.index(i.role)))

    def available(self, role: Role) -> list[Instance]:
        """Return the instances of a role that can be sent new requests."""
        return [i for i in self.healthy(role) if i.withheld is None]

    def in_rotation(self, role: Role) -> list[Instance]:
        """Return the available instances of a role, without those with an open circuit breaker.

        At most half of them, rounded down, are left out at a time, in the order in which their breakers opened. So one
        client's errors never put the whole load on one instance, and the only instance of a role is never left out.
        """
        return _without_open_breakers(self.available(role))

    def can_serve(self) -> bool:
        """Return whether a worker, or a prefill and a decode, are available, so that a request can be served now."""
        return bool(self.available(Role.UNIFIED) or (self.available(Role.PREFILL) and self.available(Role.DECODE)))

    def shortage(self, needed: str) -> str:
        """Return why nothing can serve a request, for a message. ``needed``: what would have to be healthy for it."""
        if not self.instances:
            return "this router has no instances; they join by POST /workers or --members-file"
        withheld = sum(i.withheld is not None for i in self.instances)
        return f"{needed} ({withheld} cordoned or draining)" if withheld else needed

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

    def same_as(self, instance: Instance) -> Instance | None:
        """Return an older healthy member with another URL that reports the epoch of ``instance``; None if none does.

        The two are one process. A stale report, of a member that is down, does not count.
        """
        epoch = instance.report.epoch
        older = takewhile(lambda other: other is not instance, self.instances) if epoch else ()
        same = (i for i in older if i.report.epoch == epoch and i.url != instance.url)
        return next((i for i in same if i.state is HealthState.HEALTHY), None)

    def undecided(self) -> bool:
        """Return whether a health check that has not ended may still find an instance that can serve.

        It may if an instance that gets new requests is in state ``UNKNOWN``, or if its ``asked_again`` is set.
        """
        return any(i.withheld is None and (i.state is HealthState.UNKNOWN or i.asked_again) for i in self.instances)

    def pick(self, facts: Facts, failed: Collection[Instance] = (), tried: Collection[Instance] = ()) -> Target | None:
        """Choose the pair or the single instance that serves a request; return None while none can.

        ``facts``: those of the request. ``failed`` are instances on which it has failed before. ``tried`` are instances
        that took part in earlier attempts. They come after others, because the earlier attempt may still be ending
        there, with the same rid.
        """
        offer = self._offer(facts.is_prompt_alone, failed, tried)
        return self.policy.choose(offer, facts) if any(offer) else None

    def _offer(self, is_prompt_alone: bool, failed: Collection[Instance], tried: Collection[Instance]) -> Offer:
        """Return the instances that can serve a request, the preferred ones alone if they suffice.

        The offer is empty if none can. The arguments are those of ``pick``.
        """
        usable: dict[Role, list[Instance]] = {role: [] for role in Role}
        for instance in self.instances:
            if instance.state is HealthState.HEALTHY and instance.withheld is None:
                usable[instance.role].append(instance)
        prefills, decodes, workers = (
            _preferred(usable[role], failed, tried) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)
        )
        if is_prompt_alone:
            if prefills or workers:
                return Offer(prefills, workers=workers)
            return Offer(usable[Role.PREFILL], workers=usable[Role.UNIFIED])
        if prefills and decodes:
            return Offer(prefills, decodes, workers)
        if workers:
            return Offer(workers=workers)
        prefills, decodes = prefills or usable[Role.PREFILL], decodes or usable[Role.DECODE]
        return Offer(prefills, decodes) if prefills and decodes else Offer(workers=usable[Role.UNIFIED])

    def add(self, instance: Instance) -> None:
        """Make ``instance`` a member. It gets requests when ``set_state`` has found it healthy."""
        self.instances = (*self.instances, instance)
        self.wake()

    def withhold(self, instance: Instance, why: MemberState | None) -> None:
        """Send ``instance`` no new requests, because it is CORDONED or DRAINING; None: send it requests again.

        The policy keeps what it knows of the instance.
        """
        instance.withheld = why
        self.wake()

    def remove(self, instance: Instance) -> None:
        """Remove a member, which is GONE then. The requests that it has fail with ``InstanceRemovedError``."""
        self.instances = tuple(i for i in self.instances if i is not instance)
        self.withhold(instance, MemberState.GONE)
        if self._joined.pop(instance, None) is not None:
            self.policy.left(instance)
        for leg in list(instance.legs):
            leg.instance_removed()

    def set_state(self, instance: Instance, state: HealthState, reason: str) -> None:
        """Record the state of an instance and the reason for it. A change wakes all tasks in ``wait_change``.

        That of an instance that was removed is not recorded. When an instance becomes unhealthy, all healthy ones are
        checked now. When it has recovered, its circuit breaker is closed.
        """
        if instance.withheld is MemberState.GONE:
            return
        if instance.state is not state:
            level = logging.INFO if state is HealthState.HEALTHY else logging.WARNING
            logger.log(level, "%s is %s: %s", instance, state, reason)
            self.wake()
        # Also after UNKNOWN, the state after a request found the instance dead.
        if state is HealthState.UNHEALTHY and instance.state is not HealthState.UNHEALTHY:
            self._ask_others(instance)
        if state is HealthState.HEALTHY and instance.state is HealthState.UNHEALTHY:
            instance.forget_failures()
        instance.state = state
        instance.reason = reason
        instance.was_healthy |= state is HealthState.HEALTHY
        self._update_policy(instance)

    def _update_policy(self, instance: Instance) -> None:
        """Report an instance to the policy that has come, gone, or been started anew.

        A single failure is no reason to forget it, so the state UNKNOWN changes nothing.
        """
        epoch = instance.report.epoch
        if instance.state is HealthState.UNKNOWN or (
            instance.state is HealthState.HEALTHY and self._joined.get(instance) == epoch
        ):
            return
        if self._joined.pop(instance, None) is not None:
            self.policy.left(instance)
        if instance.state is HealthState.HEALTHY:
            self._joined[instance] = epoch
            self.policy.joined(instance)

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
        self.wake()

    def wake(self) -> None:
        """Wake all tasks in ``wait_change``."""
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
        """Wait until an instance comes, goes or changes its state or role, or until a requested check has ended."""
        await self._changed.wait()


def _preferred(healthy: list[Instance], failed: Collection[Instance], tried: Collection[Instance]) -> list[Instance]:
    """Return the instances of a role that a request should be sent to; empty if it has failed on all in rotation.

    The arguments are those of ``Fleet.pick``.
    """
    fresh = _without_open_breakers(healthy)
    if failed:
        fresh = [i for i in fresh if i not in failed]
    if tried:
        fresh = [i for i in fresh if i not in tried] or fresh
    return fresh


def _without_open_breakers(healthy: list[Instance]) -> list[Instance]:
    """Return ``healthy`` without those with an open circuit breaker, of which at least half are kept."""
    opened = [i for i in healthy if i.breaker]
    if not opened:
        return healthy
    opened.sort(key=lambda i: i.breaker.opened_at)
    left_out = opened[: len(healthy) // 2]
    return [i for i in healthy if i not in left_out]
