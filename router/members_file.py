"""The file of ``--members-file``: a JSON list of instances. The fleet follows it while the router runs.

Instances that it lists are added, and those that vanish from it are drained. Members that options or requests added are
not touched. A file that can't be read or is invalid changes nothing, so a file may be written in place, slowly.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from ..runtime.trusted_path import read_secret
from .errors import ConflictError
from .members import Members
from .membership import MemberState, Source
from .new_member import NewMember, Place
from .options import RouterOptionsError

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time between two looks at the file. Its content is compared: links and times say less, as in mounted volumes."""
MAX_FILE_BYTES = 1 << 20


class MembersFileError(RouterOptionsError):
    """A file that can't be used; the message says what to write instead."""


def read_members(path: str) -> bytes:
    """Read the file. It says where prompts go, so it must belong to this user or root.

    Raises ``MembersFileError``.
    """
    try:
        content = read_secret(path)
    except OSError as e:
        raise MembersFileError(f"--members-file {path} can't be read: {e.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise MembersFileError(f"--members-file {path} has {len(content)} bytes; at most {MAX_FILE_BYTES} are read")
    return content


def parse_members(path: str, content: bytes) -> list[Place]:
    """Return the instances in the file's content. Raises ``MembersFileError``."""
    where = f"--members-file {path}"
    try:
        found = [member.place() for member in msgspec.json.decode(content, type=list[NewMember])]
    except (ValueError, RecursionError) as e:  # also of what is no JSON or no UTF-8
        raise MembersFileError(f'{where}: write a list like [{{"url": "http://127.0.0.1:30000"}}]: {e}') from None
    if len({place.url for place in found}) < len(found):
        raise MembersFileError(f"{where} lists an instance twice")
    return found


class MembersFile:
    """A file that the members of a router follow."""

    def __init__(self, path: str, members: Members) -> None:
        self._path = path
        self._members = members
        self._content: bytes | None = None
        """Content that the members have followed last."""
        self._problem = ""
        """Problem of the file that was logged last; empty if it was in order since."""

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_SECONDS)

    async def look(self) -> None:
        """Read the file, and add and drain instances if it has changed. A problem is logged once."""
        try:
            content = await asyncio.to_thread(read_members, self._path)
            if content != self._content:
                self._follow(parse_members(self._path, content))
                self._content = content
        except MembersFileError as e:
            if str(e) != self._problem:
                logger.error("%s; the instances stay as they are", e)
            self._problem = str(e)
        else:
            self._problem = ""

    def _follow(self, listed: list[Place]) -> None:
        members = {instance.url: instance for instance in self._members.all()}
        urls = {place.url for place in listed}
        for instance in members.values():
            if instance.source is Source.FILE and instance.url not in urls:
                self._members.drain(instance)
        for place in listed:
            known = members.get(place.url)
            if known is None:
                self._add(place)
            elif known.source is Source.FILE and known.withheld is MemberState.DRAINING:
                self._members.readmit(known)

    def _add(self, place: Place) -> None:
        try:
            self._members.add(*place, Source.FILE)
        except ConflictError as e:
            logger.error("--members-file %s: %s: %s", self._path, place.url, e.message)
