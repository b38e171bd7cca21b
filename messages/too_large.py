"""Errors for clients, in place of messages that are too large for a frame between the processes of an instance."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .base import Message
from .channel import FrameTooLarge, SendsMessages
from .outputs import ReqError, TextBatch, TokenBatch
from .question import Answer, RefusedAnswer
from .requests import ForkedReq, GenerateReq
from .sessions import ResumeReq
from .text import Decoded, Encoded

STATUS = 413
log = logging.getLogger(__name__)


def explain(error: FrameTooLarge) -> str:
    """Return a message for clients, with the size, the limit, and what to do."""
    return (
        f"{error.size} bytes between two processes of the instance are over the limit of {error.limit}; "
        "send fewer or shorter prompts at a time, or ask for fewer log-probabilities"
    )


def rids_of(message: Message) -> list[str]:
    """Return the rids of the requests that ``message`` carries or answers; [] if it is not about requests."""
    if isinstance(message, GenerateReq):
        return [message.rid]
    if isinstance(message, ForkedReq):
        return [message.request.rid, *message.forks]
    if isinstance(message, ResumeReq):
        return [message.state.running.request.rid]
    if isinstance(message, TokenBatch | TextBatch):
        return [item.rid for item in message.items]
    return []


def stand_ins(message: Message, error: FrameTooLarge) -> list[Message]:
    """Return the messages to send in place of ``message``: an error for each of its requests, or for its question.

    The list is empty for a message that no client waits for.
    """
    text = explain(error)
    if isinstance(message, Encoded):
        return [Encoded(error=text, id=message.id)]
    if isinstance(message, Decoded):
        return [Decoded(error=text, id=message.id)]
    if isinstance(message, Answer):
        return [RefusedAnswer(STATUS, text, id=message.id)]
    return [ReqError(rid, STATUS, text, "request_too_large") for rid in rids_of(message)]


def send_or_explain(sender: SendsMessages, messages: Sequence[Message]) -> list[str]:
    """Send ``messages`` towards the clients; an error replaces each message that is too large for a frame.

    Returns the rids of the requests that this ended. Clients ignore later messages about them.
    """
    try:
        sender.send(*messages)
    except FrameTooLarge as e:
        log.error("%s", e)
        too_large = set(map(id, e.messages))
        sender.send(
            *(m for message in messages for m in (stand_ins(message, e) if id(message) in too_large else [message]))
        )
        return [rid for message in e.messages for rid in rids_of(message)]
    return []
