"""What tells two states of a world apart: everything that decides what can come of them, and no clock or count."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict, deque
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import xxhash

from support.world.node import Node
from support.world.world import World

HASHER = type(xxhash.xxh3_64())
PLAIN = (int, str, bytes, bool, float, type(None))
SKIPPED = frozenset(
    [
        "options",
        "msg",
        "times",
        "timing",
        "phases",
        "counters",
        "cost_model",
        "budget",
        "since",
        "deadline",
        "queued_at",
        "allocated_at",
        "requested_at",
        "draining_since",
        "heard_at",
        "last_step_at",
        "reported_at",
        "wanted_at",
        "sent_at",
        "done",
        "withdrawn",
        "failed",
        "bytes_received",
        "bytes_sent",
        "push_seconds",
        "cached_tokens",
        "asked_tokens",
        "hit_tokens",
        "retractions",
        "send_interval",
        "pending_output",
        "pending_logprobs",
        "input_logprobs",
        "announced",
        "step_estimate",
        "last_access",
        "created",
        "hit_count",
        "heap_seq",
        "stuck",
        "retracted",
        "_now",
        "_beat_at",
        "_last_result_at",
        "_seconds",
        "_busy_since",
        "_limits",
        "_scheduler",
        "_heap",
        "_named_at",
        "_stuck",
        "_owner",
        "_port",
        "_find",
        "_to_worker",
        "_local",
        "_numbers",
        "_attempts",
        "_peer_at",
        "_world",
        "_on_ready",
        "pool",
        "group",
        "_refusals",
        "hello",
        "invitation",
        "token_ids",
        "stop_ids",
        "_policy",
        "_estimator",
        "_held_until",
        "first_token_estimate",
        "losses",
        "reused",
        "policy",
        "shares",
        "_lanes",
        "_sizes",
        "_turns",
        "_computing_turns",
        "_by_req",
        "_room_ms",
        "_queued",
        "_retracted",
    ]
)
"""Attributes with times, amounts or receivers."""
OF_MEMORY = ("allocator", "table", "cache", "holds", "end", "windows", "newest_step", "let_go_step")
OF_SCHEDULER = ("reqs", "draining", "completed_step", "_in_flight", "memory")
OF_PLANNER = ("waiting", "running", "arriving", "_rows", "_step_id")
OF_ENGINE = ("_links", "_parting", "_down")
OF_PUSHES = ("_outgoing", "_turns", "_windows", "_broken", "_writing")
OF_RECEIVED = ("_checks", "_granted")
OF_BACKEND = ("alive", "granted", "_peers", "_fenced", "_events")


class _Walk:
    """Writes down what it meets, each object once."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.out: list[Any] = []

    def take(self, value: Any) -> None:
        """Take in ``value`` and everything that it refers to."""
        kind = type(value)
        if kind in PLAIN:
            self.out.append(value)
        elif kind is np.ndarray:
            self.out.append(value.tobytes())
        elif kind in (list, tuple, deque):
            self.out.append(len(value))
            for item in value:
                self.take(item)
        elif kind is OrderedDict:
            self.take(list(value.items()))
        elif kind is dict:
            self.out.append(len(value))
            for key in sorted(value, key=repr):
                self.take(key)
                self.take(value[key])
        elif kind in (set, frozenset):
            # A set of plain values, or of objects with an order that means nothing.
            self.out.append(tuple(sorted(map(str, value))) if all(type(v) in PLAIN for v in value) else len(value))
        elif isinstance(value, Enum):
            self.out.append(value.name)
        elif isinstance(value, np.generic):
            self.out.append(value.item())
        elif kind is HASHER:
            self.out.append(value.hexdigest())
        elif isinstance(value, tuple):
            self.take(tuple(value))
        elif not callable(value) and not isinstance(value, logging.Logger):
            self._object(value)

    def _object(self, value: Any) -> None:
        number = self.seen.get(id(value))
        if number is not None:
            self.out.append(("again", number))
            return
        self.seen[id(value)] = len(self.seen)
        self.out.append(type(value).__name__)
        for name in (*_slots(type(value)), *getattr(value, "__dict__", ())):
            if name not in SKIPPED:
                self.take(getattr(value, name, None))


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        names = list(kind.__struct_fields__)
    else:
        declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
        names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in SKIPPED)


def signature(world: World, nodes: list[Node], more: object = None) -> int:
    """Equal for equal states; for others all but never."""
    walk = _Walk()
    for node in nodes:
        walk.take((node.epoch, node.alive, sorted(node.open)))
        if not node.alive:
            continue
        for owner, names in (
            (node.scheduler, OF_SCHEDULER),
            (node.scheduler.planner, OF_PLANNER),
            (node.engine, OF_ENGINE),
            (node.engine._pushes, OF_PUSHES),
            (node.engine._received, OF_RECEIVED),
            (node.backend, OF_BACKEND),
        ):
            for name in names:
                walk.take(getattr(owner, name))
        manager = node.manager
        walk.take(manager.senders)
        walk.take(manager.receivers)
        walk.take(manager._peers)
        for queue in (node.scheduler.planner.waiting, node.scheduler.planner.running, manager.receivers.rooms):
            walk.out.append(tuple(queue))  # the order of requests
        walk.out.append(tuple(req.rid for req in node.scheduler.planner.waiting.order()))
        walk.take(node.sim_worker.pools())
        walk.take(node.sim_worker.windowed and node.sim_worker.windowed.page_of)
        walk.take(node.network.registration is not None)
    for channel in sorted(world.channels, key=repr):
        walk.out.append((channel, tuple((h.what, h.content) for h in world.channels[channel])))
    walk.out.append(more)
    return hash(tuple(walk.out))
