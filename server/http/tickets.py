"""Whether a request asks for the rest of an answer that was begun elsewhere, or may be told to."""

from __future__ import annotations

from starlette.types import Scope

from ...runtime.web.moved_answer import FOLLOW, TICKET, Ticket, header, read_ticket
from .errors import bad_request


def ticket_of(scope: Scope) -> Ticket | None:
    """Of a request that asks for the rest of an answer. Raises ``ApiError`` for one that is none."""
    said = header(scope["headers"], TICKET)
    if said is None:
        return None
    try:
        return read_ticket(said)
    except ValueError as e:
        raise bad_request(None, f"the header {TICKET.decode()} holds no ticket: {e}") from None


def can_follow(scope: Scope) -> bool:
    """Whether the client reads the rest elsewhere where it is told to."""
    return header(scope["headers"], FOLLOW) is not None
