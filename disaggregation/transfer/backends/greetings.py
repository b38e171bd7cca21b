"""The exchange of greetings on a new connection, from both ends: a writer's greeting, and the pool owner's answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ...errors import LinkLost
from ...wire.stream import Stream
from . import handshake
from .handshake import Greeting, GreetingAnswer
from .link import IncomingLink, LinkPhase, OutgoingLink


def greet(link: OutgoingLink, epoch: str, then: Callable[[], None]) -> None:
    """Send the writer's greeting on a new link, and call ``then`` later, when the owner has accepted the link.

    ``epoch``: the writer's own. The read of the answer raises ``LinkLost`` if the owner refuses the link.
    """

    def on_answer(body: bytearray) -> None:
        answer = handshake.decode_answer(body)
        if answer.error:
            raise LinkLost(f"peer {link.peer} refused the link: {answer.error}")
        link.opened()
        link.welcomed(answer.means)
        link.phase = LinkPhase.OPENING
        then()

    link.phase = LinkPhase.GREETING
    greeting = Greeting(handshake.WIRE_VERSION, epoch, link.offer.epoch, link.offer.secret)
    link.stream.send([handshake.frame(greeting)])
    _read_body(link.stream, on_answer, handshake.MAX_BODY + handshake.MAX_MEANS)


def read_greeting(
    link: IncomingLink,
    epoch: str,
    secret: bytes,
    why_not: Callable[[str], str],
    then: Callable[[bytes], None],
) -> None:
    """Have the greeting of a writer read and answered on a new link; ``then`` is called later with what the answer
    needs.

    That is the description of how to write, which the caller sends. ``epoch`` and ``secret``: those of the owner.
    ``why_not`` returns why a writer may not write now, or "". The read raises ``LinkLost`` if the greeting is refused.
    """

    def on_greeting(body: bytearray) -> None:
        greeting = handshake.decode_greeting(body)
        error = handshake.judge(greeting, epoch, secret) or why_not(greeting.writer)
        if error:
            # This few bytes always fit into the buffer of a new connection. A connection that is gone needs no answer.
            with contextlib.suppress(OSError):
                link.stream.sock.send(handshake.frame(GreetingAnswer(error)))
            raise LinkLost(f"refused {greeting.writer or 'a writer'}: {error}")
        link.peer = greeting.writer
        means = link.welcome()
        link.phase = LinkPhase.OPEN
        then(means)

    _read_body(link.stream, on_greeting, handshake.MAX_BODY)


def _read_body(stream: Stream, then: Callable[[bytearray], None], limit: int) -> None:
    prefix = bytearray(handshake.LENGTH.size)

    def on_prefix() -> None:
        body = bytearray(handshake.body_length(prefix, limit))
        stream.read([memoryview(body)], lambda: then(body))

    stream.read([memoryview(prefix)], on_prefix)
