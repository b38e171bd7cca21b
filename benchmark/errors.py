"""What can go wrong while measuring."""

from __future__ import annotations


class BenchOptionsError(ValueError):
    """An option that can't work; the message says what to write instead."""


class BenchError(Exception):
    """Base of the errors that end a benchmark."""


class WorkloadError(BenchError):
    """A data set, trace or scenario file can't be used; the message names the file and the place in it."""


class ServerError(BenchError):
    """The server does not answer, or not as its backend should. The same command may work later."""


class PlotsUnavailable(BenchError):
    """Matplotlib is not installed."""


class RequestError(Exception):
    """One request failed. It is counted and shown, and the benchmark goes on."""
