"""What a prefill tells the decodes that ask how long a prompt would take here."""

from __future__ import annotations

from ...messages.handover import MAX_DURATION_MS, Forecast
from ...scheduler.forecast import NOTHING, Load, PromptForecast
from .sending import KVSender, SenderState


class Foretelling:
    """Answers once a room, and remembers what may come of its answers: else all that ask at once would be told that
    nobody is before them.
    """

    def __init__(self, forecast: PromptForecast) -> None:
        self._forecast = forecast
        self.expected = NOTHING
        """Of prompts whose decodes have been told, and have neither asked for the KV nor declined."""

    def tell(self, sender: KVSender, now: float) -> None:
        """Answer the decode that asks for ``sender``'s room, if one does and both legs are here."""
        req, peer, handover = sender.req, sender.peer, sender.handover
        if not sender.asks or req is None or peer is None or handover is None or req.is_ended:
            return
        sender.asks = False
        if sender.first is not None:
            ms = 0.0
        elif sender.state is SenderState.AHEAD:
            ms = self._forecast.ms(req, req.uncached, now)
        else:
            uncached = self._forecast.uncached(req)
            ms = self._forecast.ms(req, uncached, now, self.expected)
            sender.foretold = Load(1, uncached)
            self.expected += sender.foretold
        peer.send(Forecast(peer.epoch, handover, min(ms, MAX_DURATION_MS)))

    def is_decided(self, sender: KVSender) -> None:
        """Its decode has chosen, or the room is over."""
        self.expected -= sender.foretold
        sender.foretold = NOTHING
