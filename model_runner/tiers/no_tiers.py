"""The tiers of a worker with no tier behind its KV pool."""

from __future__ import annotations

from ...messages.tiers import PagesCopied, TierCommand


class NoWorkerTiers:
    """The tiers of an instance without ``--enable-hierarchical-cache``: they are asked for nothing."""

    num_pages = 0

    def obey(self, command: TierCommand) -> PagesCopied | None:
        """Raise ``RuntimeError``: an instance without tiers gets no tier commands."""
        raise RuntimeError(f"an instance without tiers was sent {type(command).__name__}")
