"""All that two instances' schedulers say to each other."""

from __future__ import annotations

from .handover import HandoverMessage, LinkMessage
from .moves import MoveMessage

PeerMessage = LinkMessage | HandoverMessage | MoveMessage
