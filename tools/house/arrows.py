"""Imports between the parts of a room, and how many of them run up.

A *sub-room* is a folder or file directly inside a room: ``scheduler.policies``, ``scheduler.planner``. An *arrow* is a
pair of sub-rooms of one room where a file of the first imports from the second, however often. A *mutual pair* is
two sub-rooms with arrows both ways.

Sub-rooms have no given order. The order chosen here leaves few arrows from a lower sub-room to a higher one. Those
that are left are *imports up*. A room without cycles has none.

Finding the least number is NP-hard. A greedy order (Eades, Lin and Smyth, 1993) is improved by moving one sub-room at
a time, until no move helps. The result is deterministic. It may be a little above the least number, never below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .source import Module, imports

Arrow = tuple[str, str]
"""Importing and imported sub-room."""


class RoomArrows(NamedTuple):
    """Arrows inside one room."""

    order: list[str]
    """Sub-rooms, the lowest first."""
    arrows: list[Arrow]
    up: list[Arrow]
    mutual: list[Arrow]
    """Each pair once, in alphabetical order."""


def room_arrows(room: str, modules: Iterable[Module]) -> RoomArrows:
    """Return the sub-rooms of the top-level folder ``room`` in order, and the imports between them.

    The order leaves few imports from a lower sub-room to a higher one.
    """
    inside = [module for module in modules if module.room == room and module.name != room]
    sub_rooms = {_sub_room(module.name) for module in inside}
    arrows = {(_sub_room(module.name), _sub_room(name)) for module in inside for name in imports(module)}
    arrows = {(source, to) for source, to in arrows if to in sub_rooms and source != to}
    order = _improved(_greedy(sorted(sub_rooms), arrows), arrows)
    up = [(source, to) for source, to in sorted(arrows) if order.index(source) < order.index(to)]
    mutual = [(source, to) for source, to in sorted(arrows) if source < to and (to, source) in arrows]
    return RoomArrows(order, sorted(arrows), up, mutual)


def _sub_room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _greedy(nodes: list[str], arrows: set[Arrow]) -> list[str]:
    """Return the nodes from bottom to top in a greedy order with few arrows that run up.

    Nodes that import nothing go to the bottom, and nodes that nothing imports to the top. If there are neither, the
    most imported one goes down.
    """
    left, bottom, top = list(nodes), list[str](), list[str]()
    while left:
        inside = [(source, to) for source, to in arrows if source in left and to in left]
        sources, targets = [source for source, _ in inside], [to for _, to in inside]
        if free := [node for node in left if node not in sources]:
            bottom += free
        elif free := [node for node in left if node not in targets]:
            top[:0] = free
        else:
            free = [max(left, key=lambda node: targets.count(node) - sources.count(node))]
            bottom += free
        left = [node for node in left if node not in free]
    return bottom + top


def _improved(order: list[str], arrows: set[Arrow]) -> list[str]:
    """Return ``order`` improved so that fewer arrows run up: move one node at a time to where it saves most.

    Ends when no move of a single node saves any.
    """
    better = True
    while better:
        better = False
        for node in sorted(order):
            at = order.index(node)
            rest = [other for other in order if other != node]
            costs = _costs_by_position(node, rest, arrows)
            best = min(range(len(costs)), key=lambda position: (costs[position], abs(position - at)))
            if costs[best] < costs[at]:
                order = [*rest[:best], node, *rest[best:]]
                better = True
    return order


def _costs_by_position(node: str, rest: list[str], arrows: set[Arrow]) -> list[int]:
    """Return how many arrows of ``node`` run up if it is put before each position of ``rest``, and at its end."""
    costs = [sum((node, other) in arrows for other in rest)]
    for other in rest:
        costs.append(costs[-1] - ((node, other) in arrows) + ((other, node) in arrows))
    return costs
