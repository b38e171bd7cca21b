"""A pair of instances with tiers over one store, which does what it was asked when a test, or chance, lets it."""

from __future__ import annotations

from .sim import SimWindow
from .sim_pair import SimPair, SimSide
from .sim_tiers import Tiered


class TieredSide(Tiered, SimSide):
    """Its clock is the pair's."""

    def __init__(self, pair: TieredPair, mode: str, window: SimWindow, host_pages: int, **changes) -> None:
        self.pair = pair
        given = {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        super().__init__(pair, mode, window, host_pages, **(given | changes))
        self.add_tiers(host_pages, pair.kept)

    @property
    def now(self) -> float:
        """The pair's."""
        return self.pair.now

    @now.setter
    def now(self, now: float) -> None:
        self.pair.now = max(now, self.pair.now)


class TieredPair(SimPair):
    """``kept``: what the store has; ``host_pages`` of each side's second tier."""

    def __init__(self, kept: dict[bytes, bytes] | None = None, host_pages: int = 64, **changes) -> None:
        self.kept = {} if kept is None else kept
        self.host_pages = host_pages
        self.now = 1.0
        super().__init__(**changes)

    def make_side(self, mode: str, window: SimWindow, **changes) -> TieredSide:
        return TieredSide(self, mode, window, self.host_pages, **changes)

    def submit(self, *args, trusted: bool = True, **kwargs) -> None:
        """Submit a request as a router of the cluster does. Its output may be shared with all users."""
        super().submit(*args, trusted=trusted, **kwargs)

    def moves(self):
        """Return everything that could happen next, including the work of the stores."""
        moves = super().moves()
        return moves + [s.serve_store for s in (self.prefill, self.decode) if s.store_queue or s.engine.probe_in == 0.0]

    @property
    def is_idle(self) -> bool:
        sides = (self.prefill, self.decode)
        return super().is_idle and not any(side.store_queue or side.tiers.store.fetching for side in sides)
