"""Forecasts that a prefill sends to decodes: the time to a prompt's first token on this instance."""

from __future__ import annotations

from ...messages.handover import MAX_DURATION_MS, Forecast
from ...scheduler.estimator import Estimator
from ...scheduler.first_token import NOTHING, Load
from ...scheduler.req import Req
from ...scheduler.tiers import Tiers
from .kv_sender import KVSender, SenderState


class PrefillEstimates:
    """Forecasts, one for each room, and the load that they may bring.

    Without that load, all decodes that ask at once would get the forecast of an empty queue. The store is probed before
    a forecast, because pages in the store need not be computed.
    """

    def __init__(self, estimator: Estimator, tiers: Tiers) -> None:
        self._estimator = estimator
        self._tiers = tiers
        self.expected = NOTHING
        """Load that may still come: prompts with a forecast and without a decision of their decode."""

    def tell(self, sender: KVSender, now: float) -> None:
        """Send the room's forecast to its decode, if the decode has asked for it and the client's request is here.

        Nothing is sent while the store is being asked. The forecast is the time to the first token in milliseconds.
        """
        req, decode = sender.req, sender.decode
        if not sender.asks or req is None or decode is None or req.is_ended:
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
            sender.expected_load = Load(1, uncached)
            self.expected += sender.expected_load
        sender.asks = False
        decode.peer.send(Forecast(decode.peer.epoch, decode.handover, min(ms, MAX_DURATION_MS)))

    def _looks(self, sender: KVSender, req: Req, known: int, ms: float, now: float) -> bool:
        """Return whether to wait for the store's answer, and ask the store if that was not done yet.

        ``known``: cached tokens. There is no waiting if the prompt, which takes ``ms`` milliseconds without the store,
        could be computed meanwhile.
        """
        if not sender.looked:
            sender.looked = True
            self._tiers.look(req, known, now)
        return self._tiers.store.index.is_looking(req.rid, now) and self._tiers.store.fetch_ms(0, now) < ms

    def _brought(self, req: Req, now: float) -> tuple[int, float]:
        """Return how many of the prompt's uncached tokens the store is expected to supply, and the wait for them in ms.

        ``req`` must have been looked up in the store. The wait may count although no token comes, as with a fetch that
        is too slow.
        """
        return self._tiers.store.estimate_fetch(
            req.rid, now, lambda tokens: self._estimator.compute_ms(req, tokens) / 1000
        )

    def is_decided(self, sender: KVSender) -> None:
        """Deduct the room's load from what is expected to come.

        Call this when its decode has decided, or the room has ended. Do nothing for a room without a forecast, or if it
        was done before.
        """
        self.expected -= sender.expected_load
        sender.expected_load = NOTHING
