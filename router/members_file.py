"""The file of ``--members-file``: a JSON list of instances. The fleet follows it while the router runs.

    an entry that is new in the file ──▶ WAITING ──it is a member that gets requests, or is cordoned──▶ in effect
    an entry that vanishes from the file ──▶ its instance is drained, if the file added it

A waiting entry adds its instance, or takes back the drain that the file itself ordered. That is retried at each look:
the instance may still drain by an admin's order, or the router may have too many members. An entry in effect is left
alone, so what an admin orders then stays until the entry vanishes.

Members that options or requests added are not touched. A file that can't be read or is invalid changes nothing, so a
file may be written in place, slowly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ..runtime.trusted_path import read_regular
from .daemon_thread import in_daemon_thread
from .errors import ConflictError
from .instance import Instance
from .members import MAX_MEMBERS, Members
from .membership import MemberState, Source
from .new_member import NewMember, Place
from .options import RouterOptionsError

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time between two looks at the file. Its content is compared: links and times say less, as in mounted volumes."""
SLOW_SECONDS = 10.0
"""Time after which a read that has not ended is reported. It goes on: the file may be on a mount that hangs."""
MAX_FILE_BYTES = 1 << 20


class MembersFileError(RouterOptionsError):
    """A file that can't be used; the message says what to write instead."""


class Listing(NamedTuple):
    """Content of the file, and the instances in it."""

    content: bytes
    places: list[Place]


def read_members(path: str) -> bytes:
    """Read the file. It says where prompts go, so only this user or root may be able to write to it.

    Raises ``MembersFileError``.
    """
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as e:
        raise MembersFileError(f"--members-file {path} can't be read: {e.strerror}") from None


def parse_members(path: str, content: bytes) -> list[Place]:
    """Return the instances in the file's content. Raises ``MembersFileError``."""
    where = f"--members-file {path}"
    try:
        members = msgspec.json.decode(content, type=list[NewMember])
        found = [member.place() for member in members[:MAX_MEMBERS]]
    except (ValueError, RecursionError) as e:  # also of what is no JSON or no UTF-8
        raise MembersFileError(f'{where}: write a list like [{{"url": "http://127.0.0.1:30000"}}]: {e}') from None
    if len(members) > MAX_MEMBERS:
        raise MembersFileError(f"{where} lists {len(members)} instances; a router takes at most {MAX_MEMBERS}")
    if len({place.url for place in found}) < len(found):
        raise MembersFileError(f"{where} lists an instance twice")
    return found


class MembersFile:
    """A file that the members of a router follow. Event-loop thread only, except for reading and parsing."""

    def __init__(self, path: str, members: Members) -> None:
        self._path = path
        self._members = members
        self._content: bytes | None = None
        """Content that was followed last."""
        self._listed: frozenset[str] = frozenset()
        """URLs in ``_content``."""
        self._waiting: dict[str, Place] = {}
        """Entries of ``_content`` that have not taken effect yet, by URL. They have been logged."""
        self._cordoned: set[Instance] = set()
        """Instances that were cordoned when the file drained them. They are cordoned again if they come back."""
        self._problem = ""
        """Problem of the file that was logged last; empty if it was in order since."""

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_SECONDS)

    async def look(self) -> None:
        """Read the file, drain what has vanished from it, and add what is new. A problem is logged once."""
        due: Iterable[Place] = self._waiting.values()
        try:
            listing = await self._read()
        except MembersFileError as e:
            self._report(str(e))
        else:
            self._problem = ""
            if listing is not None:
                due = self._follow(listing)
        self._bring_into_effect(due)

    async def _read(self) -> Listing | None:
        """Read and parse the file on a thread; return None if it has not changed. Raises ``MembersFileError``."""

        def read() -> Listing | None:
            content = read_members(self._path)
            return None if content == self._content else Listing(content, parse_members(self._path, content))

        slow = f"--members-file {self._path} can't be read: it takes more than {SLOW_SECONDS:g} s"
        timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._report, slow)
        try:
            return await in_daemon_thread(read, "members-file")
        finally:
            timer.cancel()

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            logger.error("%s; the instances stay as they are", problem)
        self._problem = problem

    def _follow(self, listing: Listing) -> list[Place]:
        """Drain the instances that have vanished from the file; return the entries that are to take effect."""
        urls = frozenset(place.url for place in listing.places)
        if self._listed and not urls:
            logger.warning("--members-file %s is an empty list now: all its instances are drained", self._path)
        vanished = self._listed - urls
        for instance in self._members.all():
            if instance.source is Source.FILE and instance.url in vanished:
                self._drain(instance)
        due = [place for place in listing.places if place.url in self._waiting or place.url not in self._listed]
        self._content, self._listed = listing.content, urls
        return due

    def _drain(self, instance: Instance) -> None:
        self._cordoned = {known for known in self._cordoned if known.withheld is MemberState.DRAINING}
        if instance.withheld is MemberState.CORDONED:
            self._cordoned.add(instance)
        self._members.drain(instance, Source.FILE)

    def _bring_into_effect(self, due: Iterable[Place]) -> None:
        """Add the instances, or take their drains back. What fails waits for the next look, and is logged once."""
        members = {instance.url: instance for instance in self._members.all()}
        reasons: dict[Place, str] = {}
        for place in due:
            known = members.get(place.url)
            if reason := self._add(place) if known is None else self._take_back(known):
                reasons[place] = reason
        new = [place for place in reasons if place.url not in self._waiting]
        if new:
            first = f"{new[0].url}: {reasons[new[0]]}"
            logger.warning("--members-file %s: %d instances wait to be added; %s", self._path, len(new), first)
        self._waiting = {place.url: place for place in reasons}

    def _add(self, place: Place) -> str:
        """Add an instance. Return why it can't be added now; "" if it was added."""
        try:
            self._members.add(*place, Source.FILE)
        except ConflictError as e:
            return e.message
        return ""

    def _take_back(self, instance: Instance) -> str:
        """Take back the drain of a member if the file ordered it. Return why another drain stays; "" if none does."""
        match self._members.drained_by(instance):
            case None:
                return ""
            case Source.FILE if instance in self._cordoned:
                self._members.cordon(instance)
            case Source.FILE:
                self._members.readmit(instance)
            case _:
                return "it still drains by an admin's order"
        return ""
