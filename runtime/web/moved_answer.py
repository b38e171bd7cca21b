"""Protocol for the rest of an answer that goes on at another instance.

A client announces by the header ``FOLLOW`` that it can follow. Then its answer ends with a ``Ticket``: as an event
(``StreamFormat.moved``), or, if nothing was sent yet, as the whole answer, of type ``MOVED_TYPE``. The client sends the
same request with the ticket (``TICKET``) to the instance that it names, and gets the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec

MOVED_PATH = "/moved"
FOLLOW = b"x-pdserve-follow"
TICKET = b"x-pdserve-ticket"
MOVED_TYPE = b"application/x-pdserve-moved+json"
MAX_TICKET_BYTES = 8192
MAX_RID_CHARS = 512
"""Maximum characters of a client's own name, with the parts that batches and migrations add to it."""
WORD = re.compile(r"[!-~]{0,128}")
HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
"""A name or an address, IPv6 with its scope."""


class Ticket(msgspec.Struct, frozen=True):
    """Reference to the rest of an answer at another instance."""

    epoch: str
    """Epoch of the instance."""
    host: str
    port: int
    key: str
    """Secret that identifies the answer at the instance."""
    chars: int
    """Characters that the client has been sent."""
    tokens: int
    """Tokens that the client has been sent."""
    opened: bool
    """Whether the client has been sent anything at all, even if it is no text."""
    rid: str
    """Id that the answer carries."""
    created: int
    """Unix time that the answer carries; 0 if it has none."""
    events: int = 0
    """Events that the client has been sent; 0 if the API does not number them."""

    @property
    def url(self) -> str:
        """Return the URL, ``http://host:port``, of the instance that has the rest of the answer."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def dump(self) -> bytes:
        """Return the ticket as one line of ASCII, fit for a header and for an event."""
        return json.dumps(msgspec.structs.asdict(self)).encode()


_TICKET = msgspec.json.Decoder(Ticket)


def read_ticket(data: bytes) -> Ticket:
    """Decode a ticket, which names the instance with the rest of a moved answer, and check its fields.

    Raises ``ValueError`` if ``data`` is not a valid ticket.
    """
    if len(data) > MAX_TICKET_BYTES:
        raise ValueError(f"a ticket has at most {MAX_TICKET_BYTES} bytes")
    ticket = _TICKET.decode(data)
    if min(ticket.chars, ticket.tokens, ticket.created, ticket.events) < 0 or not 0 < ticket.port < 65536:
        raise ValueError("a ticket's numbers are out of range")
    if len(ticket.rid) > MAX_RID_CHARS or not ticket.rid.isprintable():
        raise ValueError("a ticket's rid is no name of a request")
    if not (WORD.fullmatch(ticket.epoch) and WORD.fullmatch(ticket.key) and HOST.fullmatch(ticket.host)):
        raise ValueError("a ticket's epoch, host and key are words of ASCII")
    return ticket


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the value of the first header with this ``name``, None if there is none."""
    return next((value for known, value in headers if known == name), None)
