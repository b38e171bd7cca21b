"""How an HTTP front says that the rest of an answer is had elsewhere, and how that is asked for.

A request whose client can follow (``FOLLOW``) is answered up to here, and then with a ``Ticket``: as the event
``moved``, or, where nothing was sent yet, as the whole answer, of type ``MOVED_TYPE``. Who follows sends the same
request, with the ticket (``TICKET``), to the instance that it names, and gets the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec

FOLLOW = b"x-pdserve-follow"
TICKET = b"x-pdserve-ticket"
MOVED_TYPE = b"application/x-pdserve-moved+json"
MOVED_EVENT = b"event: moved\ndata: "
MAX_TICKET_BYTES = 8192
MAX_RID_CHARS = 512
"""A client's own name, and what batches and moves add to it."""
WORD = re.compile(r"[!-~]{0,128}")
HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
"""A name or an address, IPv6 with its scope."""


class Ticket(msgspec.Struct, frozen=True):
    """``epoch``, ``host`` and ``port``: of the instance that goes on with an answer; ``key``: what it knows the answer
    by.

    ``chars`` and ``tokens``: what its client has been sent; ``opened``: whether that is anything, if it is not text.
    ``rid`` and ``created``: what the answer says of itself (Unix time, 0 where it doesn't).
    """

    epoch: str
    host: str
    port: int
    key: str
    chars: int
    tokens: int
    opened: bool
    rid: str
    created: int

    @property
    def url(self) -> str:
        """Of the instance."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def dump(self) -> bytes:
        """One line of ASCII: fit for a header, and for an event."""
        return json.dumps(msgspec.structs.asdict(self)).encode()


_TICKET = msgspec.json.Decoder(Ticket)


def read_ticket(data: bytes) -> Ticket:
    """Raises ``ValueError`` for what is none."""
    if len(data) > MAX_TICKET_BYTES:
        raise ValueError(f"a ticket has at most {MAX_TICKET_BYTES} bytes")
    ticket = _TICKET.decode(data)
    if min(ticket.chars, ticket.tokens, ticket.created) < 0 or not 0 < ticket.port < 65536:
        raise ValueError("a ticket's numbers are out of range")
    if len(ticket.rid) > MAX_RID_CHARS or not ticket.rid.isprintable():
        raise ValueError("a ticket's rid is no name of a request")
    if not (WORD.fullmatch(ticket.epoch) and WORD.fullmatch(ticket.key) and HOST.fullmatch(ticket.host)):
        raise ValueError("a ticket's epoch, host and key are words of ASCII")
    return ticket


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first of this name."""
    return next((value for known, value in headers if known == name), None)
