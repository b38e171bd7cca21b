"""Clients' names of requests. Each caller has names of its own, which stand for its own requests.

Names of ended requests are kept a little longer, so that such a request can still be saved (``sessions.py``). An ended
request is forgotten when its wire id is given to another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ....runtime.web.keys import Caller
from .submission import Choice

MAX_ENDED = 256
MAX_ENDED_CHOICES = 4096
"""Choices of ended submissions that are kept together, unless the last submission alone has more.

A choice and its name take 400 bytes or more, so a limit of submissions alone would let batches fill hundreds of MiB.
"""


@dataclass(slots=True)
class _Ended:
    """A submission that is over: its names, with the wire ids of its choices.

    ``still_its_own``: those of the wire ids that have not been given to another request. ``choices``: how many choices
    it had.
    """

    owner: str
    names: dict[str, list[str]]
    still_its_own: set[str]
    choices: int


class RunningNames:
    """Maps callers' names of running requests to their choices; a name may stand for several."""

    def __init__(self) -> None:
        self._choices: dict[tuple[str, str], list[Choice]] = {}
        self._ended: deque[_Ended] = deque()
        self._ended_choices = 0
        self._ended_by_wire_rid: dict[str, _Ended] = {}

    def __contains__(self, name: tuple[str, str]) -> bool:
        """Return whether the caller named by the first item has a running request named by the second."""
        return name in self._choices

    def add(self, owner: str, named: Mapping[str, list[Choice]]) -> None:
        """Add names that ``owner`` (an API key's name) has for running choices.

        None of them may be in use by that owner. If a new choice has the wire id of an ended one, the ended one is
        forgotten.
        """
        self._choices.update(((owner, name), choices) for name, choices in named.items())
        for choices in named.values():
            for choice in choices:
                ended = self._ended_by_wire_rid.pop(choice.wire_rid, None)
                if ended is not None:
                    ended.still_its_own.discard(choice.wire_rid)

    def remove(self, owner: str, names: Iterable[str]) -> None:
        """Remove the names of a submission that no longer runs.

        ``find_ended`` finds those of the last ``MAX_ENDED`` submissions, or of fewer with ``MAX_ENDED_CHOICES``.
        """
        removed = {name: [choice.wire_rid for choice in self._choices.pop((owner, name))] for name in names}
        wire_rids = {wire_rid for wire_rids in removed.values() for wire_rid in wire_rids}
        ended = _Ended(owner, removed, wire_rids, len(wire_rids))
        self._ended.append(ended)
        self._ended_choices += ended.choices
        self._ended_by_wire_rid.update(dict.fromkeys(wire_rids, ended))
        while len(self._ended) > MAX_ENDED or (self._ended_choices > MAX_ENDED_CHOICES and len(self._ended) > 1):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the names of the submission that ended first."""
        forgotten = self._ended.popleft()
        self._ended_choices -= forgotten.choices
        for wire_rid in forgotten.still_its_own:
            del self._ended_by_wire_rid[wire_rid]

    def find(self, caller: Caller, name: str) -> list[Choice]:
        """Return the choices that ``caller`` calls ``name``.

        The admin means those of every caller, others their own.
        """
        if not caller.is_admin:
            return self._choices.get((caller.name, name), [])
        return [choice for (_, known), choices in self._choices.items() if known == name for choice in choices]

    def find_ended(self, caller: Caller, name: str) -> list[str]:
        """Return wire ids of the choices that ``caller`` called ``name``, in the last ended submission with that name.

        Ids that other requests have now are left out. The admin means the submissions of every caller.
        """
        for ended in reversed(self._ended):
            if name in ended.names and (caller.is_admin or ended.owner == caller.name):
                return [wire_rid for wire_rid in ended.names[name] if wire_rid in ended.still_its_own]
        return []

    def owned(self, caller: Caller) -> list[Choice]:
        """Return every choice in the running submissions of ``caller``, once even if it has several names."""
        mine = (choices for (owner, _), choices in self._choices.items() if owner == caller.name)
        return list({choice.wire_rid: choice for choices in mine for choice in choices}.values())
