"""Readouts of prompts in the steps that are planned: what ``messages/readout.py`` describes."""

from __future__ import annotations

from ..messages.base import pack_i32
from ..messages.readout import ReadoutSpec
from .req import Req


class PlannedReadouts:
    """Readouts of one step."""

    def __init__(self) -> None:
        self.specs: list[ReadoutSpec] = []
        """Specs of the step's message."""
        self.complete: list[Req] = []
        """Requests of the specs with ``is_last`` set, in their order. The step's result has a vector for each."""

    def add(self, req: Req, entry: int, end: int) -> None:
        """Add what the request's readout needs of ``entry``, which computes its tokens up to position ``end``."""
        readout = req.msg.readout
        is_last = end == req.prompt_len
        if not readout.is_wanted or not (is_last or readout.needs_every_token):
            return
        self.specs.append(ReadoutSpec(entry, readout.kind, is_last, pack_i32(readout.labels)))
        if is_last:
            self.complete.append(req)
