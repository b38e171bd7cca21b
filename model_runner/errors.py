"""What can go wrong between a model's files and a worker that serves it; see also ``model_files/errors.py``."""

from __future__ import annotations

from ..model_files.errors import ModelError


class NotEnoughMemory(ModelError):
    """The KV pool does not fit beside the weights."""


class NotEnoughThreads(ModelError):
    """The system refuses to start the compute threads."""
