"""Headers of requests for the rest of an answer that began elsewhere, and of clients that can follow one."""

from __future__ import annotations

from starlette.types import Scope

from ....runtime.web.moved_answer import FOLLOW, TICKET, Ticket, header, read_ticket
from ..errors import bad_request


def ticket_of(scope: Scope) -> Ticket | None:
    """Return the ticket in a request's headers, by which it asks for the rest of a moved answer; None without one.

    Raises ``ApiError`` for a malformed one.
    """
    value = header(scope["headers"], TICKET)
    if value is None:
        return None
    try:
        return read_ticket(value)
    except ValueError as e:
        raise bad_request(None, f"the header {TICKET.decode()} holds no ticket: {e}") from None


def can_follow(scope: Scope) -> bool:
    """Return whether a header says that the client can read the rest of its answer at another instance when told to."""
    return header(scope["headers"], FOLLOW) is not None
