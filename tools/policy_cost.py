"""``python -P -m tools.policy_cost``: time that a router's event loop takes to choose instances for a request.

It reads a body of each size, and chooses and reports an attempt by each policy, with all facts computed anew. The
bodies are turns of conversations, and some instances are busy. Medians are of one process; compare versions side by
side on an idle machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import orjson

from pdserve.router.attempts import Attempt
from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.instance import HealthState
from pdserve.router.options import RouterOptions
from pdserve.router.policies.registry import POLICIES
from pdserve.router.request_body import RequestBody
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.paths import Server

SIZES = (1_000, 220_000, 4_000_000)
"""Bytes of a body."""
COUNTS = (8, 64)
"""Instances of a fleet."""
TURNS = 50
"""Different conversations, one after the other."""
ROUNDS = 20
CHAT = path_table(Server.ROUTER).find("/v1/chat/completions")


def make_bodies(size: int) -> list[bytes]:
    """Return bodies of about ``size`` bytes, each of a different conversation."""
    assert CHAT is not None
    word = "alpha beta gamma "
    bodies = []
    for turn in range(TURNS if size < SIZES[-1] else 2):
        content = (f"{turn} " + word * (size // len(word)))[: size - 150]
        messages = [{"role": "user", "content": content}]
        bodies.append(orjson.dumps({"model": "m", "messages": messages, "user": f"u{turn}", "stream": True}))
    return bodies


def make_fleet(policy: str, count: int, *, pairs: bool) -> Fleet:
    """Return a fleet of ``count`` healthy instances: workers, or as many prefills as decodes."""
    counts = (count // 2, count // 2, 0) if pairs else (0, 0, count)
    prefill, decode, worker = ([f"http://{kind}{i}" for i in range(n)] for kind, n in zip("pdw", counts, strict=True))
    fleet = Fleet(RouterOptions(policy=policy, prefill=prefill, decode=decode, worker=worker))
    for number, instance in enumerate(fleet.instances):
        fleet.set_state(instance, HealthState.HEALTHY, "of the measurement")
        instance.answers = number % 3
    return fleet


def median_us(work: Callable[[bytes], object], bodies: list[bytes]) -> float:
    """Return the median time of ``work``, in microseconds."""
    times = []
    for _ in range(ROUNDS):
        for body in bodies:
            began = time.perf_counter()
            work(body)
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def parse(body: bytes) -> RequestBody:
    """Read a body as the router does."""
    assert CHAT is not None
    return RequestBody.parse(body, facts=CHAT)


def attempts(fleet: Fleet, bodies: list[bytes]) -> Callable[[bytes], None]:
    """Return a function that chooses instances for one of ``bodies`` and reports an attempt. They are read before."""
    parsed = {body: parse(body) for body in bodies}

    def attempt(body: bytes) -> None:
        facts = Facts(parsed[body])
        target = fleet.pick(facts)
        assert target is not None
        with Attempt(fleet.policy, target, facts) as under_way:
            under_way.began()

    return attempt


def main() -> None:
    """Print a table of medians, in microseconds."""
    print("| bytes | reading |", *(f"{policy} |" for policy in POLICIES))
    print("|---" * (len(POLICIES) + 2) + "|")
    for size in SIZES:
        bodies = make_bodies(size)
        reading = median_us(parse, bodies)
        for pairs in (False, True):
            for count in COUNTS:
                of_policy = (
                    median_us(attempts(make_fleet(policy, count, pairs=pairs), bodies), bodies) for policy in POLICIES
                )
                kind = "in pairs" if pairs else "workers"
                print(f"| {size:,}, {count} {kind} | {reading:.1f} |", *(f"{us:.1f} |" for us in of_policy))


if __name__ == "__main__":
    main()
