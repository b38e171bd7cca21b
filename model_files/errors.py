"""What can go wrong between ``--model-path`` and a loaded model. No retry helps; each message says what does."""

from __future__ import annotations

OTHER_WEIGHTS = "the files hold other weights than at the start; restart to serve those"
"""Message of ``InvalidWeights`` for weights that are loaded again."""


class ModelError(Exception):
    """Base of this folder's errors: the model can't be served as asked."""


class ModelNotFound(ModelError):
    """``--model-path`` names nothing that is here or that can be fetched."""


class NotDownloaded(ModelNotFound):
    """The name may well be one of the hub's, but nothing of it is here, and it was not to be fetched."""


class UnsupportedModel(ModelError):
    """The model is there, but its architecture or one of its features has no implementation here."""


class InvalidWeights(ModelError):
    """The weights are damaged, incomplete, or do not fit the model's own config."""
