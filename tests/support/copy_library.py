"""A leased backend with ``memmove`` within a process as its library. On command it does whatever a library may do."""

from __future__ import annotations

import ctypes

from pdserve.disaggregation.errors import LinkLost
from pdserve.disaggregation.transfer.backends.leased_backend import Endpoint, Initiator, LeasedBackend
from pdserve.disaggregation.transfer.page_write import paired_spans


class CopyDoor(Endpoint):
    end = b"here"

    def __init__(self, library):
        self.library = library
        library.endpoints += 1

    def look(self):
        if self.library.endpoint_breaks:
            raise LinkLost("the endpoint broke")

    def close(self):
        self.library.endpoints -= 1


class CopyInitiator(Initiator):
    def __init__(self, library, groups, means):
        self.library, self.groups, self.addresses = library, groups, means.addresses
        library.initiators += 1

    def is_ready(self):
        if self.library.ready is None:
            raise LinkLost("nobody there")
        return self.library.ready

    def start(self, pages):
        if self.library.refuses:
            raise LinkLost("not taken")
        group = self.groups[pages.group]
        local, remote = paired_spans(pages, group)
        for (source, size), (target, _) in zip(local.tolist(), remote.tolist(), strict=True):
            ctypes.memmove(self.addresses[pages.group] + target, group.region.address + source, size)
        return "ticket"

    def fill(self, group, spans, there):
        if self.library.refuses:
            raise LinkLost("not taken")
        for source, size in spans.tolist():
            ctypes.memmove(there, self.groups[group].region.address + source, size)
            there += size
        return "ticket"

    def has_landed(self, write):
        assert write == "ticket"
        if self.library.fails:
            raise LinkLost("it failed")
        return not self.library.holds

    def close(self):
        self.library.initiators -= 1


class CopyLibrary(LeasedBackend):
    """``ready`` None: it never will be."""

    name = "copy"

    def __init__(self, epoch, **limits):
        super().__init__(epoch, "127.0.0.1", **limits)
        self.ready, self.refuses, self.fails, self.holds, self.endpoint_breaks = True, False, False, False, False
        self.endpoints = self.initiators = 0

    def endpoint(self):
        return CopyDoor(self)

    def _initiator(self, offer, means):
        return CopyInitiator(self, self.groups, means)
