"""The requests that the engine has not ended, by wire id and by the names that callers know them by.

If a client goes, its wire ids stay known, without an owner, until the engine has ended them too. So a new request of
the same name can't get their text.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from ....runtime.web.keys import ANYBODY, Caller
from .running_names import RunningNames
from .submission import Choice, Kind, Submission


class LiveRequest(NamedTuple):
    """An answer that is to come, and the submission that waits for it."""

    choice: Choice
    owner: Submission


class LiveRequests:
    """Table of live requests."""

    def __init__(self) -> None:
        self._by_wire_rid: dict[str, LiveRequest | None] = {}
        self._names = RunningNames()
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        """Return how many requests the engine has not ended; those without a client count."""
        return len(self._by_wire_rid)

    def __contains__(self, wire_rid: str) -> bool:
        """Return whether this request is live: sent, and not ended by the engine. Requests without a client count."""
        return wire_rid in self._by_wire_rid

    def get(self, wire_rid: str) -> LiveRequest | None:
        """Return the live request with this wire id; None if its client has gone or the id is unknown."""
        return self._by_wire_rid.get(wire_rid)

    def owners(self) -> set[Submission]:
        """Return every submission that waits for an answer."""
        return {live.owner for live in self._by_wire_rid.values() if live is not None}

    def count_legs(self) -> int:
        """Return how many live requests are legs: only the prefill runs here, and another instance answers the client.

        Abandoned requests are not counted.
        """
        return sum(live is not None and live.choice.kind is Kind.LEG for live in self._by_wire_rid.values())

    # --- names ---

    def is_named(self, name: str, caller: Caller = ANYBODY) -> bool:
        """Return whether a submission of ``caller`` that is not over has a request of this name."""
        return (caller.name, name) in self._names

    def named(self, name: str, caller: Caller) -> list[Choice]:
        """Return the choices that ``caller`` calls ``name``, also finished ones of a submission that is not over.

        The admin means those of every caller.
        """
        return self._names.find(caller, name)

    def owned(self, caller: Caller) -> list[Choice]:
        """Return every choice in the submissions of ``caller`` that are not over, finished choices included."""
        return self._names.owned(caller)

    def running(self, name: str, caller: Caller = ANYBODY) -> list[str]:
        """Return the wire ids of the running requests that ``caller`` calls ``name``."""
        return [choice.wire_rid for choice in self.still_running(self.named(name, caller))]

    def known(self, name: str, caller: Caller = ANYBODY) -> list[str]:
        """Return the wire ids of the running requests that ``caller`` calls ``name``.

        If none runs, return those of the last submission with that name that ended lately; [] if there is none.
        """
        return self.running(name, caller) or self._names.find_ended(caller, name)

    def still_running(self, choices: Iterable[Choice]) -> list[Choice]:
        """Return those of ``choices`` that the engine has not ended and for which a submission still waits."""
        return [choice for choice in choices if self.get(choice.wire_rid) is not None]

    def wire_rid(self, rid: str, taken: Container[str] = ()) -> str:
        """Return an id for the engine that is free: ``rid``, with a number appended if it is in use.

        Another caller's request may have it, one without a client, or one of the same submission (``taken``). A
        numbered name may be in use as well.
        """
        wire_rid = rid
        while wire_rid in self._by_wire_rid or wire_rid in taken:
            wire_rid = f"{rid}~{next(self._ids)}"
        return wire_rid

    # --- changes ---

    def add(self, submission: Submission, named: Mapping[str, list[Choice]]) -> None:
        """Add the requests of a submission that was sent.

        ``named``: its choices by each name that its owner has for them.
        """
        self.add_names(submission.owner, named)
        self._by_wire_rid.update((choice.wire_rid, LiveRequest(choice, submission)) for choice in submission.choices)

    def add_names(self, owner: str, named: Mapping[str, list[Choice]]) -> None:
        """Add names that ``owner`` (an API key's name) has for choices. None of them may be in use by that owner."""
        self._names.add(owner, named)

    def add_arrived(self, submission: Submission) -> None:
        """Add the only request of a submission that came from another instance. No caller has a name for it yet."""
        [choice] = submission.choices
        self._by_wire_rid[choice.wire_rid] = LiveRequest(choice, submission)

    def remove_names(self, submission: Submission) -> None:
        """Remove the names of a submission that is over. ``known`` still finds the last few of them."""
        self._names.remove(submission.owner, submission.names)

    def abandon(self, submission: Submission) -> list[str]:
        """Note that no client waits for ``submission`` any more. Return the wire ids of its requests that still run.

        Nothing is aborted here. These ids stay in use until the engine has ended them.
        """
        left = [choice.wire_rid for choice in submission.choices if choice.wire_rid in self._by_wire_rid]
        self._by_wire_rid.update(dict.fromkeys(left))
        return left

    def pop(self, wire_rid: str) -> LiveRequest | None:
        """Forget a request that the engine has ended, and return it; None if its client has gone or it is unknown."""
        return self._by_wire_rid.pop(wire_rid, None)
