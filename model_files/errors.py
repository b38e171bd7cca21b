"""What can go wrong between ``--model-path`` and a loaded model. No retry helps; each message says what does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

OTHER_WEIGHTS = "the files hold other weights than at the start; restart to serve those"
"""Message of ``InvalidWeights`` for weights that are loaded again."""


BROKEN_VALUES = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What may be raised where a value is of another type or size than it should be."""
MAX_MESSAGE = 500
"""Maximum characters of a message, which may have a value of any size."""
MAX_REASON = 200
"""Maximum characters of another library's message that is quoted."""


def brief(error: BaseException) -> str:
    """Return the message of an error as a part of a sentence: damaged files are quoted in full by some libraries."""
    return shortened(" ".join(str(error).split()).rstrip(".") or type(error).__name__, MAX_REASON)


def shortened(text: str, size: int = MAX_REASON) -> str:
    """Return the beginning of a text, which may be of any length."""
    return text if len(text) <= size else f"{text[:size]}…"


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file or folder in every ``ModelError`` that does not name it yet."""
    try:
        yield
    except ModelError as e:
        if str(path) in str(e):
            raise
        raise type(e)(f"{path}: {shortened(str(e), MAX_MESSAGE)}") from e


class KeyValues(Protocol):
    """Values of a file by key."""

    last_key: str
    """Key that was asked for last."""

    def get(self, key: str) -> Any:
        """Return the value of ``key``; None if it is missing."""


@contextmanager
def reading_keys(values: KeyValues) -> Iterator[None]:
    """Name the key in errors of values that can't be used: it is the one that was asked for last."""
    try:
        yield
    except KeyError:
        raise
    except BROKEN_VALUES as e:
        value = shortened(repr(values.get(values.last_key)))
        advice = "correct it, or download the file again"
        raise UnsupportedModel(f"{values.last_key} {value} can't be used: {brief(e)}; {advice}") from e


def whole(value: Any) -> int:
    """Return a value as an integer. Raises ``TypeError`` or ``ValueError`` for what ``int`` would round."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("it is no whole number")
    return int(value)


@contextmanager
def reading(file: Path, what: str) -> Iterator[None]:
    """Name ``file`` in all errors of reading its values, which may be of any type and size.

    ``what``: what a sentence says of the file if a value is not as it should be. Raises ``ModelError``.
    """
    try:
        with naming(file):
            yield
    except BROKEN_VALUES as e:
        reason = f"it lacks {e}" if isinstance(e, KeyError) else f"{type(e).__name__}: {brief(e)}"
        raise UnsupportedModel(f"{file} {what}: {reason}; correct it, or download it again") from e
