"""What a prefill tells the decodes that ask how long a prompt would take here."""

from __future__ import annotations

from ...messages.handover import MAX_DURATION_MS, Forecast
from ...scheduler.estimates.estimator import Estimator
from ...scheduler.estimates.first_token import NOTHING, Load
from ...scheduler.req import Req
from ...scheduler.tiers import KVTiers
from .kv_sender import KVSender, SenderState


class PrefillEstimates:
    """Answers once a room, and remembers what may come of its answers: else all that ask at once would be told that
    nobody is before them. What a store has of the prompt need not be computed; it is looked at first.
    """

    def __init__(self, estimator: Estimator, tiers: KVTiers | None) -> None:
        self._estimator = estimator
        self._tiers = tiers
        self.expected = NOTHING
        """Work that may still come: prompts with a forecast whose decode has not chosen yet."""

    def tell(self, sender: KVSender, now: float) -> None:
        """Answer the decode that asks for ``sender``'s room, if one does and both legs are here; not before the store
        has been looked at.
        """
        req, peer, handover = sender.req, sender.peer, sender.handover
        if not sender.asks or req is None or peer is None or handover is None or req.is_ended:
            return
        if sender.first is not None:
            ms = 0.0
        elif sender.state is SenderState.AHEAD:
            ms = self._estimator.first_token_ms(req, req.uncached, now)
        else:
            uncached = self._estimator.uncached(req)
            ms = self._estimator.first_token_ms(req, uncached, now, self.expected)
            if self._looks(sender, req, req.prompt_len - uncached, ms, now):
                return
            brought, fetch_ms = self._brought(req, now)
            if brought or fetch_ms:
                uncached -= brought
                ms = fetch_ms + self._estimator.first_token_ms(req, uncached, now, self.expected)
            sender.foretold = Load(1, uncached)
            self.expected += sender.foretold
        sender.asks = False
        peer.send(Forecast(peer.epoch, handover, min(ms, MAX_DURATION_MS)))

    def _looks(self, sender: KVSender, req: Req, known: int, ms: float, now: float) -> bool:
        """Whether the store is to say yet what it has; not if the prompt, which takes ``ms`` without it, could be
        computed meanwhile.
        """
        if self._tiers is None or self._tiers.store is None:
            return False
        if not sender.looked:
            sender.looked = True
            self._tiers.look(req, known, now)
        return self._tiers.store.sight.is_looking(req.rid, now) and self._tiers.store.fetch_ms(0, now) < ms

    def _brought(self, req: Req, now: float) -> tuple[int, float]:
        """How many tokens the store will bring, and the milliseconds that are waited for them."""
        if self._tiers is None or self._tiers.store is None:
            return 0, 0.0
        return self._tiers.store.foresee(req.rid, now, lambda tokens: self._estimator.compute_ms(req, tokens) / 1000)

    def is_decided(self, sender: KVSender) -> None:
        """Its decode has chosen, or the room is over."""
        self.expected -= sender.foretold
        sender.foretold = NOTHING
