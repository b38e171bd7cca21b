"""Packs a model's weights in this process."""

from __future__ import annotations

from dataclasses import dataclass

from .build import build
from .request import PackRequest


@dataclass(frozen=True)
class LocalBuilder:
    """Packs models in this process, with a number of threads."""

    threads: int = 1

    def build(self, request: PackRequest, fd: int) -> None:
        """Load the model in this process, and pack it into the empty file ``fd`` on ``threads`` threads."""
        build(request, request.name().key, fd, self.threads)
