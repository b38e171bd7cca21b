"""What clients call the requests that run. Each caller has names of its own, and means its own requests by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...runtime.web.keys import Caller
from .submission import Choice


class RunningNames:
    """From callers' names for running requests to their choices; a name may stand for several."""

    def __init__(self) -> None:
        self._choices: dict[tuple[str, str], list[Choice]] = {}

    def __contains__(self, name: tuple[str, str]) -> bool:
        """Whether a caller, by its name, has a running request that goes by the second one."""
        return name in self._choices

    def add(self, owner: str, named: Mapping[str, list[Choice]]) -> None:
        """These run now; none of the names may be taken."""
        self._choices.update(((owner, name), choices) for name, choices in named.items())

    def remove(self, owner: str, names: Iterable[str]) -> None:
        """Nothing goes by these names any more."""
        for name in names:
            del self._choices[owner, name]

    def find(self, caller: Caller, name: str) -> list[Choice]:
        """The choices that ``caller`` means: an admin anybody's, others their own."""
        if not caller.is_admin:
            return self._choices.get((caller.name, name), [])
        return [choice for (_, known), choices in self._choices.items() if known == name for choice in choices]

    def owned(self, caller: Caller) -> list[Choice]:
        """Every choice that is ``caller``'s own, once."""
        mine = (choices for (owner, _), choices in self._choices.items() if owner == caller.name)
        return list({choice.wire_rid: choice for choices in mine for choice in choices}.values())
